"""`headrace run --on ray`: the pipeline, ledger and sink run here, engines and batchers on the cluster's workers."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

import headrace
from headrace.app import job as wiring
from headrace.app.tuning import settings_to_load
from headrace.cluster.ray_workers import ClusterResources, RayWorkers, connected
from headrace.cluster.worker import WorkerInfo, WorkerSpec
from headrace.cluster.worker_pool import WorkerPool
from headrace.engines.base import Prepared
from headrace.errors import ConfigError, RecordError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.report import Report


class RemoteEngine:
    """The engine of a job whose model runs on workers. Only the workers know the cost of a record."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self.profile = replace(info.profile, cost_unit="records", prepare_rows=None, followable=False, tunable=False)

    def describe(self) -> Mapping[str, object]:
        """The description of the workers' engine, so that a job can continue locally or on a cluster."""
        return self._info.engine

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[bytes] | Exception]:
        """Pickle each record."""
        return [_packed(value) for value in inputs]

    def close(self) -> None:
        """Do nothing: the workers end with the connection."""


def _packed(value: object) -> Prepared[bytes] | Exception:
    try:
        return Prepared(pickle.dumps(value, protocol=5), 1)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return RecordError(f"the record cannot be sent to a worker: {error}")


def execute(
    settings: JobSettings, resources: ClusterResources, stop: StopRequest, *, progress: bool
) -> tuple[JobEnd, Report]:
    """Run a job with workers on a Ray cluster. Blocks.

    Raises:
        ConfigError: like `job.execute`, or the cluster cannot be reached or is too small.
        JobError: like `job.execute`, or workers die repeatedly.
    """
    if settings.config.engine_process:
        raise ConfigError(
            "--engine-process cannot be used with --on: each worker already has its own process; leave it out"
        )
    plan = wiring.check(settings)
    if (end := wiring.already_finished(plan)) is not None:
        return end
    config = settings_to_load(plan).config
    if not (config.engine is None or isinstance(config.engine, str)):
        raise ConfigError("with --on, name a custom engine as module:name, so that workers can import it")
    spec = WorkerSpec(config, headrace.__version__)
    with connected(resources):
        workers = RayWorkers(spec, resources)
        try:
            pool = functools.partial(WorkerPool, workers.initial, workers.start, workers.info.profile.keeps_busy, stop)
            return wiring.carry_out(plan, RemoteEngine(workers.info), stop, progress=progress, batcher=pool)
        finally:
            workers.close()
