"""Flags that say where workers are to run, and how many; for every verb that works through records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from headrace.cli.signals import Stopper
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import JobSettings
from headrace.observe.report import Report

On = Annotated[
    str | None,
    typer.Option(
        metavar="ray[://HOST:PORT]",
        help="Run on a Ray cluster. ray: the cluster that RAY_ADDRESS names, or else a new one on this machine. "
        "ray:HOST:PORT: the cluster there. ray://HOST:PORT: through Ray's client server.",
    ),
]
Replicas = Annotated[int, typer.Option(min=1, help="With --on: the number of workers. Each loads the model.")]
GpusPerReplica = Annotated[
    float | None, typer.Option(min=0, help="With --on: GPUs of each worker. Default: 1 if the cluster has GPUs.")
]
CpusPerReplica = Annotated[float, typer.Option(min=0, help="With --on: CPUs of each worker.")]
Execute = Callable[[JobSettings, Stopper], tuple[JobEnd, Report]]
_ALONE = {"replicas": 1, "gpus_per_replica": None, "cpus_per_replica": 1.0}


def cluster_run(given: dict[str, Any]) -> Execute | None:
    """What runs a job as these flags say, which it takes out of `given`; None for this process.

    Raises:
        BadParameter: what workers are to have is said, and not where they are.
        ConfigError: that names no cluster; raised when the job is to run.
    """
    on = given.pop("on")
    each = {name: given.pop(name) for name in _ALONE}
    if on is None and each != _ALONE:
        raise typer.BadParameter("replicas, and what each of them has, need it", param_hint="--on")
    return None if on is None else lambda settings, stopper: _run_on(on, each, settings, stopper)


def _run_on(on: str, each: dict[str, Any], settings: JobSettings, stopper: Stopper) -> tuple[JobEnd, Report]:
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise ConfigError(f"--on is {on!r}; it must be ray, ray:HOST:PORT or ray://HOST:PORT")
    from headrace.cluster.ray_job import execute
    from headrace.cluster.ray_workers import ClusterResources

    address = on if address.startswith("//") else address
    place = ClusterResources(address or None, each["replicas"], each["gpus_per_replica"], each["cpus_per_replica"])
    return execute(settings, place, stopper, progress=True)
