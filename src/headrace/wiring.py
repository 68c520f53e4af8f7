"""The one place that builds a job from settings, and `headrace.run`, its front door."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.batching.batcher import DynamicBatcher
from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.streaming import StreamBatcher
from headrace.engines import registry
from headrace.engines.base import BatchEngine, Engine, StepEngine, StreamEngine
from headrace.errors import ConfigError
from headrace.events import Event, Listener
from headrace.io.base import PartWriter, Source
from headrace.io.jsonl import JsonlWriter
from headrace.io.opening import open_source
from headrace.io.parquet import ParquetWriter
from headrace.jobs import columns
from headrace.jobs import run as main_path
from headrace.jobs.job import Job, JobEnd, Limits, StopRequest
from headrace.jobs.output import JobOutput
from headrace.jobs.stages import Work, infer, infer_one
from headrace.jobs.stepping import WorkSteps
from headrace.observe.progress import Progress
from headrace.observe.report import Report, ReportBuilder

T = TypeVar("T")

_WRITERS: Mapping[str, Callable[[str], PartWriter]] = {".jsonl": JsonlWriter, ".parquet": ParquetWriter}


@dataclass(frozen=True, slots=True)
class _Task:
    """What a task reads and writes where the user says nothing."""

    output: str
    input: str = "text"
    text_only: bool = True
    """Whether the input is a text; otherwise the engine judges what it is given."""
    pairs: Literal["never", "perhaps", "always"] = "never"


_TASKS = {
    "embed": _Task("embedding"),
    "classify": _Task("classification", pairs="perhaps"),
    "score": _Task("score", pairs="always"),
    "zero-shot": _Task("classification"),
    "generate": _Task("generation", text_only=False),  # a prompt, a chat or a whole request
    "image-classify": _Task("classification", "image", text_only=False),
    "image-embed": _Task("embedding", "image", text_only=False),
    "custom": _Task("output", text_only=False, pairs="perhaps"),
}


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What a user says about a job."""

    source: Path
    """A .jsonl file."""
    sink: Path
    """A .parquet or .jsonl file."""
    task: str = "embed"
    model: str | None = None
    """A folder or a known name; None is the task's default."""
    engine: str | None = None
    """The engine to use instead of the task's own: a name such as "onnx" or "vllm", or `module:name` of your own."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, such as `max_model_len`."""
    text_column: str | None = None
    """What to process; None for the column "text", or "image" where the task is one of images."""
    text_pair_column: str | None = None
    """The second text of a pair: what a cross-encoder scores the first with."""
    id_column: str | None = None
    """None: the column "id" where there is one, else the record's position."""
    batch_tokens: int | None = None
    """Budget of a batch in the engine's unit of cost, padding included; None is the engine's default."""
    batch_size: int | None = None
    """Most records of a batch; None is the engine's default."""
    limits: Limits = field(default_factory=Limits)
    overwrite: bool = False


def known_tasks() -> tuple[str, ...]:
    """What a job can do with its records."""
    return tuple(_TASKS)


def run(  # noqa: PLR0913 - keyword-only settings of the front door, each one a line in the caller's code
    source: str | Path,
    model: str | Path | None = None,
    *,
    sink: str | Path,
    task: str = "embed",
    engine: str | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    id_column: str | None = None,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    limits: Limits | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **engine_options: Any,
) -> Report:
    """Run a bulk job to its end and report where the time went; the same call again continues or finds it finished.

    Args:
        source: a .jsonl file.
        model: a local folder; None for the task's default model.
        sink: a .parquet or .jsonl file; records that fail go beside it, to `....errors.jsonl`.
        task: what to do, such as "embed"; docs/engines.md has a list.
        engine: the engine to use instead of the task's own: "onnx", "vllm", or `module:name` (docs/engines.md).
        text_column: the column that holds the text (default "text") or the image ("image").
        text_pair_column: the column of the second text, where pairs are scored or classified.
        id_column: the column that identifies a record; None for "id" where there is one, else the position.
        batch_tokens: most a batch may cost, in tokens with padding.
        batch_size: most records of a batch.
        limits: how far the job goes: error rate, workers, how often it commits.
        overwrite: begin anew, whatever is there.
        progress: show a progress bar on stderr.
        engine_options: options of the engine, such as `max_model_len` or `on_too_long`.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or go on; what it has finished is kept.
    """
    settings = JobSettings(
        source=Path(source),
        sink=Path(sink),
        task=task,
        model=None if model is None else str(model),
        engine=engine,
        engine_options=engine_options,
        text_column=text_column,
        text_pair_column=text_pair_column,
        id_column=id_column,
        batch_tokens=batch_tokens,
        batch_size=batch_size,
        limits=limits or Limits(),
        overwrite=overwrite,
    )
    return _off_loop(functools.partial(execute, settings, StopRequest(), progress=progress))[1]


