"""Flags for the workers of a job: several devices of this machine, or a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import typer

from headrace import plugins
from headrace.cli.signals import Stopper
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report
from headrace.options import declared, option
from headrace.wording import spelled

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from headrace.cluster.base import Cluster

Execute = Callable[[JobSettings, Stopper], tuple[JobEnd, Report]]


def _size(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is neither a number >= 1 nor auto")
    return int(text)


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Workers of a job."""

    panel: ClassVar[str] = "Workers"

    data_parallel_size: int | Literal["auto"] | None = option(
        None,
        "Number of worker processes on this machine; each loads the model on its own device: a CUDA "
        "device, or an equal share of the CPU cores. auto: one per CUDA device. Default: no worker processes.",
        metavar="N|auto",
        parse=_size,
        minimum=1,
        brief="worker processes on this machine: a number, or auto",
    )
    on: str | None = option(
        None,
        "Ray cluster to run on: ray for RAY_ADDRESS or a new local cluster, ray:HOST:PORT for that cluster, "
        "ray://HOST:PORT for Ray's client server. Default: this process.",
        metavar="ray[:HOST:PORT]",
        brief="Ray cluster to run on",
    )
    replicas: int = option(1, "With --on: number of workers; each loads the model.", minimum=1)
    gpus_per_replica: float | None = option(
        None, "With --on: GPUs per worker. Default: 1 if the cluster has GPUs.", minimum=0
    )
    cpus_per_replica: float = option(1.0, "With --on: CPUs per worker.", minimum=0)

    def run(self) -> Execute | None:
        """The function that runs a job on workers; None to run it in this process.

        Raises:
            BadParameter: flags of a cluster are given without --on, or with --data-parallel-size.
        """
        size = self.data_parallel_size
        if self.on is None:
            refuse_without_cluster(self)
            return None if size is None else functools.partial(_run_here, size)
        if size is not None:
            raise typer.BadParameter(
                spelled("it is for this machine; with ``on``, use ``replicas``"),
                param_hint=spelled("``data_parallel_size``"),
            )
        return self._run_on

    def _run_on(self, settings: JobSettings, stopper: Stopper) -> tuple[JobEnd, Report]:
        from headrace.cluster.base import ClusterResources

        cluster, address = cluster_at(self.on or "")
        resources = ClusterResources(address, self.replicas, self.gpus_per_replica, self.cpus_per_replica)
        return cluster.run(settings, resources, stopper, progress=True)


def refuse_without_cluster(flags: DataclassInstance) -> None:
    """Refuse flags of a cluster where none is named. Raises BadParameter: one is given without `on`."""
    named = [one.name for one in declared(type(flags)) if getattr(flags, one.name) != one.default]
    if "on" not in named and (flag := next((name for name in named if name != "data_parallel_size"), None)):
        raise typer.BadParameter(
            spelled(f"flags of a cluster need it, as does ``{flag}``"), param_hint=spelled("``on``")
        )


def _run_here(size: int | Literal["auto"], settings: JobSettings, stopper: Stopper) -> tuple[JobEnd, Report]:
    from headrace.cluster.local_workers import execute

    return execute(settings, size, stopper, progress=True)


def cluster_at(on: str) -> tuple[Cluster, str | None]:
    """The cluster that `--on` names, and its address; None to let the cluster choose.

    Raises:
        ConfigError: there is no such cluster, or it cannot be imported.
    """
    from headrace.cluster.base import Cluster

    name, _, address = on.partition(":")
    if name not in (known := plugins.known("clusters")):
        raise ConfigError(f"``on`` is {on!r}; it must be {' or '.join(known)}, with :ADDRESS for a certain cluster")
    cluster = plugins.load("clusters", name, Cluster)
    return cluster, (on if address.startswith("//") else address) or None
