"""What a job leaves for `headrace report`: a small file beside its state, with the figures of each of its runs."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from headrace.errors import ConfigError
from headrace.events import OrderChosen, PrefixCacheUsed, Stage
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.locations import as_os_errors
from headrace.observe.accounting.accountant import Account
from headrace.observe.accounting.device_limit import DeviceFigures
from headrace.observe.accounting.histogram import merge_histograms
from headrace.observe.reporting.report import Report
from headrace.wording import shown, spelled

VERSION = 1
_FORMAT = "headrace-report"
_MOST_RUNS = 8
"""Runs that are kept one by one; of older ones, the sums are."""
_MOST_REASONS = 40
_NUMBERS = ("ok", "failed", "skipped", "truncated", "wall_s", "tokens", "batches", "splits")
_OF_REPORT = (
    "ok",
    "failed",
    "skipped",
    "failures",
    "truncated",
    "wall_s",
    "tokens",
    "busy",
    "padding_efficiency",
    "batches",
    "splits",
    "close_reasons",
    "times",
    "advice",
    "advices",
    "lanes",
    "precision",
    "budget",
    "memory",
    "device",
    "prefix_cache",
    "order",
    "duplicates",
)

RunState: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run."""

    started_at: float
    """Seconds since 1970."""
    state: RunState
    """"running" until the run has ended, also of a run that was killed."""
    figures: Mapping[str, Any]
    """Fields of `Report`."""
    account: Account
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    runs: int = 1
    """How many runs it sums up."""

    def as_json(self) -> str:
        """The summary as JSON text."""
        return json.dumps({**{one.name: getattr(self, one.name) for one in fields(self)}, "account": _brief(self)})


def figures_of(report: Report) -> dict[str, object]:
    """The fields of a report that are kept, as JSON."""
    found: dict[str, object] = {}
    for name in _OF_REPORT:
        value = getattr(report, name)
        if isinstance(value, tuple):
            value = [asdict(one) for one in value]
        found[name] = asdict(value) if hasattr(value, "__dataclass_fields__") else value
    found["advice"] = spelled(report.advice, "flags")
    found["advices"] = [{**asdict(one), "text": spelled(one.text, "flags")} for one in report.advices]
    reasons = list(report.failures.items())
    rest = sum(count for _, count in reasons[_MOST_REASONS:])
    found["failures"] = dict(reasons[:_MOST_REASONS]) | ({"other reasons": rest} if rest else {})
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
            f"there is no report of {name or path}: {path.name} is missing in {path.parent}. Jobs of earlier versions "
            "do not write one, and a new job writes it after a second"
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


def _run(run: Mapping[str, Any]) -> RunSummary:
    account = Account(**run["account"])
    summary = RunSummary(**{**run, "account": account})
    _check_account(account)
    _check_figures(summary.figures)
    _numbers([summary.started_at, summary.runs])
    _texts([*summary.settings.values(), *summary.versions.values()])
    if summary.state not in get_args(RunState):
        raise ValueError(f"its state is {shown(summary.state, 40)}")
    return summary


def _check_account(account: Account) -> None:
    """Raises ValueError or TypeError where it is not as `Account` says."""
    _numbers([account.wall_s, account.fill_s, account.fixed_s or 0.0, *account.causes.values()])
    if not _numbers([account.bin_s])[0]:
        raise ValueError("its bins have no width")
    for row in account.bins.values():
        _numbers(row)
    for buckets in account.histograms.values():
        for bucket in buckets:
            _numbers(bucket, 4)
    for *numbers, reason in account.batches:
        _numbers(numbers, 6)
        _texts([reason])
    for stage, *numbers in account.chunks:
        _numbers(numbers, 3)
        if stage not in get_args(Stage):
            raise ValueError(f"it has a stage {shown(stage, 40)}")


