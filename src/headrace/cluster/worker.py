"""A worker's own process: one engine and one batcher, pieces of records in, results out. It knows of no cluster."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import headrace
from headrace.app import job as wiring
from headrace.batching.batcher import Batcher
from headrace.cluster.worker_pool import WorkUnitReply
from headrace.engines.config import EngineConfig
from headrace.engines.loading import load_engine
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import BadResultError, ConfigError, RecordError
from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, StageDone, StepDone
from headrace.jobs.pipeline.engine_prepare import prepare_all
from headrace.jobs.pipeline.infer import stream_longest_first
from headrace.jobs.pipeline.job import Limits, StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.jobs.settings import JobSettings
from headrace.observe.batches import BusyTime
from headrace.processes.portable import Portable
from headrace.records import Record


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is to load."""

    config: EngineConfig
    version: str
    """Of the Headrace that asks."""

    def settings(self) -> JobSettings:
        """As a job on this machine would have them."""
        limits = Limits(max_attempts=1)  # the job counts attempts: here each record's own error is to be found
        return JobSettings(source=None, sink="", config=self.config, limits=limits)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says once its model is loaded."""

    engine: Mapping[str, Any]
    """As `Engine.describe` has it."""
    profile: EngineProfile
    """Of the engine, with the budget and the size of the job."""


class WorkerActor:
    """Loads what the spec says, and works through pieces: several at a time share one batcher."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._events: list[Event] = []
        self._busy = BusyTime()
        self._told_busy_s = 0.0
        self._batches = 0

    async def hello(self) -> str:
        """That it has been placed, and where."""
        return f"{socket.gethostname()}, process {os.getpid()}"

    async def clock(self) -> float:
        """`time.monotonic()` here."""
        return time.monotonic()

    async def load(self) -> WorkerInfo | Portable:
        """Load the model, or say why not."""
        try:
            if self._spec.version != headrace.__version__:
                raise ConfigError(
                    f"{await self.hello()} has Headrace {headrace.__version__}, this job {self._spec.version}; "
                    "install the same version on both sides"
                )
            settings = self._spec.settings()
            self._engine = await asyncio.to_thread(load_engine, settings.config)
            self._batcher: Batcher[Work, Any] = wiring.build_batcher(settings, self._engine, StopRequest(), self._hear)
            await self._batcher.start()
        except Exception as error:  # noqa: BLE001 - the edge of the process: whoever started it hears why
            return Portable.of(error)
        return WorkerInfo(dict(self._engine.describe()), wiring.tuned_profile(settings, self._engine))

    async def work(self, payloads: list[bytes]) -> bytes:
        """The pickled `WorkUnitReply` to a piece."""
        results: list[Any] = [None] * len(payloads)
        costs = [0] * len(payloads)
        work = await asyncio.to_thread(self._prepare, payloads, results, costs)
        async for run, outputs, _ in self._batcher.runs_as_completed(stream_longest_first(work)):
            for item, output in zip(run, outputs, strict=True):
                results[item.record.position] = output
        return self._reply(results, costs)

    def _prepare(self, payloads: Sequence[bytes], results: list[Any], costs: list[int]) -> list[Work]:
        started = time.monotonic()
        work: list[Work] = []
        cut = 0
        inputs: list[Any] = []
        places: list[int] = []
        for index, payload in enumerate(payloads):
            try:
                inputs.append(pickle.loads(payload))
            except Exception as error:  # noqa: BLE001 - a record of a class that is not here: that record's own failure
                results[index] = RecordError(f"cannot be read on the worker: {error}")
            else:
                places.append(index)
        for index, entry in zip(places, prepare_all(self._engine, inputs), strict=True):
            if isinstance(entry, Exception):
                results[index] = entry
                continue
            costs[index] = entry.cost
            cut += entry.truncated
            work.append(Work(Record(index, None, None), None, entry.payload, entry.cost))
        ended = time.monotonic()
        tokens = sum(costs) if profile_of(self._engine).counts_tokens else 0
        self._events.append(StageDone("prepare", 0, ended - started, ended, tokens=tokens, truncated=cut))
        return work

    def _reply(self, results: list[Any], costs: list[int]) -> bytes:
        events, self._events = self._events, []
        batches, self._batches = self._batches, 0
        busy_s = self._busy.seconds
        sent = [Portable.of(result) if isinstance(result, BaseException) else result for result in results]
        reply = WorkUnitReply(sent, costs, events, batches, busy_s - self._told_busy_s)
        self._told_busy_s = busy_s
        try:
            return pickle.dumps(reply, protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError):
            return pickle.dumps(replace(reply, results=[_sendable(result) for result in sent]), protocol=5)

    def _hear(self, event: Event) -> None:
        match event:
            case BatchDone() | StepDone():
                self._busy.add(event.at, event.duration_s)
            case BatchFormed():
                self._batches += 1
            case BatchSplit():
                event = replace(event, cause=Portable.of(event.cause).unpacked())
            case _:
                pass
        self._events.append(event)


def unpack(reply: bytes) -> WorkUnitReply:
    """A reply as the job wants it.

    Raises:
        Exception: its outputs are of a class that is not here.
    """
    received: WorkUnitReply = pickle.loads(reply)
    results = [result.unpacked() if isinstance(result, Portable) else result for result in received.results]
    return replace(received, results=results)


def _sendable(result: Any) -> Any:
    try:
        pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return Portable.of(BadResultError(f"the engine's result cannot leave its process: {error}"))
    return result
