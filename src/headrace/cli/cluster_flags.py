"""Flags for the workers of a job on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from headrace.cli.flags import FlagGroup
from headrace.cli.signals import Stopper
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import JobSettings
from headrace.observe.report import Report

Execute = Callable[[JobSettings, Stopper], tuple[JobEnd, Report]]


@dataclass(frozen=True, slots=True)
class ClusterFlags(FlagGroup):
    """Workers of a job."""

    panel: ClassVar[str] = "Cluster"

    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray[://HOST:PORT]",
            help="Ray cluster to run on: ray for RAY_ADDRESS or a new local cluster, ray:HOST:PORT for that cluster, "
            "ray://HOST:PORT for Ray's client server. Default: this process.",
        ),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="With --on: number of workers; each loads the model.")] = 1
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="With --on: GPUs per worker. Default: 1 if the cluster has GPUs.")
    ] = None
    cpus_per_replica: Annotated[float, typer.Option(min=0, help="With --on: CPUs per worker.")] = 1.0

    def run(self) -> Execute | None:
        """The function that runs a job on the cluster; None without --on.

        Raises:
            BadParameter: flags of the workers are given without --on.
        """
        if self.on is None:
            if self != ClusterFlags():
                raise typer.BadParameter("flags for replicas need it", param_hint="--on")
            return None
        return self._run_on

    def _run_on(self, settings: JobSettings, stopper: Stopper) -> tuple[JobEnd, Report]:
        address = ray_address(self.on or "")
        from headrace.cluster.ray_job import execute
        from headrace.cluster.ray_workers import ClusterResources

        resources = ClusterResources(address, self.replicas, self.gpus_per_replica, self.cpus_per_replica)
        return execute(settings, resources, stopper, progress=True)


def ray_address(on: str) -> str | None:
    """The address in `--on`; None to let Ray choose.

    Raises:
        ConfigError: it is not a Ray address.
    """
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise ConfigError(f"--on is {on!r}; it must be ray, ray:HOST:PORT or ray://HOST:PORT")
    return (on if address.startswith("//") else address) or None
