"""A job with worker processes on this machine, each with its own device."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from headrace.app.jobs.describe import WorkerRoom
from headrace.cluster import heartbeat, remote_job
from headrace.cluster.worker import WorkerActor, WorkerInfo, WorkerSample, WorkerSpec, loaded, unpack
from headrace.cluster.worker_pool import WorkUnitReply
from headrace.device.cores import cores_beside, divided, own_cores
from headrace.device.cuda import cuda_devices
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, EngineError, WorkerDiedError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report
from headrace.processes.actor import ActorProcess
from headrace.processes.portable import Portable


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The part of this machine that one worker uses."""

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    """CPU cores; None for all."""

    def __str__(self) -> str:
        devices = self.environment.get("CUDA_VISIBLE_DEVICES")
        return f"CUDA device {devices}" if devices else f"CPU cores {', '.join(map(str, self.cores or ()))}"


def device_shares(size: int | Literal["auto"], config: EngineConfig) -> list[DeviceShare]:
    """Divide the devices of this machine between workers: CUDA devices if there are any, else CPU cores.

    Args:
        size: the number of workers; "auto" for one per CUDA device (or per group of devices, if an engine needs
            several), and one on a CPU.
        config: names the device and how many devices an engine needs.

    Raises:
        ConfigError: there are too few devices, or the device is set to a single one.
    """
    device = str(config.engine_options.get("device") or "auto")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"``device={device}`` is a single device, and ``data_parallel_size`` gives each worker its own; "
            "use ``device=cuda``, and CUDA_VISIBLE_DEVICES to choose among the devices"
        )
    count = 0 if device == "cpu" else cuda_devices()
    if count or device == "cuda":
        return _cuda_shares(size, count, config)
    cores = own_cores()
    number = 1 if size == "auto" else size
    if number > len(cores):
        raise ConfigError(
            f"``data_parallel_size`` is {number}, and there is no CUDA device and {len(cores)} CPU cores; "
            f"it must be at most {len(cores)}"
        )
    return [DeviceShare(cores=part) for part in divided(cores, number)]


def _cuda_shares(size: int | Literal["auto"], count: int, config: EngineConfig) -> list[DeviceShare]:
    each = config.devices
    number = max(count // each, 1) if size == "auto" else size
    if number * each > count:
        groups = f" of {each} devices" if each > 1 else ""
        raise ConfigError(
            f"``data_parallel_size`` is {number}: {number} workers{groups} need {number * each} CUDA devices, "
            f"and PyTorch sees {count}"
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(index) for index in range(count)]
    own_names = [names[index * each : (index + 1) * each] for index in range(number)]
    shares = zip(own_names, cores_beside([own[0] for own in own_names]), strict=True)
    return [DeviceShare({"CUDA_VISIBLE_DEVICES": ",".join(own)}, cores) for own, cores in shares]


class LocalWorker:
    """A `Worker` in a process of this machine."""

    def __init__(self, spec: WorkerSpec, share: DeviceShare) -> None:
        self._process = ActorProcess(WorkerActor, spec, environment=share.environment, cores=share.cores)
        self.loading: Future[WorkerInfo | Portable] = self._process.call("load")
        self._heartbeat = heartbeat.Heartbeat(
            lambda: f"the worker on {share}", lambda: asyncio.wrap_future(self.clock())
        )

    @property
    def alive(self) -> bool:
        return self._process.ended is None

    async def load(self) -> float:
        try:
            loaded(await self._heartbeat.unless_silent(asyncio.wrap_future(self.loading)))
            return await self._heartbeat.clock_offset()
        except WorkerDiedError:
            self.kill()  # it may only be silent, and its device is needed
            raise

    def choose(self, sample: WorkerSample) -> Future[WorkerInfo | Portable]:
        return self._process.call("choose", sample)

    def use(self, spec: WorkerSpec) -> None:
        self.loading = self._process.call("use", spec)

    def clock(self) -> Future[float]:
        return self._process.call("clock")

    async def work(self, payloads: list[bytes]) -> WorkUnitReply:
        return unpack(await asyncio.wrap_future(self._process.call("work", payloads)))

    async def watch(self) -> NoReturn:
        await self._heartbeat.watch()

    def kill(self) -> None:
        self._process.kill()


class LocalWorkers:
    """The workers of one job, one for each share of the machine."""

    def __init__(self, spec: WorkerSpec, shares: list[DeviceShare]) -> None:
        self._spec = spec
        self._shares = shares
        spec.check_sendable()
        self._workers: list[LocalWorker] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for share in shares:
                self._workers.append(LocalWorker(spec, share))
            self.initial = list(self._workers)
            index, self.info = self._first_of([worker.loading for worker in self._workers])
            self._first = self._workers[index]
            undo.pop_all()

    @property
    def room(self) -> WorkerRoom:
        """As many as there are CUDA devices for; on the CPU, each new one would take cores from the others."""
        on_cuda = any(share.environment for share in self._shares)
        most = len(device_shares("auto", self._spec.config)) if on_cuda else len(self._shares)
        return WorkerRoom("data_parallel_size", most)

    def choose(self, sample: WorkerSample) -> WorkerInfo:
        chosen = self._first_of([self._first.choose(sample)])[1]
        self._spec = self._spec.chosen(chosen.dtype)
        if chosen.dtype != self.info.dtype:
            for worker in self._workers:
                if worker is not self._first:
                    worker.use(self._spec)
        self.info = chosen
        return chosen

    def start(self) -> LocalWorker:
        index = next(index for index, worker in enumerate(self._workers) if not worker.alive)
        self._workers[index] = LocalWorker(self._spec, self._shares[index])
        return self._workers[index]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _first_of(self, loads: Sequence[Future[WorkerInfo | Portable]]) -> tuple[int, WorkerInfo]:
        """Wait for the first of these answers; returns which one it is.

        Raises:
            HeadraceError: it cannot load, died, or no worker answers.
        """
        silent = 0
        while not (done := wait(loads, heartbeat.PULSE_S, FIRST_COMPLETED).done):
            answered = wait([worker.clock() for worker in self._workers], heartbeat.PULSE_S, FIRST_COMPLETED).done
            silent = 0 if answered else silent + 1
            if silent >= heartbeat.MISSED_LOADING:
                raise EngineError("no worker answers any more, and none has loaded the model")
        try:
            answer = done.pop()
            return loads.index(answer), loaded(answer.result())
        except WorkerDiedError as error:
            raise EngineError(f"a worker died while loading the model: {error}") from error


def execute(
    settings: JobSettings, size: int | Literal["auto"], stop: StopRequest, *, progress: bool
) -> tuple[JobEnd, Report]:
    """Run a job with workers on this machine. Blocks.

    Raises:
        ConfigError: like `remote_job.execute`, or there are too few devices.
        JobError: like `remote_job.execute`.
    """

    def workers(spec: WorkerSpec) -> closing[LocalWorkers]:
        return closing(LocalWorkers(spec, device_shares(size, spec.config)))

    return remote_job.execute(settings, workers, stop, progress=progress)
