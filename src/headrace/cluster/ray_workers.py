"""Ray: a connection, and worker processes on its machines."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from headrace.cluster.work_units import IN_FLIGHT
from headrace.cluster.worker import WorkerActor, WorkerInfo, WorkerSpec, unpack
from headrace.cluster.worker_pool import NoRoomError, WorkUnitReply
from headrace.errors import BrokenOffError, ConfigError, EngineError, HeadraceError, MissingExtraError, WorkerDiedError
from headrace.processes.portable import Portable

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError as error:
    raise MissingExtraError('a cluster needs ray, which is not installed: pip install "headrace[ray]"') from error

_REACH_S = 5.0
"""How long the cluster's address may take to answer at all."""
_PLACE_S = 60.0
"""How long a worker may wait for room on a machine."""
_LEAVE_S = 20.0
"""How long to wait for the cluster to take leave of this process."""
_KILL_S = 2.0
"""How long to wait for the cluster to take note that a worker is to end."""
_PULSE_S = 5.0
"""How often a worker at work is asked whether it is there."""
_MISSED = 6
"""So many times that long without an answer, and it counts as dead: Ray itself may wait for minutes."""
_MISSED_LOADING = 60
"""The same of one that loads its model, which may well hold all of Python up."""


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """Where workers are to run, and what each is to have."""

    address: str | None = None
    """`host:port` or `ray://host:port`; None for the cluster that RAY_ADDRESS names, or else one on this machine."""
    replicas: int = 1
    gpus: float | None = None
    """Of each worker; None for one where the cluster has any at all."""
    cpus: float = 1.0


@contextmanager
def connected(place: ClusterResources) -> Iterator[None]:
    """Be a client of the cluster; one that was begun here ends here.

    Raises:
        ConfigError: no cluster at the address, or one of another version.
    """
    there = ray.is_initialized()
    # RAY_ADDRESS is for who is not connected yet: for `ray job submit` it is an address of another kind.
    address = place.address or (None if there else os.environ.get("RAY_ADDRESS"))
    if address is not None:
        _check_reachable(address)
    if there:
        yield  # the caller's own connection: it stays
        return
    handlers = _signal_handlers()
    try:
        _connect(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:  # a wrong version or token included
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise ConfigError(f"cannot use {where}: {_brief(error)}{_other_form(address, error)}") from error
    finally:
        for number, handler in handlers.items():  # Ray sets its own
            signal.signal(number, handler)
    try:
        yield
    finally:
        _within(_LEAVE_S, ray.shutdown)


def _other_form(address: str | None, error: Exception) -> str:
    """A hint, where it is no cluster that answers."""
    if address is None or not isinstance(error, ConnectionError):
        return ""
    if address.startswith("ray://"):
        return (
            f" (both sides need the same version of Ray, which is {ray.__version__} here; "
            "ray://host:port is for Ray's client server, which listens at port 10001 as a rule)"
        )
    return " (host:port is for a machine that belongs to the cluster; ray://host:port is for any other)"


def _within(seconds: float, call: Callable[[], Any]) -> None:
    """Do without a call to a cluster that is gone: it would never come back."""
    thread = threading.Thread(target=call, name="headrace-ray", daemon=True)
    thread.start()
    thread.join(seconds)


def _connect(address: str | None) -> None:
    options = {"log_to_driver": False, "logging_level": "ERROR"} | ({} if address else {"include_dashboard": False})
    try:
        ray.init(address=address or "local", **options)
    except ConnectionAbortedError:  # a client server forks one for each client, which hangs now and then, as forks do
        ray.init(address=address, **options)


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        if address in ("auto", "local"):
            return
        raise ConfigError(f"{address!r} is no address of a Ray cluster; it must be host:port or ray://host:port")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S)):
            pass
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}") from error


class RayWorkers:
    """The workers of one job: all begin at once, and the first to have loaded says what the engine is."""

    def __init__(self, spec: WorkerSpec, place: ClusterResources) -> None:
        """Begin them.

        Raises:
            ConfigError: no room for them, or an option that cannot be sent there.
            HeadraceError: why the first to come cannot load the model.
        """
        self._spec = spec
        try:
            ray.cloudpickle.dumps(spec)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(f"the engine's options cannot be sent to a worker: {error}") from error
        self._desks = ray.remote(  # told to the cluster once: that waits for it, for ever if it is gone
            num_cpus=place.cpus,
            num_gpus=check_room(place, place.replicas),
            max_restarts=0,
            max_concurrency=IN_FLIGHT + 2,
        )(WorkerActor)
        self._hired: list[RayWorker] = []
        self.workers = [self.hire() for _ in range(place.replicas)]
        try:
            self.facts = self._first_facts()
        except BaseException:
            self.close()  # the connection may be the caller's, and stay
            raise

    def hire(self) -> RayWorker:
        """Begin another worker.

        Raises:
            BrokenOffError: the cluster is gone.
        """
        _check_connected()
        self._hired.append(RayWorker(self._desks.remote(self._spec)))
        return self._hired[-1]

    def close(self) -> None:
        """End all workers."""

        def end() -> None:
            for worker in self._hired:
                worker.end()

        _within(_LEAVE_S, end)

    def _first_facts(self) -> WorkerInfo:
        """Wait for the first worker.

        Raises:
            HeadraceError: none could be started, or why the first of them cannot load.
        """
        loads = [worker.loading for worker in self.workers]
        placed, _ = ray.wait([worker.greeting for worker in self.workers], num_returns=1, timeout=_PLACE_S)
        if not placed:
            raise ConfigError(
                f"no worker could be placed within {_PLACE_S:g} s: {_described(ray.available_resources())} is free"
            )
        while not (done := ray.wait(loads, num_returns=1, timeout=_MISSED_LOADING * _PULSE_S)[0]):
            pulses = [worker.pulse() for worker in self.workers]
            if not ray.wait(pulses, num_returns=1, timeout=_MISSED_LOADING * _PULSE_S)[0]:
                raise EngineError("no worker answers any more, and none has loaded the model")
        try:
            return _facts(ray.get(done[0]))
        except RayError as error:
            raise EngineError(f"a worker died while it loaded the model: {_brief(error)}") from error