def execute(settings: JobSettings, stop: StopRequest, *, progress: bool) -> tuple[JobEnd, Report]:
    """Build the job and run it to its end, or until it is asked to stop. Blocks.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or go on; what it has finished is kept.
    """
    report = ReportBuilder()
    listeners: list[Listener] = [report]
    plan = check(settings)
    engine = _build_engine(settings)
    try:
        if not progress:
            end = main_path.run(build(settings, plan, engine, stop, _Fan(listeners)))
        else:
            with Progress() as bar:
                listeners.append(bar)
                end = main_path.run(build(settings, plan, engine, stop, _Fan(listeners)))
    finally:
        engine.close()
    return end, report.build()


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be checked before a model is loaded."""

    source: Source
    columns: columns.Columns
    output: JobOutput


def check(settings: JobSettings) -> Plan:
    """Open the input and look at its first rows, and see that the output may be written. Writes nothing.

    Raises:
        ConfigError: a file, column or format cannot be used.
    """
    _check_limits(settings)
    task = _TASKS.get(settings.task)
    if task is None:
        raise ConfigError(f"unknown task {settings.task!r}; known: {', '.join(_TASKS)}")
    if task.pairs == ("always" if settings.text_pair_column is None else "never"):
        need = "takes pairs: name the column of" if task.pairs == "always" else "takes no pairs: leave out"
        raise ConfigError(f"task {settings.task!r} {need} the second text (text_pair_column)")
    make_writer = _WRITERS.get(settings.sink.suffix)
    if make_writer is None:
        raise ConfigError(f"cannot tell the format of output {settings.sink}: it must end in {' or '.join(_WRITERS)}")
    source = open_source(settings.source)
    output = JobOutput(settings.sink, make_writer(task.output))
    if settings.sink.exists() and settings.sink.samefile(settings.source):
        raise ConfigError(f"{settings.sink} is both input and output; choose another output")
    named = columns.Columns(
        settings.text_column or task.input, settings.id_column, task.text_only, settings.text_pair_column
    )
    found = columns.resolve(source, named)
    if not settings.overwrite:
        output.refuse_foreign_files()
    return Plan(source, found, output)


def build(settings: JobSettings, plan: Plan, engine: Engine[Any, Any], stop: StopRequest, listener: Listener) -> Job:
    """Put the parts together."""
    fingerprint = {
        "source": plan.source.describe(),
        "engine": engine.describe(),
        "task": settings.task,
        "text_column": plan.columns.text,
        "text_pair_column": plan.columns.pair,
        "id_column": plan.columns.id,
    }
    return Job(
        source=plan.source,
        columns=plan.columns,
        engine=engine,
        batcher=_batcher(settings, engine, stop, listener),
        output=plan.output,
        fingerprint=fingerprint,
        listener=listener,
        limits=settings.limits,
        stop=stop,
        overwrite=settings.overwrite,
    )


def _batcher(
    settings: JobSettings, engine: Engine[Any, Any], stop: StopRequest, listener: Listener
) -> DynamicBatcher[Work, Any]:
    """What feeds an engine of this type."""
    if isinstance(engine, StreamEngine):
        return StreamBatcher(
            functools.partial(infer_one, engine=engine, stop=stop),
            max_in_flight=engine.max_in_flight,
            cost_estimator=lambda work: work.cost,
            listener=listener,
        )
    if isinstance(engine, StepEngine):
        return ContinuousBatcher(
            WorkSteps(engine, stop),
            max_slots=engine.max_slots,
            max_cost=settings.batch_tokens or engine.max_cost,
            max_queue_size=max(2 * engine.max_slots, 64),
            on_error="isolate",
            listener=listener,
        )
    assert isinstance(engine, BatchEngine), "there is no fourth kind"
    size = settings.batch_size or engine.default_batch_size
    # An engine that counts records has as many as its budget: a larger batch is a larger budget.
    budget = settings.batch_tokens or max(engine.default_batch_cost, settings.batch_size or 0)
    window = _window(budget, size)
    return DynamicBatcher(
        functools.partial(infer, engine=engine, stop=stop),
        cost_estimator=lambda work: work.cost,
        target_batch_cost=budget,
        max_batch_size=size,
        batch_timeout_s=getattr(engine, "default_batch_delay_s", 0.05),  # of those whose own files set one
        max_queue_size=window,
        prefetch_batches=0,
        padded=engine.pads,
        length_bucketing=window,
        on_error="isolate",
        listener=listener,
    )


def _window(budget: float, batch_size: int) -> int:
    """How many records length bucketing may reorder: about 16 batches of short texts.

    More would pad a little less. But what finishes is scattered over the window, and only runs of neighbours can be
    committed: the wider the window, the more of a slow engine's work is lost by a kill.
    """
    typical_cost = 16
    return max(16 * min(batch_size, int(budget / typical_cost)), 256)


def _build_engine(settings: JobSettings) -> Engine[Any, Any]:
    engine: Engine[Any, Any] = registry.create(
        settings.task, settings.model, engine=settings.engine, **settings.engine_options
    )
    return engine


def _check_limits(settings: JobSettings) -> None:
    limits = settings.limits
    checks: tuple[tuple[str, float | None, bool, str], ...] = (
        ("batch_tokens", settings.batch_tokens, settings.batch_tokens is None or settings.batch_tokens >= 1, ">= 1"),
        ("batch_size", settings.batch_size, settings.batch_size is None or settings.batch_size >= 1, ">= 1"),
        ("max_error_rate", limits.max_error_rate, 0 <= limits.max_error_rate <= 1, "between 0 and 1"),
        ("workers", limits.workers, limits.workers >= 1, ">= 1"),
        ("part_records", limits.part_records, limits.part_records >= 1, ">= 1"),
        ("commit_interval_s", limits.commit_interval_s, limits.commit_interval_s > 0, "> 0"),
    )
    for name, value, good, allowed in checks:
        if not good:
            raise ConfigError(f"{name} is {value!r}; it must be {allowed}")


class _Fan:
    """One listener that tells several."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def _off_loop(call: Callable[[], T]) -> T:
    """Call here, or on a thread where this one runs an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1, "headrace-run") as pool:
        return pool.submit(call).result()
