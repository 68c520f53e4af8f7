"""Flags that say where workers are to run, and how many; for every verb that works through records."""

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
            help="Run on a Ray cluster. ray: the cluster that RAY_ADDRESS names, or else a new one on this machine. "
            "ray:HOST:PORT: the cluster there. ray://HOST:PORT: through Ray's client server.",
        ),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="With --on: the number of workers. Each loads the model.")] = 1
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="With --on: GPUs of each worker. Default: 1 if the cluster has GPUs.")
    ] = None
    cpus_per_replica: Annotated[float, typer.Option(min=0, help="With --on: CPUs of each worker.")] = 1.0

    def run(self) -> Execute | None:
        """What runs a job as these flags say; None for this process.

        Raises:
            BadParameter: what workers are to have is said, and not where they are.
        """
        if self.on is None:
            if self != ClusterFlags():
                raise typer.BadParameter("replicas, and what each of them has, need it", param_hint="--on")
            return None
        return self._run_on

    def _run_on(self, settings: JobSettings, stopper: Stopper) -> tuple[JobEnd, Report]:
        address = ray_address(self.on or "")
        from headrace.cluster.ray_job import execute
        from headrace.cluster.ray_workers import ClusterResources

        place = ClusterResources(address, self.replicas, self.gpus_per_replica, self.cpus_per_replica)
        return execute(settings, place, stopper, progress=True)


def ray_address(on: str) -> str | None:
    """The address that `--on` names; None where it leaves it to Ray.

    Raises:
        ConfigError: it names another kind of cluster.
    """
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise ConfigError(f"--on is {on!r}; it must be ray, ray:HOST:PORT or ray://HOST:PORT")
    return (on if address.startswith("//") else address) or None