def _check_connected() -> None:
    """Ray would begin a cluster of its own."""
    if not ray.is_initialized():
        raise BrokenOffError(
            "the connection to the Ray cluster is lost; what is finished is kept, run again to continue"
        )


def check_room(place: ClusterResources, replicas: int) -> float:
    """See that the cluster has room for so many; returns the GPUs each is to have.

    Raises:
        ConfigError: as a whole it has less.
    """
    total = ray.cluster_resources()
    gpus = place.gpus if place.gpus is not None else float(total.get("GPU", 0) >= 1)
    for name, each in (("GPU", gpus), ("CPU", place.cpus)):
        there = total.get(name, 0.0)
        if each * replicas > there:
            raise ConfigError(
                f"{replicas} replicas with {each:g} {name} each need {each * replicas:g}, and the cluster "
                f"has {there:g}: ask for fewer replicas, or fewer {name}s for each"
            )
    return gpus


def _described(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


class RayWorker:
    """A `Worker` that is an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.greeting = self._actor.hello.remote()
        self.loading = self._actor.load.remote()
        self._place = "a worker"

    async def load(self) -> float:
        """See `Worker.load`."""
        with self._told():
            placed, _ = await asyncio.wait({asyncio.ensure_future(_awaited(self.greeting))}, timeout=_PLACE_S)
            if not placed:
                raise NoRoomError(f"none within {_PLACE_S:g} s")  # what is free, a cluster that is gone never says
            self._place = placed.pop().result()
            _facts(await self._unless_silent(self.loading))
        asked = time.monotonic()
        there = await self._pulse(_MISSED)
        return (asked + time.monotonic()) / 2 - there

    async def work(self, payloads: list[bytes]) -> WorkUnitReply:
        """See `Worker.work`."""
        with self._told():
            return unpack(await self._actor.work.remote(payloads))

    async def _unless_silent(self, reference: Any) -> Any:
        answer, watch = asyncio.ensure_future(_awaited(reference)), asyncio.ensure_future(self._watch(_MISSED_LOADING))
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else watch.result()
        finally:
            answer.cancel()
            watch.cancel()
            await asyncio.gather(answer, watch, return_exceptions=True)  # both may have heard of its death

    async def watch(self) -> None:
        """See `Worker.watch`."""
        await self._watch(_MISSED)

    async def _watch(self, missed: int) -> None:
        while True:
            await asyncio.sleep(_PULSE_S)
            await self._pulse(missed)

    def pulse(self) -> Any:
        """A reference to its clock."""
        return self._actor.clock.remote()

    async def _pulse(self, missed: int) -> float:
        """Its clock.

        Raises:
            WorkerDiedError: it does not answer.
        """
        with self._told():
            answer = asyncio.ensure_future(_awaited(self.pulse()))
            try:
                for _ in range(missed):  # one by one: a time in which this process itself stood still counts once
                    if (await asyncio.wait({answer}, timeout=_PULSE_S))[0]:
                        return float(answer.result())
            finally:
                answer.cancel()
        raise WorkerDiedError(f"{self._place} has not answered for {missed * _PULSE_S:g} s")

    def kill(self) -> None:
        """See `Worker.kill`."""
        _within(_KILL_S, self.end)

    def end(self) -> None:
        """The same; waits for the cluster, for ever if it is gone."""
        with suppress(RayError, ConnectionError):  # it is gone, or the cluster is
            if ray.is_initialized():
                ray.kill(self._actor)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What Ray says, as the crew knows it.

        Raises:
            WorkerDiedError: the worker, its node, or the reply that was there is lost.
            BrokenOffError: the cluster is.
        """
        try:
            yield
        except RayTaskError:
            raise  # a bug: the worker lives
        except (RayError, ConnectionError) as error:  # the latter of Ray's client
            _check_connected()
            raise WorkerDiedError(f"{self._place} died: {_brief(error)}") from error


async def _awaited(reference: Any) -> Any:
    return await reference


def _facts(answer: WorkerInfo | Portable) -> WorkerInfo:
    if isinstance(answer, WorkerInfo):
        return answer
    error = answer.unpacked()
    raise error if isinstance(error, HeadraceError) else EngineError(f"{answer.kind}: {answer.text}") from error


def _brief(error: Exception) -> str:
    """Ray's words for a death in one line, without its identifiers, its guesses and its tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith("\t")]
    if any(line.startswith("Traceback ") for line in lines):
        lines = [lines[0], lines[-1]]
    return " ".join(lines).partition(" Some common causes")[0][:300]
