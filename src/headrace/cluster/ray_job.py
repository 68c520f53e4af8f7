"""`headrace run --on ray`: main path, ledger and sink stay here; engines and batchers are on the cluster's workers."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
    """What a job needs of an engine whose model is elsewhere; a record's own cost is known there."""

    def __init__(self, facts: WorkerInfo) -> None:
        self._facts = facts
        self.profile = replace(facts.profile, cost_unit="records", prepare_rows=None, followable=False)

    def describe(self) -> Mapping[str, Any]:
        """As the engine itself does: so a job can begin here and go on there."""
        return self._facts.engine

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[bytes] | Exception]:
        """Each record as it travels."""
        return [_packed(value) for value in inputs]

    def close(self) -> None:
        """The workers end with the connection."""


def _packed(value: Any) -> Prepared[bytes] | Exception:
    try:
        return Prepared(pickle.dumps(value, protocol=5), 1)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return RecordError(f"cannot be sent to a worker: {error}")


def execute(
    settings: JobSettings, place: ClusterResources, stop: StopRequest, *, progress: bool
) -> tuple[JobEnd, Report]:
    """`wiring.execute` with workers on a Ray cluster. Blocks.

    Raises:
        ConfigError: also no cluster at the address, or one with too little room.
        JobError: also when workers die again and again.
    """
    if settings.config.engine_process:
        raise ConfigError(
            "--engine-process is of no use with --on: a worker there is a process of its own; leave it out"
        )
    plan = wiring.check(settings)
    if (end := wiring.already_finished(plan)) is not None:
        return end
    config = settings_to_load(plan).config
    if not (config.engine is None or isinstance(config.engine, str)):
        raise ConfigError("workers on a cluster import an engine of your own: name it as module:name")
    spec = WorkerSpec(config, headrace.__version__)
    with connected(place):
        staff = RayWorkers(spec, place)
        try:
            crew = functools.partial(WorkerPool, staff.workers, staff.hire, staff.facts.profile.keeps_busy, stop)
            return wiring.carry_out(plan, RemoteEngine(staff.facts), stop, progress=progress, batcher=crew)
        finally:
            staff.close()
