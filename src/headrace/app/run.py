"""`headrace.run`: run a bulk job from Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar, Unpack, overload

from headrace.app.jobs.job import execute
from headrace.app.jobs.step_settings import parse_steps, refuse_beside_steps
from headrace.app.jobs.steps import prepare_steps, run_steps
from headrace.app.jobs.tables import AnyTable, ListedRow, TableKind, is_table_kind, refuse_unknown_kind, run_to_table
from headrace.app.keywords import RunKeywords
from headrace.app.running_job import RunningJob, refuse_cancelled
from headrace.argument_types import build
from headrace.batching.blocking import current_loop
from headrace.engines.choosing.config import EngineConfig, config_from
from headrace.errors import ConfigError, UnknownOptionError
from headrace.io.sinks.callback_sink import Receiver
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import SETTING_NAMES, JobSettings, refuse_flag
from headrace.observe.reporting.report import Report
from headrace.options import split
from headrace.tracebacks import naming, public

T = TypeVar("T")


@overload
def run(  # type: ignore[overload-overlap]  # of all texts, this one has a result of its own
    source: object,
    model: str | Path | None = None,
    *,
    sink: Literal["list"],
    progress: bool = True,
    **options: Unpack[RunKeywords],
) -> list[ListedRow]: ...


@overload
def run(
    source: object,
    model: str | Path | None = None,
    *,
    sink: TableKind,
    progress: bool = True,
    **options: Unpack[RunKeywords],
) -> AnyTable: ...


@overload
def run(
    source: object,
    model: str | Path | None = None,
    *,
    sink: str | Path | Receiver,
    progress: bool = True,
    **options: Unpack[RunKeywords],
) -> Report: ...


@public
@naming
def run(
    source: object,
    model: str | Path | None = None,
    *,
    sink: str | Path | Receiver,
    progress: bool = True,
    **settings: Unpack[RunKeywords],
) -> AnyTable:
    """Run a bulk job to its end and report where the time went; the same call again continues or finds it finished.

    With sink="pandas", "polars" or "arrow" it returns the finished table instead, a row for each record; with
    sink="numpy" the outputs as an array; with sink="list" a list of the rows, as dicts. It blocks, and is refused in
    an `async def`: await headrace.arun(...) there. `headrace.load` keeps the model for more jobs.

    Args:
        source: a file, folder, glob or address; or rows: a list, an iterable, an asynchronous one, a function that
            returns one, a `datasets.Dataset`, a table of pandas, polars, Arrow or DuckDB (docs/formats.md).
        model: a folder, an included model, or `org/name[@revision]` on the Hub (docs/engines.md); None for the default.
        sink: a .parquet or .jsonl file, or a folder of parts; records that fail go beside it, to `....errors.jsonl`.
            Or a database (docs/tables.md), "pandas", "polars", "arrow", "numpy", "list", or a function that takes
            lists of rows.
        progress: show a progress bar on stderr.
        settings: of the job and the engine, each as docs/options.md has it, such as `keep_columns=["title"]` or
            `listeners=[fn]`, called with each event; an engine's own options, such as `max_model_len`; or objects:
            `engine`, a function of your own or an engine with its options such as `headrace.Embedding(...)`;
            `limits`, a `headrace.Limits`; `selection`, a `headrace.Selection`. With `steps`, mappings with the
            settings of several models, each of which sees earlier outputs (docs/jobs.md), and `model_column`, the
            column in which each record names the model that computes it.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or continue; finished records are kept.
    """
    job = _prepared({"source": source, "sink": sink, "model": model, **settings}, progress=progress)
    return off_loop(lambda: job(StopRequest(), None))


@overload
def arun(  # type: ignore[overload-overlap]  # of all texts, this one has a result of its own
    source: object,
    model: str | Path | None = None,
    *,
    sink: Literal["list"],
    progress: bool = False,
    **options: Unpack[RunKeywords],
) -> RunningJob[list[ListedRow]]: ...


@overload
def arun(
    source: object,
    model: str | Path | None = None,
    *,
    sink: TableKind,
    progress: bool = False,
    **options: Unpack[RunKeywords],
) -> RunningJob[AnyTable]: ...


@overload
def arun(
    source: object,
    model: str | Path | None = None,
    *,
    sink: str | Path | Receiver,
    progress: bool = False,
    **options: Unpack[RunKeywords],
) -> RunningJob[Report]: ...


@public
@naming
def arun(
    source: object,
    model: str | Path | None = None,
    *,
    sink: str | Path | Receiver,
    progress: bool = False,
    **settings: Unpack[RunKeywords],
) -> RunningJob[AnyTable]:
    """Start a bulk job in the background: `report = await headrace.arun(...)`, or keep the job that it returns.

    The job has `cancel()`, `progress`, `is_done` and `result()`. Cancelling the task that awaits it cancels the job.

    Args:
        source: as `headrace.run`.
        model: as `headrace.run`.
        sink: as `headrace.run`.
        progress: also show a progress bar on stderr.
        settings: as `headrace.run`.

    Raises:
        ConfigError: a setting is unknown or given twice. What else `headrace.run` raises, the job raises when awaited.
    """
    return RunningJob(_prepared({"source": source, "sink": sink, "model": model, **settings}, progress=progress))


Change = Callable[[JobSettings], JobSettings]
"""Changes the settings of a job before it runs."""


def _prepared(given: dict[str, AnyTable], *, progress: bool) -> Callable[[StopRequest, Change | None], AnyTable]:
    """What runs a job with these keyword arguments, checked as far as can be without looking at its input."""
    steps, model_column = given.pop("steps", None), given.pop("model_column", None)
    job, engine = split(JobSettings, given)
    made = settings_of(job, config_from(engine))

    def run_it(stop: StopRequest, change: Change | None) -> AnyTable:
        report = functools.partial(_run, steps=steps, model_column=model_column, progress=progress, stop=stop)
        return to_sink(made if change is None else change(made), report)

    return run_it


def settings_of(job: Mapping[str, object], config: EngineConfig) -> JobSettings:
    """The settings of a job, of which those of a group may be given one by one."""
    given = {name: value for name, value in job.items() if value is not None or name not in ("limits", "selection")}
    names = {name: _as_tuple(given.get(name, ())) for name in ("keep_columns", "flatten")}
    return build(JobSettings, {**given, **names, "config": config})


def to_sink(settings: JobSettings, report: Callable[[JobSettings], Report]) -> AnyTable:
    """Run a job with `report`; returns what it returns, or the table or list that the sink names."""
    return run_to_table(settings, report) if is_table_kind(settings.sink) else report(settings)


def _run(
    settings: JobSettings,
    steps: Sequence[Mapping[str, object]] | None,
    model_column: str | None,
    *,
    progress: bool,
    stop: StopRequest,
) -> Report:
    check_sink(settings, progress)
    run_one = functools.partial(_execute, stop=stop, progress=progress)
    if steps is None:
        if model_column is not None:
            raise ConfigError("model_column needs steps: one for each model that records may name")
        end, report = run_one(settings)
    else:
        refuse_beside_steps(settings)
        last = run_steps(prepare_steps(settings, parse_steps(steps), model_column), run_one)
        end, report = last.end, last.report
    refuse_cancelled(end.state, end.records)
    return report.spoken()


def check_sink(settings: JobSettings, progress: object) -> None:
    """Check what no type checker has, and a sink that may be a misspelt kind of table.

    Raises:
        ConfigError: it cannot be used.
    """
    if not isinstance(progress, bool):
        raise ConfigError(
            f"progress is {progress!r:.60}; it must be True or False; for a function that is called with what happens, "
            "pass listeners=[function] (docs/live.md)"
        )
    refuse_unknown_kind(settings)


def _execute(settings: JobSettings, stop: StopRequest, *, progress: bool) -> tuple[JobEnd, Report]:
    """Run a job; a misspelt setting that was taken for an option of the engine is explained."""
    try:
        return execute(settings, stop, progress=progress)
    except UnknownOptionError as error:
        refuse_flag(error.option)
        raise UnknownOptionError(
            error.option, error.task, error.engine, error.known, error.owners, error.settings or SETTING_NAMES
        ) from None


def _as_tuple(names: object) -> object:
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else names


def _in_notebook() -> bool:
    """Whether IPython runs this process: its event loop waits for each cell anyhow."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def off_loop(call: Callable[[], T]) -> T:
    """Call directly, or on a new thread if a notebook's event loop runs on this one.

    Raises:
        ConfigError: another event loop runs here, which the job would block to its end.
    """
    if current_loop() is None:
        return call()
    if not _in_notebook():
        raise ConfigError(
            "this call blocks, and an event loop runs on this thread: await headrace.arun(...) in place of "
            "headrace.run, or arun(...) and submit(...) of a loaded model"
        )
    with ThreadPoolExecutor(1, "headrace-run") as pool:
        return pool.submit(call).result()
