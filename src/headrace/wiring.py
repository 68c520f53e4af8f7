"""The one place that builds a job from settings, and `headrace.run`, its front door."""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.batching.batcher import Batcher
from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.streaming import StreamBatcher
from headrace.engines import registry
from headrace.engines.base import BatchEngine, Engine, StepEngine, StreamEngine
from headrace.engines.custom import load_factory
from headrace.errors import ConfigError
from headrace.events import Event, Listener
from headrace.io import openai
from headrace.io.base import PartWriter, Source
from headrace.io.handing import HandingWriter, Receiver
from headrace.io.ids import UniqueIds
from headrace.io.opening import open_source
from headrace.io.selection import SelectedSource, Selection
from headrace.io.targets import Target, find_target, openai_writer, refuse_output_in_input
from headrace.jobs import columns
from headrace.jobs import run as main_path
from headrace.jobs.forecast import Forecast, Shape, check_room, forecast
from headrace.jobs.job import Feeding, Job, JobEnd, Limits, StopRequest
from headrace.jobs.output import Beginning, JobOutput
from headrace.jobs.settings import TASKS, Task, as_json, check_numbers
from headrace.jobs.settings import JobSettings as JobSettings
from headrace.jobs.settings import known_tasks as known_tasks
from headrace.jobs.stages import Work, infer, infer_one
from headrace.jobs.stepping import WorkSteps
from headrace.jobs.survey import Survey, survey
from headrace.jobs.usercode import UserCode, WorkerKind
from headrace.observe.progress import Progress
from headrace.observe.report import Report, ReportBuilder

T = TypeVar("T")


_OPENAI_TASKS = {openai.EMBEDDINGS: "embed", openai.COMPLETIONS: "generate", openai.CHAT: "generate"}


def run(  # noqa: PLR0913 - keyword-only settings of the front door, each one a line in the caller's code
    source: Any,
    model: str | Path | None = None,
    *,
    sink: str | Path | Receiver,
    task: str | None = None,
    engine: str | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    id_column: str | None = None,
    prompt_template: str | None = None,
    keep_columns: Sequence[str] = (),
    limit: int | None = None,
    sample: float | None = None,
    sample_seed: int = 0,
    shard: tuple[int, int] | None = None,
    input_format: str | None = None,
    output_format: str | None = None,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    limits: Limits | None = None,
    overwrite: bool = False,
    ignore_changes: bool = False,
    retry: bool = False,
    prepare: Callable[[Any], Any] | str | None = None,
    finish: Callable[[Any, Any], Any] | str | None = None,
    worker_kind: WorkerKind = "auto",
    dedupe: bool = False,
    progress: bool = True,
    **engine_options: Any,
) -> Report:
    """Run a bulk job to its end and report where the time went; the same call again continues or finds it finished.

    Args:
        source: a file, folder, glob or address; or rows: a list, an iterable, an asynchronous one, a function that
            returns one, a `datasets.Dataset` (docs/formats.md).
        model: a local folder; None for the task's default model.
        sink: a .parquet or .jsonl file, or a folder of parts; records that fail go beside it, to `....errors.jsonl`.
            Or a function that is called with lists of rows.
        shard: (i, n): take every n-th row from the i-th on.
        sample: take each row with this probability, the same rows for the same `sample_seed`.
        limit: take the first so many rows.
        progress: show a progress bar on stderr.
        engine_options: options of the engine, such as `max_model_len` or `on_too_long`.

    All others are as `JobSettings` has them.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or go on; what it has finished is kept.
    """
    given = dict(locals())
    given |= {"model": None if model is None else str(model), "limits": limits or Limits()}
    given |= {"keep_columns": tuple(keep_columns), "selection": Selection(shard, sample, sample_seed, limit)}
    for name in ("progress", "shard", "sample", "sample_seed", "limit"):
        del given[name]
    return _off_loop(functools.partial(execute, JobSettings(**given), StopRequest(), progress=progress))[1]


def execute(
    settings: JobSettings, stop: StopRequest, *, progress: bool, on_survey: Callable[[Survey], None] | None = None
) -> tuple[JobEnd, Report]:
    """Build the job and run it to its end, or until it is asked to stop. Blocks.

    Args:
        settings: what to do.
        stop: how to be asked.
        progress: show a progress bar on stderr.
        on_survey: told what the first rows are like, if there is anything to do.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or go on; what it has finished is kept.
    """
    plan = check(settings)
    return carry_out(plan, build_engine(plan.settings), stop, progress=progress, on_survey=on_survey)