def _check_figures(figures: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError where they are not as `figures_of` makes them."""
    _numbers([figures[name] for name in _NUMBERS])
    for name in ("times", "failures", "close_reasons"):
        _numbers(list(figures[name].values()))
    _texts([figures["advice"], *(advice["text"] for advice in figures["advices"])])
    for lane in figures["lanes"]:
        _numbers([lane[name] for name in ("records", "batches", "busy", "lost")])
        _texts([lane["worker"]])
    if figures["memory"] is not None:
        _numbers([figures["memory"]["peak"]])
    savings_of(figures)
    if figures.get("device") is not None:  # earlier versions did not write it
        device_of(figures)


def device_of(figures: Mapping[str, Any]) -> DeviceFigures | None:
    """What the device did, as `figures_of` has written it.

    Raises:
        ValueError, TypeError, KeyError: it has another form.
    """
    kept = figures.get("device")
    if kept is None:
        return None
    given = {name: value for name, value in kept.items() if value is not None}
    texts = ("dtype", "limit", "no_graphs")
    _texts([given.pop(name) for name in texts if name in given])
    _numbers(list(given.values()))
    return DeviceFigures(**kept)


def savings_of(figures: Mapping[str, Any]) -> tuple[Sequence[OrderChosen], int, PrefixCacheUsed | None]:
    """What order, equal records and a cache of prefixes have saved, as `figures_of` has written it.

    Raises:
        ValueError, TypeError: it has another form.
    """
    cache = figures.get("prefix_cache")
    orders, duplicates = figures.get("order", []), figures.get("duplicates", 0)  # earlier versions did not write these
    used = None if cache is None else PrefixCacheUsed(**cache)
    chosen = [OrderChosen(**one) for one in orders]
    _texts([text for one in chosen for text in (one.order, one.reason)])
    _numbers([duplicates, *(one.records for one in chosen)])
    if used is not None:
        _numbers([used.queries, used.hits, used.computed, used.generated, used.computed_s or 0.0])
    return chosen, duplicates, used


def _numbers(values: object, count: int | None = None) -> list[float]:
    """The values, if they are a list of finite numbers of at least 0.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(values, list) or (count is not None and len(values) != count):
        raise ValueError(f"it has no list of numbers where there should be one: {shown(values, 40)}")
    for value in values:
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"a number is not valid: {shown(value, 40)}")
    return values


def _texts(values: Iterable[object]) -> None:
    if not all(type(value) is str for value in values):
        raise ValueError("a text is not valid")


def kept(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """At most seven runs, so that there is room for one more; the first ones are summed up."""
    beyond = max(len(runs) - _MOST_RUNS + 2, 0)
    return [functools.reduce(_sum, runs[:beyond]), *runs[beyond:]] if beyond > 1 else list(runs)


def _sum(one: RunSummary, other: RunSummary) -> RunSummary:
    """Two runs as one, without what happened when."""
    added = (*_NUMBERS, "times", "failures", "close_reasons")
    figures = {**other.figures, **{name: _added(one.figures[name], other.figures[name]) for name in added}}
    figures["memory"] = {"peak": max(peak_of(one), peak_of(other))}
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
    return replace(other, started_at=one.started_at, figures=figures, account=account, runs=one.runs + other.runs)


def peak_of(run: RunSummary) -> float:
    """The most bytes that the process held; 0 if that was not measured."""
    known = run.figures["memory"]
    return max(float(known["peak"]) if known else 0.0, *run.account.bins.get("max memory", ()), 0.0)


def _added(one: Any, other: Any) -> Any:
    """The sum of two numbers, or of two mappings of them by name."""
    if not isinstance(one, Mapping):
        return one + other
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def write(path: Path, runs: Sequence[str]) -> None:
    """Replace the file by one with these runs, each as JSON text.

    Raises:
        OSError: it cannot be written.
    """
    head = f'{{"format": "{_FORMAT}", "version": {VERSION}, "runs": ['
    with atomic_file(path) as file:
        file.write((head + ",\n".join(runs) + "]}\n").encode())
