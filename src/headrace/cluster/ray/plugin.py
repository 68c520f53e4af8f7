"""Ray as a kind of cluster. Ray itself is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable

from headrace.app.servers.server import ServerSettings
from headrace.cluster.base import Cluster, ClusterResources, Replicas
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report


class Ray(Cluster):
    """A Ray cluster.

    Its address is `host:port` or `ray://host:port`; without one, RAY_ADDRESS is used, or a local cluster is started.
    """

    def run(
        self, settings: JobSettings, resources: ClusterResources, stop: StopRequest, *, progress: bool
    ) -> tuple[JobEnd, Report]:
        from headrace.cluster.ray.workers import execute

        return execute(settings, resources, stop, progress=progress)

    def serve(
        self,
        settings: ServerSettings,
        replicas: Replicas,
        resources: ClusterResources,
        address: tuple[str, int],
        say: Callable[[str], None],
    ) -> None:
        from headrace.cluster.ray.serving import serve_until_stopped

        serve_until_stopped(settings, replicas, resources, address, say)


CLUSTER = Ray()
