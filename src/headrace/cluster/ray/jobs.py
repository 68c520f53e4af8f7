"""A job with workers on a Ray cluster."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import closing, contextmanager

from headrace.cluster import remote_job
from headrace.cluster.base import ClusterResources
from headrace.cluster.ray.workers import RayWorkers, connected
from headrace.cluster.worker import WorkerSpec
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report


def execute(
    settings: JobSettings, resources: ClusterResources, stop: StopRequest, *, progress: bool
) -> tuple[JobEnd, Report]:
    """Run a job with workers on a Ray cluster. Blocks.

    Raises:
        ConfigError: like `remote_job.execute`, or the cluster cannot be reached or is too small.
        JobError: like `remote_job.execute`.
    """
    return remote_job.execute(settings, functools.partial(_workers, resources), stop, progress=progress)


@contextmanager
def _workers(resources: ClusterResources, spec: WorkerSpec) -> Iterator[RayWorkers]:
    with connected(resources), closing(RayWorkers(spec, resources)) as workers:
        yield workers