def carry_out(
    plan: Plan,
    engine: Engine[Any, Any],
    stop: StopRequest,
    *,
    progress: bool,
    on_survey: Callable[[Survey], None] | None = None,
    batcher: Callable[[Listener], Feeding] | None = None,
) -> tuple[JobEnd, Report]:
    """Run what `check` has planned, then close the engine; `batcher` makes what feeds one that is elsewhere. Blocks.

    Raises:
        JobError: the job cannot start or go on; what it has finished is kept.
    """
    report = ReportBuilder()
    listeners: list[Listener] = [report]
    fan = Fan(listeners)
    try:
        job = build(plan, engine, stop, fan, batcher(fan) if batcher is not None else None)
        if on_survey is not None and not (plan.settings.retry or plan.output.is_finished):
            on_survey(survey(replace(job, source=plan.source), spread=False))
        if not progress:
            end = main_path.run(job)
        else:
            with Progress() as bar:
                listeners.append(bar)
                end = main_path.run(job)
    finally:
        engine.close()
    return end, report.build()


def rehearse(settings: JobSettings) -> tuple[Survey, Forecast]:
    """What the job would be, without running it: nothing is written. Blocks for some batches.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used.
        JobError: the input cannot be read.
    """
    plan = check(settings)
    engine = build_engine(plan.settings)
    try:
        job = build(plan, engine, StopRequest(), Fan(()))
        found = survey(replace(job, source=plan.source), spread=True)
        return found, forecast(job, found, shape_of(plan.settings, engine), is_folder=plan.output.is_folder)
    finally:
        plan.user.close()
        engine.close()


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be checked before a model is loaded."""

    settings: JobSettings
    """With the task that the input decided."""
    source: Source
    columns: columns.Columns
    output: JobOutput
    user: UserCode


def check(settings: JobSettings) -> Plan:
    """Open the input and look at its first rows, and see that the output may be written. Writes nothing.

    Raises:
        ConfigError: a file, column or format cannot be used.
    """
    check_numbers(settings)
    target = _target(settings)
    if isinstance(settings.source, (str, Path)):
        refuse_output_in_input(settings.source, target)
    source = open_source(settings.source, settings.input_format)
    url = openai.url_of(source)
    settings = replace(settings, task=settings.task or _OPENAI_TASKS.get(url or "", "embed"))
    task = TASKS.get(settings.task or "")
    if task is None:
        raise ConfigError(f"unknown task {settings.task!r}; known: {', '.join(TASKS)}")
    if task.pairs == ("always" if settings.text_pair_column is None else "never"):
        need = "takes pairs: name the column of" if task.pairs == "always" else "takes no pairs: leave out"
        raise ConfigError(f"task {settings.task!r} {need} the second text (text_pair_column)")
    if not settings.selection.is_all:
        source = SelectedSource(source, settings.selection)
    output = JobOutput(target, _writer(settings, target, task, url))
    named = columns.Columns(
        settings.text_column or ("body" if url and not task.text_only else task.input),
        settings.id_column,
        task.text_only,
        settings.text_pair_column,
        settings.prompt_template,
        ("model",) if url else settings.keep_columns,  # which the answer to a request repeats
    )
    user = UserCode(
        _function(settings.prepare), _function(settings.finish), settings.worker_kind, settings.limits.workers
    )
    found = columns.resolve(source, named, user if settings.prepare else None)
    if task.output in found.keep:
        raise ConfigError(f"cannot keep column {task.output!r}: the output of task {settings.task!r} is named so")
    check_room(output.target)
    if not (settings.overwrite or settings.retry):
        output.refuse_foreign_files()
    return Plan(settings, source, found, output, user)


def _target(settings: JobSettings) -> Target:
    if not callable(settings.sink):
        return find_target(settings.sink, settings.output_format)
    # What a job knows of itself has to be somewhere, though nothing can be resumed from it.
    place = Path(tempfile.mkdtemp(prefix="headrace-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Target(place, is_folder=True, format="rows")


def _writer(settings: JobSettings, target: Target, task: Task, url: str | None) -> PartWriter:
    if callable(settings.sink):
        return HandingWriter(settings.sink, task.output)
    if url is None:
        return target.writer(task.output)
    if settings.task != _OPENAI_TASKS[url]:
        raise ConfigError(f"the batch file asks for {url}, which is task {_OPENAI_TASKS[url]!r}, not {settings.task!r}")
    if settings.keep_columns:
        raise ConfigError("the answer to an OpenAI batch file has columns of its own; leave keep_columns away")
    return openai_writer(target, url)


def build(
    plan: Plan,
    engine: Engine[Any, Any],
    stop: StopRequest,
    listener: Listener,
    batcher: Feeding | None = None,
) -> Job:
    """Put the parts together; `batcher` is for an engine that is shared with others."""
    settings = plan.settings
    fingerprint = {
        "source": plan.source.describe(),
        "engine": engine.describe(),
        "task": settings.task,
        "text_column": plan.columns.text,
        "text_pair_column": plan.columns.pair,
        "id_column": plan.columns.id,
        "prompt_template": plan.columns.template,
        "keep_columns": list(plan.columns.keep),
        **plan.user.describe(),
    }
    identity = None if settings.retry else plan.columns.id
    return Job(
        # Ids that come twice would leave it open which output belongs to which record; a retry knows that none does.
        source=UniqueIds(plan.source, identity, lambda: plan.output.scratch) if identity else plan.source,
        columns=plan.columns,
        engine=engine,
        batcher=batcher or build_batcher(settings, engine, stop, listener),
        output=plan.output,
        begun=Beginning(fingerprint, as_json(settings), _changes(settings)),
        listener=listener,
        limits=settings.limits,
        stop=stop,
        user=plan.user,
        dedupe=settings.dedupe,
        retry=settings.retry,
    )


def build_batcher(
    settings: JobSettings, engine: Engine[Any, Any], stop: StopRequest, listener: Listener
) -> Batcher[Work, Any]:
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
    shape = shape_of(settings, engine)
    window = _window(shape.budget, shape.size)
    return DynamicBatcher(
        functools.partial(infer, engine=engine, stop=stop),
        cost_estimator=lambda work: work.cost,
        target_batch_cost=shape.budget,
        max_batch_size=shape.size,
        batch_timeout_s=getattr(engine, "default_batch_delay_s", 0.05),  # of those whose own files set one
        max_queue_size=window,
        prefetch_batches=0,
        padded=engine.pads,
        length_bucketing=window if engine.pads else False,  # without padding, company of like length is no gain
        on_error="isolate",
        listener=listener,
    )


def shape_of(settings: JobSettings, engine: Any) -> Shape:
    """What a batch may be; where an engine batches by itself, nothing that says anything."""
    size: int = getattr(engine, "default_batch_size", 1) if settings.batch_size is None else settings.batch_size
    # An engine that counts records has as many as its budget: a larger batch is a larger budget.
    budget = settings.batch_tokens or max(getattr(engine, "default_batch_cost", 1), settings.batch_size or 0)
    return Shape(budget, size, getattr(engine, "pads", False))


def _window(budget: float, batch_size: int) -> int:
    """How many records length bucketing may reorder: about 16 batches of short texts.

    More would pad a little less. But what finishes is scattered over the window, and only runs of neighbours can be
    committed: the wider the window, the more of a slow engine's work is lost by a kill.
    """
    typical_cost = 16
    return max(16 * min(batch_size, int(budget / typical_cost)), 256)


def build_engine(settings: JobSettings) -> Engine[Any, Any]:
    """Load the model. Blocks.

    Raises:
        ConfigError: no such task, engine, model or option.
        EngineError: the model cannot be loaded.
    """
    engine: Engine[Any, Any] = registry.create(
        settings.task or "", settings.model, engine=settings.engine, **settings.engine_options
    )
    return engine


def _changes(settings: JobSettings) -> Literal["refuse", "ignore", "overwrite"]:
    return "overwrite" if settings.overwrite else "ignore" if settings.ignore_changes else "refuse"


def _function(given: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    return load_factory(given) if isinstance(given, str) else given


class Fan:
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
