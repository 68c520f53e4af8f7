"""A kind of cluster that runs jobs and servers, and what it is asked for."""

# ruff: noqa: ARG002 - the arguments are for those that override these methods

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.app.servers.server import ServerSettings
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """The cluster, and the resources of each worker."""

    address: str | None = None
    """The cluster's address, in the form of its kind; None lets it choose."""
    replicas: int = 1
    gpus: float | None = None
    """GPUs per worker. None uses one GPU if the cluster has any."""
    cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class Replicas:
    least: int = 0
    most: int = 2
    target_ongoing_requests: float = 10.0
    """Average concurrent requests per replica; scale up above this number."""
    scaledown_after_s: float = 300.0
    """Seconds until an unneeded replica is removed, including the last one."""
    scaleup_after_s: float = 2.0
    """Seconds of higher load until a replica is added."""
    target_queued_cost: float | None = None
    """Average cost in progress per replica. If set, it replaces `target_ongoing_requests`."""
    cold_retry_after_s: float | None = None
    """Retry-After of the 503 for requests while no replica is loaded. None lets them wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ConfigError(f"replicas are {self.least} to {self.most}: it must be 0 <= least <= most, and most >= 1")


class Cluster:
    """A kind of cluster. A package registers an instance by name in the group `headrace.clusters`."""

    def run(
        self, settings: JobSettings, resources: ClusterResources, stop: StopRequest, *, progress: bool
    ) -> tuple[JobEnd, Report]:
        """Run a job with workers on the cluster, see `remote_job.execute`. Blocks.

        Raises:
            ConfigError: the cluster cannot be reached, is too small, or runs no jobs.
            JobError: the job cannot be finished.
        """
        raise ConfigError(f"{type(self).__name__} clusters run no jobs, only servers")

    def serve(
        self,
        settings: ServerSettings,
        replicas: Replicas,
        resources: ClusterResources,
        address: tuple[str, int],
        say: Callable[[str], None],
    ) -> None:
        """Serve until SIGTERM or Ctrl-C, then finish accepted requests. Blocks; main thread only.

        Raises:
            ConfigError: the cluster cannot be reached, is too small, or runs no servers.
            EngineError: the model cannot be loaded.
        """
        raise ConfigError(f"{type(self).__name__} clusters run no servers, only jobs")
