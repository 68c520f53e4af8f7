"""Build a job from settings and run it."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.app.jobs.budgets import follow, follow_steps, starting_budget
from headrace.app.jobs.describe import WorkerRoom, describe, host_of
from headrace.app.jobs.device_use import watch_device
from headrace.app.jobs.downloads import downloaded_model
from headrace.app.jobs.order import compared_prompts, order_plan
from headrace.app.jobs.plan import Plan as Plan
from headrace.app.jobs.plan import check as check
from headrace.app.jobs.plan import finished_before, prepares_alone, start_mode
from headrace.app.jobs.prefix_caching import prefix_cache_listener
from headrace.app.jobs.tracing import job_spans
from headrace.app.jobs.tuning import Tuned, in_dtype, load, tune, wants_sample
from headrace.app.jobs.vllm_arguments import found_size
from headrace.batching.batcher import Batcher
from headrace.concurrency.short_turns import short_turns
from headrace.device.cuda import cuda_devices
from headrace.engines.base import Engine
from headrace.engines.capabilities import COLUMNS, PREPARING, TUNING
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.failover import with_failover
from headrace.engines.profile import BatcherSettings, EngineProfile, profile_of
from headrace.engines.requests.formed import FormedRequest
from headrace.engines.requests.structure import NO_FORMS
from headrace.errors import ConfigError, RecordError, attempted, text_of
from headrace.events import (
    BatchFormed,
    Event,
    InputLeftOut,
    JobDone,
    JobStarted,
    Listener,
    StepSizeChanged,
)
from headrace.io.sinks.callback_sink import CallbackWriter
from headrace.io.sources.joined import JoinedSource
from headrace.io.sources.unique_ids import refuse_without_numpy
from headrace.io.storage.locations import as_named
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.infer import WorkCalls
from headrace.jobs.pipeline.job import BatcherPort, Job, JobEnd, StopRequest
from headrace.jobs.pipeline.preparers import EarlyProcesses, PreparerPool
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.forecast import Forecast, forecast
from headrace.jobs.planning.survey import Survey, survey, survey_prompts
from headrace.jobs.settings import JobSettings as JobSettings
from headrace.jobs.state.in_flight import InFlightFile, warn_of_crash
from headrace.jobs.state.output import LIVE, REPORT
from headrace.observe.exporters.trace import TraceWriter
from headrace.observe.live.progress import Progress
from headrace.observe.live.recorder import Recorder
from headrace.observe.reporting.report import Report, ReportBuilder
from headrace.processes.portable import UnsendableError
from headrace.wording import spelled

logger = logging.getLogger("headrace")

_FEW_BYTES = 1 << 20
"""An input of less is prepared before processes have started."""


def execute(
    settings: JobSettings,
    stop: StopRequest,
    *,
    progress: bool,
    on_survey: Callable[[Survey], None] | None = None,
    on_load: Callable[[JobSettings], None] | None = None,
) -> tuple[JobEnd, Report]:
    """Build the job and run it to its end, or until it is asked to stop. Blocks.

    Args:
        on_survey: called with a survey of the first rows, unless the job is finished.
        on_load: called with the settings before the model is loaded.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used; nothing was written.
        JobError: the job cannot start or continue; finished records are kept.
    """
    began = time.monotonic()
    with check(settings) as plan:
        if (end := already_finished(plan)) is not None:
            return end
        with plan.output.locked():  # before loading: only one of two processes need do it
            warn_of_crash(plan.output, overwrite=plan.settings.overwrite)
            if on_load is not None:
                on_load(plan.settings)
            with early_processes(plan) as early:
                plan = replace(plan, early=early)
                return carry_out(plan, load(plan), stop, progress=progress, on_survey=on_survey, began=began)


@dataclass(frozen=True, slots=True)
class SharedBatcher:
    """The batcher of a loaded model, which serves others beside the job."""

    batcher: Batcher[Work, object]
    run_on: Callable[[Coroutine[object, None, bool]], bool]
    """Runs a job on the batcher's event loop, and blocks until it ends."""
    heard: Callable[[Listener], contextlib.AbstractContextManager[None]]
    """Sends the events of the batcher to a listener while a body runs."""


