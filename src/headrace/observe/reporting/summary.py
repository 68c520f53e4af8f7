"""What a job leaves for `headrace report`: a small file beside its state, with the figures of each of its runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.events import MemoryUsed
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.locations import as_os_errors
from headrace.observe.accounting.accountant import Account
from headrace.observe.accounting.histogram import merge_histograms
from headrace.observe.accounting.typed_json import parse_object
from headrace.observe.reporting.figure import declared
from headrace.observe.reporting.run_figures import Report
from headrace.wording import spelled

VERSION = 1
_FORMAT = "headrace-report"
_MOST_RUNS = 8
"""Runs that are kept one by one; of older ones, the sums are."""
_MOST_REASONS = 40
_SUMMED_MEMORY: Mapping[str, Any] = {"limit": 0, "source": "", "at": 0.0}
"""What is not known of the memory of several runs; earlier versions left it out."""
RunState: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run."""

    started_at: float
    """Seconds since 1970."""
    state: RunState
    """"running" until the run has ended, also of a run that was killed."""
    figures: Report
    """Those of its figures that are kept; the others have their defaults."""
    account: Account
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    runs: int = 1
    """How many runs it sums up."""

    def as_json(self) -> str:
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return json.dumps({**plain, "figures": _plain(self.figures), "account": _brief(self)})


def summarize(
    report: Report, state: RunState, started_at: float, settings: Mapping[str, str], versions: Mapping[str, str]
) -> RunSummary:
    """The summary of a run that began at `started_at`, in seconds since 1970."""
    return RunSummary(started_at, state, figures_of(report), report.account, settings, versions)


def figures_of(report: Report) -> Report:
    """The figures that are kept of a report, with advice that names flags."""
    reasons = list(report.failures.items())
    rest = sum(count for _, count in reasons[_MOST_REASONS:])
    return Report(
        **{
            **{one.name: getattr(report, one.name) for one in declared(Report) if one.kept},
            "advice": spelled(report.advice, "flags"),
            "advices": tuple(replace(one, text=spelled(one.text, "flags")) for one in report.advices),
            "failures": dict(reasons[:_MOST_REASONS]) | ({"other reasons": rest} if rest else {}),
        }
    )


def _plain(figures: Report) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in declared(Report):
        if one.kept:
            value = getattr(figures, one.name)
            value = [asdict(entry) for entry in value] if isinstance(value, tuple) else value
            found[one.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return found


def _brief(summary: RunSummary) -> dict[str, object]:
    """The account with fewer digits. (`asdict` would copy every number first.)"""
    account = {one.name: getattr(summary.account, one.name) for one in fields(summary.account)}
    account["bins"] = {name: _rounded(row) for name, row in summary.account.bins.items()}
    for name in ("batches", "chunks"):
        account[name] = [_rounded(box) for box in account[name]]
    return account


def _rounded(values: Iterable[float | str]) -> list[float | str]:
    """The numbers with six digits after the point, which are microseconds."""
    return [round(value, 6) if type(value) is float else value for value in values]


def read(path: Path, name: object = None) -> list[RunSummary]:
    """The runs of a job, in order; `name` is what the user calls the job.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not as a job writes it.
    """
    try:
        text = as_os_errors(path.read_text)(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no report of {name or path}: {path.name} is missing in {path.parent}. A job writes "
            "it after a second; one without records has none"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return parse_runs(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not as a job writes it ({error}); run the job again to replace it") from error


def parse_runs(content: object) -> list[RunSummary]:
    """The runs in a parsed file.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is not as a job writes it.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("it is not a report")
    if content.get("version") != VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, this headrace reads version {VERSION}")
    return [_run(run) for run in content["runs"]]


def _run(run: Mapping[str, object]) -> RunSummary:
    figures = run["figures"]
    if isinstance(figures, dict):
        if missing := [one.name for one in declared(Report) if one.required and one.name not in figures]:
            raise ValueError(f"it lacks the figures {', '.join(missing)}")
        if isinstance(memory := figures["memory"], dict):
            figures["memory"] = {**_SUMMED_MEMORY, **memory}
    summary = parse_object(RunSummary, run)
    if not summary.account.bin_s:
        raise ValueError("its bins have no width")
    return summary


def kept(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """At most seven runs, so that there is room for one more; the first ones are summed up."""
    beyond = max(len(runs) - _MOST_RUNS + 2, 0)
    return [functools.reduce(_sum, runs[:beyond]), *runs[beyond:]] if beyond > 1 else list(runs)


def _sum(one: RunSummary, other: RunSummary) -> RunSummary:
    """Two runs as one, without what happened when."""
    figures = {
        figure.name: _added(getattr(one.figures, figure.name), getattr(other.figures, figure.name))
        for figure in declared(Report)
        if figure.kept and figure.adds == "sum"
    }
    known = other.figures.memory or one.figures.memory
    peak = round(max(peak_of(one), peak_of(other)))
    memory = MemoryUsed(**_SUMMED_MEMORY, peak=peak) if known is None else replace(known, peak=peak)
    names = {*one.account.histograms, *other.account.histograms}
    account = replace(
        other.account,
        wall_s=one.account.wall_s + other.account.wall_s,
        causes=_added(one.account.causes, other.account.causes),
        histograms={
            name: merge_histograms(run.account.histograms.get(name, ()) for run in (one, other)) for name in names
        },
        bins={},
        batches=(),
        chunks=(),
    )
    return replace(
        other,
        started_at=one.started_at,
        figures=replace(other.figures, **figures, memory=memory),
        account=account,
        runs=one.runs + other.runs,
    )


def peak_of(run: RunSummary) -> float:
    """The most bytes that the process held; 0 if that was not measured."""
    known = run.figures.memory
    return max(float(known.peak) if known else 0.0, *run.account.bins.get("max memory", ()), 0.0)


def _added(one: Any, other: Any) -> Any:
    """The sum of two numbers, of two mappings of them by name, or of two records of them by field."""
    if is_dataclass(one) and not isinstance(one, type):
        return replace(one, **_added(asdict(one), asdict(other)))
    if not isinstance(one, Mapping):
        return one + other
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def write(path: Path, runs: Sequence[str]) -> None:
    """Replace the file by one with these runs, each as JSON text. Raises OSError: it cannot be written."""
    head = f'{{"format": "{_FORMAT}", "version": {VERSION}, "runs": ['
    with atomic_file(path) as file:
        file.write((head + ",\n".join(runs) + "]}\n").encode())
