"""`headrace.run`: run a bulk job from Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

from headrace.app.jobs.job import execute
from headrace.app.jobs.step_settings import parse_steps, refuse_beside_steps
from headrace.app.jobs.steps import prepare_steps, run_steps
from headrace.app.jobs.tables import TableKind, is_table_kind, refuse_unknown_kind, run_to_table
from headrace.app.keywords import RunKeywords
from headrace.argument_types import build
from headrace.batching.blocking import current_loop
from headrace.engines.choosing.config import config_from
from headrace.errors import ConfigError, UnknownOptionError
from headrace.io.sinks.callback_sink import Receiver
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import SETTING_NAMES, JobSettings
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
) -> list[dict[str, Any]]: ...


@overload
def run(
    source: object,
    model: str | Path | None = None,
    *,
    sink: TableKind,
    progress: bool = True,
    **options: Unpack[RunKeywords],
) -> Any: ...


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
) -> Any:
    """Run a bulk job to its end and report where the time went; the same call again continues or finds it finished.

    With sink="pandas", "polars" or "arrow" it returns the finished table instead, a row for each record; with
    sink="list" a list of the rows, as dicts. It blocks, and is refused in an `async def`: await
    asyncio.to_thread(headrace.run, ...) there.

    Args:
        source: a file, folder, glob or address; or rows: a list, an iterable, an asynchronous one, a function that
            returns one, a `datasets.Dataset`, a table of pandas, polars, Arrow or DuckDB (docs/formats.md).
        model: a folder, an included model, or `org/name[@revision]` on the Hub (docs/engines.md); None for the default.
        sink: a .parquet or .jsonl file, or a folder of parts; records that fail go beside it, to `....errors.jsonl`.
            Or a database (docs/tables.md), "pandas", "polars", "arrow", "list", or a function that takes lists of rows.
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
    given: dict[str, Any] = {"source": source, "sink": sink, "model": model, **settings}
    steps, model_column = given.pop("steps", None), given.pop("model_column", None)
    job, engine = split(JobSettings, given)
    job = {name: value for name, value in job.items() if value is not None or name not in ("limits", "selection")}
    kept = _as_tuple(job.get("keep_columns", ()))
    made = build(JobSettings, {**job, "keep_columns": kept, "config": config_from(engine)})
    report = functools.partial(_run, steps=steps, model_column=model_column, progress=progress)
    return _off_loop(lambda: run_to_table(made, report) if is_table_kind(sink) else report(made))


def _run(
    settings: JobSettings, steps: Sequence[Mapping[str, object]] | None, model_column: str | None, *, progress: bool
) -> Report:
    if not isinstance(progress, bool):
        raise ConfigError(
            f"progress is {progress!r:.60}; it must be True or False; for a function that is called with what happens, "
            "pass listeners=[function] (docs/live.md)"
        )
    refuse_unknown_kind(settings)
    run_one = functools.partial(_execute, stop=StopRequest(), progress=progress)
    if steps is None:
        if model_column is not None:
            raise ConfigError("model_column needs steps: one for each model that records may name")
        return run_one(settings)[1].spoken()
    refuse_beside_steps(settings)
    return run_steps(prepare_steps(settings, parse_steps(steps), model_column), run_one).report.spoken()


def _execute(settings: JobSettings, stop: StopRequest, *, progress: bool) -> tuple[JobEnd, Report]:
    """Run a job; a misspelt setting that was taken for an option of the engine is explained."""
    try:
        return execute(settings, stop, progress=progress)
    except UnknownOptionError as error:
        raise UnknownOptionError(
            error.option, error.task, error.engine, error.known, error.owners, error.settings or SETTING_NAMES
        ) from None


def _as_tuple(names: object) -> object:
    """Names as settings keep them; other values are left to the type check."""
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else names


def _in_notebook() -> bool:
    """Whether IPython runs this process: its event loop waits for each cell anyhow."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _off_loop(call: Callable[[], T]) -> T:
    """Call directly, or on a new thread if a notebook's event loop runs on this one.

    Raises:
        ConfigError: another event loop runs here, which the job would block to its end.
    """
    if current_loop() is None:
        return call()
    if not _in_notebook():
        raise ConfigError(
            "headrace.run blocks, and an event loop runs on this thread: await asyncio.to_thread(headrace.run, ...) "
            "instead"
        )
    with ThreadPoolExecutor(1, "headrace-run") as pool:
        return pool.submit(call).result()