def carry_out(  # noqa: PLR0913 - keyword-only, and each caller leaves most of them out
    plan: Plan,
    engine: Engine,
    stop: StopRequest,
    *,
    progress: bool,
    on_survey: Callable[[Survey], None] | None = None,
    batcher: Callable[[Listener], BatcherPort] | None = None,
    workers: WorkerRoom | None = None,
    began: float | None = None,
    shared: SharedBatcher | None = None,
) -> tuple[JobEnd, Report]:
    """Run a plan from `check`, then close the engine unless it is `shared`. Blocks.

    `batcher` makes the batcher of a remote engine, and `workers` says how many workers that could have. `began` is when
    the job began, on the monotonic clock, before its model was loaded.

    Raises:
        JobError: the job cannot start or continue; finished records are kept.
    """
    began = began or time.monotonic()
    host = host_of(plan, tuned_profile(plan.settings, engine), workers, preparers_of(plan.settings, engine))
    report = ReportBuilder(began, host)
    listeners: list[Listener] = [report, *map(Guarded, plan.settings.listeners)]
    broadcast = Broadcast(listeners)
    kept = contextlib.ExitStack()
    try:
        remote = batcher(broadcast) if batcher is not None else None
        job = build(plan, engine, stop, broadcast, remote, shared, kept=kept)
        works = not plan.settings.retry and (plan.settings.overwrite or not plan.output.is_finished)
        # A shared model is tuned when it is loaded.
        tuned = _tuned(plan, engine, job if works else None, on_survey) if shared is None else Tuned(engine, None)
        if tuned.engine is not engine:
            engine = tuned.engine
            job = build(plan, engine, stop, broadcast, kept=kept)
        follower = None if shared is not None else follow(plan.settings.config, engine, job.batcher, broadcast)
        steps = None if shared is not None else follow_steps(plan.settings.config, engine, job.batcher, broadcast)
        watches = (follower, steps, watch_device(engine, broadcast), prefix_cache_listener(engine, broadcast))
        with (
            short_turns() if on_gpu(engine) else contextlib.nullcontext(),
            _tracing(plan, began) as trace,
            job_spans(plan, began) as spans,
            Progress() if progress else contextlib.nullcontext() as bar,
            shared.heard(broadcast) if shared is not None else contextlib.nullcontext(),
        ):
            listeners += [listener for listener in (*watches, trace, spans, bar) if listener is not None]
            if (budget := plan.settings.config.batch_tokens) is not None:
                listeners.append(BudgetWarning(budget))
            described = describe(plan, engine, tuned_profile(plan.settings, engine), began)
            broadcast(described)
            if tuned.precision is not None:
                broadcast(tuned.precision)
            if shared is None and (size := found_size(plan.settings.config)) is not None:
                broadcast(StepSizeChanged(size.answers, size.tokens, time.monotonic()))
            listeners.append(Recorder(report, plan.output.work / REPORT, plan.output.work / LIVE, described))
            for left_out in plan.left_out:
                broadcast(InputLeftOut(left_out, time.monotonic()))
            if works and (compared := compared_prompts(plan, job)) is not None:
                broadcast(compared)
            end = main_path.run(job)
    finally:
        kept.close()
        if shared is None:
            _close(engine)
        plan.output.writer.close()
    return end, _placed(report.build(), plan)


def _tuned(plan: Plan, engine: Engine, job: Job | None, on_survey: Callable[[Survey], None] | None) -> Tuned:
    """The engine in the dtype that suits the records of the job, which are sampled if that is wanted.

    `job` is None if there is nothing to sample.
    """
    found = None
    if job is not None and (on_survey or wants_sample(plan, engine)):
        found = _survey(plan, job, spread=False)
        if on_survey is not None:
            on_survey(found)
    return tune(plan, engine, found, tuned_profile(plan.settings, engine))


def _tracing(plan: Plan, began: float) -> contextlib.AbstractContextManager[TraceWriter | None]:
    if plan.settings.trace is None:
        return contextlib.nullcontext()
    return TraceWriter(Path(plan.settings.trace), began, as_named(plan.output.target))


def _close(engine: Engine) -> None:
    if (error := attempted(engine.close)) is not None:
        logger.warning("headrace: closing the engine raised %s: %s", type(error).__name__, text_of(error))


def _placed(report: Report, plan: Plan) -> Report:
    """The report with the names of the model and of the output."""
    output = plan.output
    is_file = not isinstance(output.writer, CallbackWriter) and output.table is None
    errors = str(output.errors) if is_file and output.errors.exists() else None
    model = downloaded_model(plan.settings)
    return replace(report, model=model, output=str(output.target) if is_file else None, errors=errors)


def already_finished(plan: Plan) -> tuple[JobEnd, Report] | None:
    """How a finished job ended, found without its engine: see `plan.finished_before`."""
    started = time.monotonic()
    ended = finished_before(plan)
    if ended is None:
        return None
    report = ReportBuilder()
    report(JobStarted(plan.source.total_bytes, plan.source.total_records, ended.records, started, ended.failed))
    report(JobDone("finished", time.monotonic()))
    found = _placed(report.build(), plan)
    return JobEnd("already_finished", ended.records, ended.failed), found


