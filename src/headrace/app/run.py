"""`headrace.run`: run a bulk job from Python."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

from headrace.app.jobs.job import execute
from headrace.app.jobs.step_settings import parse_steps, refuse_beside_steps
from headrace.app.jobs.steps import prepare_steps, run_steps
from headrace.app.jobs.tables import TableKind, is_table_kind, refuse_unknown_kind, run_to_table
from headrace.batching.blocking import current_loop
from headrace.batching.dispatch.offload import BlockedLoopWarning
from headrace.engines.choosing.config import EngineConfig, merged_options, model_name
from headrace.engines.keywords import EngineKeywords
from headrace.errors import ConfigError, UnknownOptionError
from headrace.io.sinks.callback_sink import Receiver
from headrace.io.sources.selection import Selection
from headrace.jobs.pipeline.job import JobEnd, Limits, StopRequest
from headrace.jobs.settings import SETTING_NAMES, JobOptions, JobSettings, split_options
from headrace.observe.reporting.report import Report
from headrace.tracebacks import naming, public

T = TypeVar("T")


class RunOptions(EngineKeywords, JobOptions, total=False):
    """Options of the engine, and fields of `JobSettings` that are not parameters of `run`."""


class RunParameters(RunOptions, total=False):
    """All parameters of `run` but three, for its types."""

    task: str | None
    engine: str | Callable[..., object] | None
    steps: Sequence[Mapping[str, object]] | None
    model_column: str | None
    engine_options: Mapping[str, object] | None
    engine_process: bool
    engine_timeout_s: float | None
    pickled_weights: bool
    batch_tokens: int | None
    batch_size: int | None
    keep_columns: Sequence[str]
    limit: int | None
    sample: float | None
    sample_seed: int
    shard: tuple[int, int] | None
    limits: Limits | None
    progress: bool


@overload
def run(  # type: ignore[overload-overlap]  # of all texts, this one has a result of its own
    source: object, model: str | Path | None = None, *, sink: Literal["list"], **options: Unpack[RunParameters]
) -> list[dict[str, Any]]: ...


@overload
def run(
    source: object, model: str | Path | None = None, *, sink: TableKind, **options: Unpack[RunParameters]
) -> Any: ...


@overload
def run(
    source: object, model: str | Path | None = None, *, sink: str | Path | Receiver, **options: Unpack[RunParameters]
) -> Report: ...


@public
@naming
def run(  # noqa: PLR0913 - keyword-only settings of the front door, public API
    source: object,
    model: str | Path | None = None,
    *,
    sink: str | Path | Receiver,
    task: str | None = None,
    engine: str | Callable[..., object] | None = None,
    steps: Sequence[Mapping[str, object]] | None = None,
    model_column: str | None = None,
    engine_options: Mapping[str, object] | None = None,
    engine_process: bool = False,
    engine_timeout_s: float | None = None,
    pickled_weights: bool = False,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    keep_columns: Sequence[str] = (),
    limit: int | None = None,
    sample: float | None = None,
    sample_seed: int = 0,
    shard: tuple[int, int] | None = None,
    limits: Limits | None = None,
    progress: bool = True,
    **options: Unpack[RunOptions],
) -> Any:
    """Run a bulk job to its end and report where the time went; the same call again continues or finds it finished.

    With sink="pandas", "polars" or "arrow" it returns the finished table instead, a row for each record; with
    sink="list" a list of the rows, as dicts. In an `async def`, await asyncio.to_thread(headrace.run, ...): it blocks.

    Args:
        source: a file, folder, glob or address; or rows: a list, an iterable, an asynchronous one, a function that
            returns one, a `datasets.Dataset`, a table of pandas, polars, Arrow or DuckDB (docs/formats.md).
        model: a folder, an included model, or `org/name[@revision]` on the Hub (docs/engines.md); None for the default.
        sink: a .parquet or .jsonl file, or a folder of parts; records that fail go beside it, to `....errors.jsonl`.
            Or a database (docs/tables.md), "pandas", "polars", "arrow", "list", or a function that takes lists of rows.
        engine: a name such as "vllm", or one of your own: a function that takes a list of values and returns a list of
            outputs, or `module:name` of one (docs/engines.md), whose task is "custom" if none is named.
        steps: instead of one model, mappings with the settings of several: each sees earlier outputs (docs/jobs.md).
        model_column: with `steps`: the column in which each record names the model that computes it.
        engine_options: the engine's options as a mapping, for an engine whose options no type checker knows.
        pickled_weights: allow pickled weights, which can run code, in a downloaded model.
        shard, sample, sample_seed, limit: which rows, as `Selection` has them.
        progress: show a progress bar on stderr.
        options: of the job, as `JobSettings` has them, such as `listeners=[fn]`, called with each event; and of the
            engine, such as `max_model_len`.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or continue; finished records are kept.
    """
    job, known = split_options(options)
    config = EngineConfig(
        task, model_name(model), engine, merged_options(engine_options, known), batch_tokens, batch_size,
        engine_process, engine_timeout_s, pickled_weights,
    )  # fmt: skip
    limits = Limits() if limits is None else limits
    selection, kept = Selection(shard, sample, sample_seed, limit), _as_tuple(keep_columns)
    settings = JobSettings(source, sink, config, keep_columns=kept, selection=selection, limits=limits, **job)
    report = functools.partial(_run, steps=steps, model_column=model_column, progress=progress)
    return _off_loop(lambda: run_to_table(settings, report) if is_table_kind(sink) else report(settings))


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
    """Run a job; a limit or a misspelt setting that was taken for an option of the engine is explained."""
    try:
        return execute(settings, stop, progress=progress)
    except UnknownOptionError as error:
        if error.option not in {one.name for one in fields(Limits)}:
            raise UnknownOptionError(
                error.option, error.task, error.engine, error.known, error.owners, error.settings or SETTING_NAMES
            ) from None
        raise ConfigError(
            f"{error.option} is one of the job's limits: pass limits=Limits({error.option}=...), with "
            "`from headrace.jobs.pipeline.job import Limits`"
        ) from None


def _as_tuple(names: Sequence[str]) -> tuple[str, ...]:
    """Names as settings keep them; other values are left to the type check."""
    is_list = hasattr(names, "__iter__") and not isinstance(names, str)
    return tuple(names) if is_list else names  # type: ignore[return-value]


def _in_notebook() -> bool:
    """Whether IPython runs this process: its event loop waits for each cell anyhow."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _off_loop(call: Callable[[], T]) -> T:
    """Call directly, or on a new thread if this one runs an event loop, as in a notebook; warns elsewhere."""
    if current_loop() is None:
        return call()
    if not _in_notebook():
        warnings.warn(
            "headrace.run blocks the event loop that calls it until the job has ended: "
            "await asyncio.to_thread(headrace.run, ...) instead",
            BlockedLoopWarning,
            stacklevel=5,
        )
    with ThreadPoolExecutor(1, "headrace-run") as pool:
        return pool.submit(call).result()
