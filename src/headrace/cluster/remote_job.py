"""A job whose engines and batchers run on workers. The pipeline, ledger and sink run in this process."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import headrace
from headrace.app.jobs import job as jobs
from headrace.app.jobs.describe import WorkerRoom
from headrace.app.jobs.tuning import is_int8, is_read_once, settings_to_load
from headrace.cluster.worker import WorkerInfo, WorkerSample, WorkerSpec
from headrace.cluster.worker_pool import Worker, WorkerPool
from headrace.engines.base import Placed, Prepared
from headrace.errors import ConfigError, RecordError
from headrace.events import Event
from headrace.jobs.pipeline.chunks import parts_of
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.planning.survey import survey
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report


class Workers(Protocol):
    """The workers of one job."""

    @property
    def info(self) -> WorkerInfo:
        """What the first worker reported after loading its model."""

    @property
    def initial(self) -> Sequence[Worker]:
        """The workers that were started first."""

    @property
    def room(self) -> WorkerRoom:
        """How many workers there could be."""

    def choose(self, sample: WorkerSample) -> WorkerInfo:
        """Let one worker choose the dtype by this sample, and the others use it; returns what it then reports.

        Raises:
            HeadraceError: it cannot, or has died.
        """

    def start(self) -> Worker:
        """Start a worker in the place of a dead one."""


class RemoteEngine:
    """The engine of a job whose model runs on workers. Only the workers know the cost of a record."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self.profile = replace(
            info.profile,
            cost_unit="records",
            prepare_rows=None,
            followable=False,
            tunable=False,
            remote=False,
            prepares_columns=False,
            caches_prefixes=False,  # the workers report theirs
            workers_cache_prefixes=info.profile.caches_prefixes,
        )

    def describe(self) -> Mapping[str, object]:
        """The description of the workers' engine, so that a job can continue locally or on a cluster."""
        return self._info.engine

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[bytes] | Exception]:
        """Pickle each record."""
        return [_packed(value, self._info.greedy and _is_default(value)) for value in inputs]

    def close(self) -> None:
        """Do nothing: the workers end with the connection."""


def _is_default(value: object) -> bool:
    """Whether the engine's settings decide if this request is sampled."""
    request = value.request if isinstance(value, Placed) else value
    return not (isinstance(request, dict) and request.get("temperature"))


def _packed(value: object, greedy: bool) -> Prepared[bytes] | Exception:
    try:
        return Prepared(pickle.dumps(value, protocol=5), 1, greedy=greedy)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return RecordError(f"the record cannot be sent to a worker: {error}")


def execute(
    settings: JobSettings,
    start_workers: Callable[[WorkerSpec], AbstractContextManager[Workers]],
    stop: StopRequest,
    *,
    progress: bool,
) -> tuple[JobEnd, Report]:
    """Run a job on workers. Blocks.

    Args:
        start_workers: starts all workers and waits until one has loaded the model; they end with the context.

    Raises:
        ConfigError: like `app.jobs.job.execute`, or the engine cannot run on workers, or they lack devices.
        JobError: like `app.jobs.job.execute`, or workers die repeatedly.
    """
    if settings.config.engine_process:
        raise ConfigError(
            "``engine_process=True`` cannot be used with workers: each has its own process already; leave it out"
        )
    with jobs.check(settings) as plan:
        if (end := jobs.already_finished(plan)) is not None:
            return end
        config = settings_to_load(plan).config
        tries = config is plan.settings.config
        if tries and is_int8(config) and is_read_once(plan):
            raise ConfigError(
                "``quantize=int8`` is checked on a sample of the records, and there is none of an iterator: pass a "
                "list or a file, or leave it out"
            )
        if not (config.engine is None or isinstance(config.engine, str)):
            raise ConfigError("workers import a custom engine by name: give it as module:name")
        with plan.output.locked(), start_workers(WorkerSpec(config, headrace.__version__, tries)) as workers:
            info = workers.info
            busy = info.profile.kind.keeps_busy(info.profile)
            pool = functools.partial(WorkerPool, workers.initial, workers.start, busy, stop)
            if info.can_try and not (plan.settings.retry or is_read_once(plan)):
                found = survey(jobs.build(plan, RemoteEngine(info), stop, _unheard, pool(_unheard)), spread=False)
                records = None if found.records is None else -(-found.records // len(workers.initial))
                info = workers.choose(WorkerSample([item.payload for item in parts_of(found.work)], records))
            return jobs.carry_out(plan, RemoteEngine(info), stop, progress=progress, batcher=pool, workers=workers.room)


def _unheard(event: Event) -> None:
    """The sample runs nothing."""