def rehearse(settings: JobSettings) -> tuple[Survey, Forecast]:
    """Estimate the job without writing anything. Blocks for some batches.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used.
        JobError: the input cannot be read.
    """
    with check(settings) as plan:
        if isinstance(plan.source, JoinedSource):
            plan = replace(plan, source=plan.source.preview())
        engine = load(plan)
        try:
            job = build(plan, engine, StopRequest(), Broadcast(()))
            found = _survey(plan, job, spread=True)
            tuned = tune(plan, engine, found, tuned_profile(plan.settings, engine))
            if tuned.engine is not engine:
                engine = tuned.engine
                job = build(plan, engine, StopRequest(), Broadcast(()))
            found = replace(
                found,
                precision=tuned.precision,
                model=downloaded_model(plan.settings),
                repeats=survey_prompts(job),
                order=job.order,
            )
            profile = tuned_profile(plan.settings, engine)
            if profile.runs_batches:
                profile = replace(profile, batch_cost=starting_budget(plan.settings.config, engine, profile))
            return found, forecast(job, found, profile, is_folder=plan.output.is_folder)
        finally:
            _close(engine)


def build(  # noqa: PLR0913 - keyword-only beyond what every caller gives
    plan: Plan,
    engine: Engine,
    stop: StopRequest,
    listener: Listener,
    batcher: BatcherPort | None = None,
    shared: SharedBatcher | None = None,
    *,
    kept: contextlib.ExitStack | None = None,
) -> Job:
    """Build the job; `batcher` is that of a remote engine, or takes the records of a server's batch.

    `kept` closes what takes the engine's place once its device is lost; None if nothing is to take it.
    """
    settings = plan.settings
    # Duplicate ids would make outputs ambiguous. A retry need not check again.
    later = settings.step is not None and settings.step.earlier  # the first step has checked them
    identity = None if settings.retry or later else plan.columns.id
    if identity:
        refuse_without_numpy()
    preparers = prepare_processes(plan, engine)
    _check_form(plan, engine)
    if shared is not None:
        batcher = shared.batcher
    in_flight = None if settings.config.engine_process or batcher is not None else InFlightFile(plan.output.work)
    forward = (
        with_failover(engine, _as_loaded(settings.config, engine)) if kept is not None and batcher is None else None
    )
    if kept is not None and forward is not None:
        kept.callback(forward.close)
    return Job(
        settings=settings,
        source=plan.source,
        columns=replace(plan.columns, arrays=COLUMNS.of(engine) is not None and not plan.columns.text_only),
        engine=engine,
        batcher=batcher or build_batcher(settings, engine, stop, listener, in_flight, forward),
        output=plan.output,
        start=start_mode(plan, describe_engine(engine)),
        listener=listener,
        stop=stop,
        user=plan.user,
        unique_ids=bool(identity),
        order=order_plan(plan, profile_of(engine)),
        preparers=preparers,
        in_flight=in_flight,
        form=plan.form,
        run_on=None if shared is None else shared.run_on,
    )


def _check_form(plan: Plan, engine: Engine) -> None:
    """Check, before the first row, that the model's answers can have the form. Raises ConfigError: they cannot."""
    if plan.form is None or not profile_of(engine).holds_forms:
        return
    structure = plan.form.structure
    [tried] = engine.prepare([FormedRequest("a", structure, "")])
    if isinstance(tried, RecordError) and tried.code == NO_FORMS:
        raise ConfigError(
            f"{structure.said_in}: {tried}; use another model, or leave it out and say the form in the prompt"
        ) from tried


def _as_loaded(config: EngineConfig, engine: Engine) -> EngineConfig:
    dtype = describe_engine(engine).get("dtype")
    return in_dtype(config, dtype) if config.has_option("dtype") and isinstance(dtype, str) else config


def preparers_of(settings: JobSettings, engine: Engine) -> int | None:
    """How many processes prepare records; None where the engine cannot, or where a model on the CPU needs the cores."""
    most = settings.limits.prepare_processes
    if PREPARING.of(engine) is None or prepares_alone(settings):
        return None
    return most if most is not None else _beside_the_model() if on_gpu(engine) else None


def _beside_the_model() -> int:
    return max((os.cpu_count() or 1) - 1, 0)


