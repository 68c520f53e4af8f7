"""A job with workers on a Ray cluster: the connection to Ray, and worker processes as Ray actors."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import NoReturn, TypeVar

from headrace.app.jobs.describe import WorkerRoom
from headrace.cluster import heartbeat, remote_job
from headrace.cluster.base import ClusterResources
from headrace.cluster.work_units import IN_FLIGHT
from headrace.cluster.worker import WorkerActor, WorkerInfo, WorkerSample, WorkerSpec, loaded, unpack
from headrace.cluster.worker_pool import NoRoomError, WorkUnitReply
from headrace.errors import BrokenOffError, ConfigError, EngineError, MissingExtraError, WorkerDiedError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report
from headrace.processes.portable import Portable

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError as error:
    raise MissingExtraError('a cluster needs ray, which is not installed: pip install "headrace[ray]"') from error

T = TypeVar("T")

_CONNECT_S = 5.0
"""Timeout for a connection to the cluster's address."""
_PLACE_S = 60.0
"""Seconds a worker may wait for resources."""
_SHUTDOWN_S = 20.0
"""Timeout for disconnecting from the cluster."""
_KILL_S = 2.0
"""Timeout for a request to kill a worker."""


@contextmanager
def connected(resources: ClusterResources) -> Iterator[None]:
    """Connect to the cluster; on exit close the connection, unless it existed before.

    Raises:
        ConfigError: no cluster at the address, or one of another version.
    """
    is_connected = ray.is_initialized()
    # Ignore RAY_ADDRESS if already connected: `ray job submit` sets it to another kind of address.
    address = resources.address or (None if is_connected else os.environ.get("RAY_ADDRESS"))
    if address is not None:
        _check_reachable(address)
    if is_connected:
        yield  # keep the caller's connection
        return
    try:
        with _signal_handlers_kept():
            _connect(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:  # includes a wrong version or token
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise ConfigError(f"cannot use {where}: {_brief(error)}{_address_hint(address, error)}") from error
    try:
        yield
    finally:
        _call_with_timeout(_SHUTDOWN_S, ray.shutdown)


def _address_hint(address: str | None, error: Exception) -> str:
    """A hint on the form of the address, if no cluster answers."""
    if address is None or not isinstance(error, ConnectionError):
        return ""
    if address.startswith("ray://"):
        return (
            f" (both sides need the same version of Ray, which is {ray.__version__} here; "
            "ray://host:port is the address of Ray's client server, port 10001 by default)"
        )
    return " (use host:port on a machine of the cluster, ray://host:port on any other)"


def _call_with_timeout(seconds: float, call: Callable[[], object]) -> None:
    """Call into the cluster on a thread. If the cluster is gone, the call would block forever."""
    thread = threading.Thread(target=call, name="headrace-ray", daemon=True)
    thread.start()
    thread.join(seconds)


def _connect(address: str | None) -> None:
    options = {"log_to_driver": False, "logging_level": "ERROR"} | ({} if address else {"include_dashboard": False})
    try:
        ray.init(address=address or "local", **options)
    except ConnectionAbortedError:  # the client server forks per client, and a fork sometimes hangs: retry once
        ray.init(address=address, **options)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check_reachable(address: str) -> None:
    """Check that the address accepts connections. Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        if address in ("auto", "local"):
            return
        raise ConfigError(f"{address!r} is not the address of a Ray cluster; it must be host:port or ray://host:port")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)):
            pass
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}") from error


class RayWorkers:
    """The workers of one job. All start at once; the first to load reports the engine's profile."""

    def __init__(self, spec: WorkerSpec, resources: ClusterResources) -> None:
        """Start the workers.

        Raises:
            ConfigError: the cluster is too small, or an option cannot be pickled.
            HeadraceError: the first worker cannot load the model.
        """
        self._spec = spec
        spec.check_sendable(ray.cloudpickle.dumps)
        gpus = check_room(resources, resources.replicas)
        self.room = WorkerRoom("replicas", _most(resources.cpus, gpus, resources.replicas))
        self._actor_class = ray.remote(  # registered once: the call blocks, forever if the cluster is gone
            num_cpus=resources.cpus, num_gpus=gpus, max_restarts=0, max_concurrency=IN_FLIGHT + 2
        )(WorkerActor)
        self._started: list[RayWorker] = []
        self.initial = [self.start() for _ in range(resources.replicas)]
        with ExitStack() as undo:
            undo.callback(self.close)  # the connection may outlive this job
            self._first, self.info = self._first_info()
            undo.pop_all()

    def choose(self, sample: WorkerSample) -> WorkerInfo:
        chosen = self._first_of([self._first.choose(sample)])[1]
        self._spec = self._spec.chosen(chosen.dtype)
        if chosen.dtype != self.info.dtype:
            for worker in self.initial:
                if worker is not self._first:
                    worker.use(self._spec)
        self.info = chosen
        return chosen

    def start(self) -> RayWorker:
        """Start another worker. Raises BrokenOffError: the connection to the cluster is lost."""
        _check_connected()
        self._started.append(RayWorker(self._actor_class.remote(self._spec)))
        return self._started[-1]

    def close(self) -> None:
        def end() -> None:
            for worker in self._started:
                worker.end()

        _call_with_timeout(_SHUTDOWN_S, end)

    def _first_info(self) -> tuple[RayWorker, WorkerInfo]:
        """Wait for the first worker to load.

        Raises:
            HeadraceError: no worker can be started, or the first one cannot load.
        """
        placed, _ = ray.wait([worker.greeting for worker in self.initial], num_returns=1, timeout=_PLACE_S)
        if not placed:
            free = ray.available_resources()
            raise ConfigError(
                f"no worker could be placed within {_PLACE_S:g} s: {free.get('CPU', 0):g} CPU and "
                f"{free.get('GPU', 0):g} GPU are free"
            )
        index, info = self._first_of([worker.loading for worker in self.initial])
        return self.initial[index], info

    def _first_of(self, loads: list[ray.ObjectRef[WorkerInfo | Portable]]) -> tuple[int, WorkerInfo]:
        """Wait for the first of these answers; returns which one it is.

        Raises:
            HeadraceError: a worker died, or none answers.
        """
        while not (done := ray.wait(loads, num_returns=1, timeout=heartbeat.MISSED_LOADING * heartbeat.PULSE_S)[0]):
            pulses = [worker.pulse() for worker in self.initial]
            if not ray.wait(pulses, num_returns=1, timeout=heartbeat.MISSED_LOADING * heartbeat.PULSE_S)[0]:
                raise EngineError("no worker answers any more, and none has loaded the model")
        try:
            return loads.index(done[0]), loaded(ray.get(done[0]))
        except RayError as error:
            raise EngineError(f"a worker died while loading the model: {_brief(error)}") from error


def _check_connected() -> None:
    """Raise BrokenOffError if the connection is lost: Ray would silently start a local cluster."""
    if not ray.is_initialized():
        raise BrokenOffError(
            "the connection to the Ray cluster is lost; finished records are kept, run again to continue"
        )


def check_room(resources: ClusterResources, replicas: int) -> float:
    """Check that the cluster is large enough; returns the GPUs per replica.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs in total.
    """
    total = ray.cluster_resources()
    gpus = resources.gpus if resources.gpus is not None else float(total.get("GPU", 0) >= 1)
    for name, each in (("GPU", gpus), ("CPU", resources.cpus)):
        available = total.get(name, 0.0)
        if each * replicas > available:
            raise ConfigError(
                f"{replicas} replicas with {each:g} {name} each need {each * replicas:g}, and the cluster "
                f"has {available:g}: request fewer replicas, or fewer {name}s for each"
            )
    return gpus


def _most(cpus: float, gpus: float, replicas: int) -> int:
    """The number of workers that the cluster has room for; at least `replicas`."""
    total = ray.cluster_resources()
    room = [int(total.get(name, 0.0) / each) for name, each in (("CPU", cpus), ("GPU", gpus)) if each]
    return max(min(room, default=replicas), replicas)


class RayWorker:
    """A `Worker` backed by a Ray actor."""

    def __init__(self, actor: ray.actor.ActorHandle) -> None:
        self._actor = actor
        self.greeting = self._actor.hello.remote()
        self.loading = self._actor.load.remote()
        self._location = "a worker"
        self._heartbeat = heartbeat.Heartbeat(lambda: self._location, self._clock)

    async def load(self) -> float:
        with self._ray_errors():
            placed, _ = await asyncio.wait({asyncio.ensure_future(heartbeat.awaited(self.greeting))}, timeout=_PLACE_S)
            if not placed:
                raise NoRoomError(f"none within {_PLACE_S:g} s")  # a query for free resources could block forever
            self._location = placed.pop().result()
            loaded(await self._heartbeat.unless_silent(self.loading))
        return await self._heartbeat.clock_offset()

    def choose(self, sample: WorkerSample) -> ray.ObjectRef[WorkerInfo | Portable]:
        return self._actor.choose.remote(sample)

    def use(self, spec: WorkerSpec) -> None:
        self.loading = self._actor.use.remote(spec)

    async def work(self, payloads: list[bytes]) -> WorkUnitReply:
        with self._ray_errors():
            return unpack(await self._actor.work.remote(payloads))

    async def watch(self) -> NoReturn:
        await self._heartbeat.watch()

    def pulse(self) -> ray.ObjectRef[float]:
        return self._actor.clock.remote()

    async def _clock(self) -> float:
        with self._ray_errors():
            return float(await self.pulse())

    def kill(self) -> None:
        _call_with_timeout(_KILL_S, self.end)

    def end(self) -> None:
        """Kill the worker. Blocks forever if the cluster is gone."""
        with suppress(RayError, ConnectionError):  # the worker or the cluster is gone
            if ray.is_initialized():
                ray.kill(self._actor)

    @contextmanager
    def _ray_errors(self) -> Iterator[None]:
        """Convert Ray's errors.

        Raises:
            WorkerDiedError: the worker, its node or its reply is lost.
            BrokenOffError: the connection to the cluster is lost.
        """
        try:
            yield
        except RayTaskError:
            raise  # a bug; the worker is alive
        except (RayError, ConnectionError) as error:  # ConnectionError comes from Ray's client
            _check_connected()
            raise WorkerDiedError(f"{self._location} died: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Ray's error message in one line, without ids, common causes and tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith("\t")]
    if any(line.startswith("Traceback ") for line in lines):
        lines = [lines[0], lines[-1]]
    return " ".join(lines).partition(" Some common causes")[0][:300]


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