def on_gpu(engine: Engine) -> bool:
    """Whether the engine says that it computes on another device than the CPU."""
    tunable = TUNING.of(engine)
    return tunable is not None and tunable.hardware().get("device", "cpu") != "cpu"


@contextlib.contextmanager
def early_processes(plan: Plan) -> Iterator[EarlyProcesses | None]:
    """The processes that will prepare the records of a job, started while its model is loaded; None for none."""
    declared, count = plan.settings.config.declaration, _early_count(plan)
    if declared is None or not count:
        yield None
        return
    with contextlib.closing(EarlyProcesses(count, declared.preparing)) as early:
        yield early


def _early_count(plan: Plan) -> int:
    config, asked = plan.settings.config, plan.settings.limits.prepare_processes
    if config.declaration is None or not config.declaration.preparing or prepares_alone(plan.settings):
        return 0
    if asked is not None:
        return min(asked, os.cpu_count() or 1)  # more start when they are needed
    is_short = (plan.source.total_bytes or _FEW_BYTES) < _FEW_BYTES
    return 0 if is_short or config.engine_options.get("device") == "cpu" or not cuda_devices() else _beside_the_model()


def prepare_processes(plan: Plan, engine: Engine) -> PreparerPool | None:
    """The processes that prepare the blocks of a job; None for none, as on a CPU, where the model needs the cores.

    Raises:
        ConfigError: the engine's `prepare_column` cannot run in another process, and some were asked for or it says
            that it can.
    """
    settings = plan.settings
    preparer, asked = PREPARING.of(engine), settings.limits.prepare_processes
    if preparer is None and asked and settings.step is None:
        raise ConfigError(
            f"``prepare_processes={asked}``: this engine prepares records in the process of the job alone; leave it out"
        )
    most = preparers_of(settings, engine)
    if preparer is None or not most:
        return None
    try:
        return PreparerPool(preparer, most) if plan.early is None else PreparerPool(preparer, most, plan.early.start)
    except UnsendableError as error:
        raise ConfigError(f"the engine's preparer: {error}; pass ``prepare_processes=0``") from error


def describe_engine(engine: Engine) -> Mapping[str, object]:
    """The engine's `describe()` after a round trip through JSON.

    Raises:
        ConfigError: it is not a mapping, or JSON cannot hold it.
    """
    described = engine.describe()
    try:
        if isinstance(described, Mapping):
            return dict(json.loads(json.dumps(dict(described))))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the engine's describe() must return JSON-serializable values: {error}") from error
    raise ConfigError(f"the engine's describe() returned {type(described).__name__}; it must return a dict")


def build_batcher(
    settings: JobSettings,
    engine: Engine,
    stop: StopRequest,
    listener: Listener,
    in_flight: InFlightFile | None = None,
    forward: Callable[[list[object]], object] | None = None,
) -> Batcher[Work, object]:
    """Make the batcher of a job; `forward` runs batches instead of the engine's own."""
    batching = BatcherSettings(
        listener, cost_estimator=operator.attrgetter("cost"), process_timeout_s=settings.config.call_timeout_s
    )
    profile = tuned_profile(settings, engine)
    return profile.kind.batcher(
        engine, profile, WorkCalls(stop, settings.limits.max_attempts, in_flight, forward), batching
    )


def tuned_profile(settings: JobSettings, engine: Engine) -> EngineProfile:
    """The engine's profile with the cost budget and batch size of the settings."""
    return profile_of(engine).tuned(settings.config.batch_tokens, settings.config.batch_size)


def _survey(plan: Plan, job: Job, *, spread: bool) -> Survey:
    found = survey(job, spread=spread)
    return replace(found, left_out=plan.left_out + found.left_out)


class BudgetWarning:
    """A listener that warns once if a record costs more than a batch may: it runs alone."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._warned = False

    def __call__(self, event: Event) -> None:
        if not self._warned and isinstance(event, BatchFormed) and event.size == 1 and event.cost > self._budget:
            self._warned = True
            logger.warning(
                "headrace: a record costs %s, more than %s (%s): each such record runs alone",
                f"{event.cost:,.0f}", spelled("``batch_tokens``"), f"{self._budget:,}",
            )  # fmt: skip


class Broadcast:
    """A listener that forwards events to several listeners."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


class Guarded:
    """A listener of the user's. If it raises, it receives no further events, and the work continues."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener

    def __call__(self, event: Event) -> None:
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception as error:  # noqa: BLE001 - a user's own code may raise anything
            logger.warning(
                "headrace: listener %r raised %s: %s; it is left out", self._listener, type(error).__name__,
                text_of(error),
            )  # fmt: skip
            self._listener = None
