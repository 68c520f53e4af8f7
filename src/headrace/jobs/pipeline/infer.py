"""The third stage: run records on the engine. A batcher calls these functions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from headrace.batching.callables import PROMISES, unfinished
from headrace.batching.results import checked
from headrace.batching.step_model import SharingStepModel, group_of
from headrace.engines.base import BatchEngine, StepEngine, StreamEngine
from headrace.errors import EngineDeadError, ProcessError, ProcessTimeoutError, StoppedError, text_of
from headrace.jobs.pipeline.blocks import BatchRows
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import MAX_RUN, Work
from headrace.jobs.state.in_flight import InFlightFile, extent_of
from headrace.retry import TRANSIENT


def longest_first(work: list[Work], expected: Callable[[Work], float] | None = None) -> Iterator[list[Work]]:
    """Runs of equal cost, costliest first: out-of-memory errors come early, and the end has no long tail.

    `expected` is the cost that a record will have at its end, if that is not its cost now.
    """
    if not work:
        return
    cost = work[0].cost
    if expected is not None or any(item.cost != cost for item in work):
        work = sorted(work, key=expected or _cost, reverse=True)  # equal ones stay in input order
    start = 0
    while start < len(work):
        cost, end = work[start].cost, start + 1
        most = min(start + MAX_RUN, len(work))
        while end < most and work[end].cost == cost:
            end += 1
        yield work[start:end]
        start = end


def in_order(work: list[Work]) -> Iterator[list[Work]]:
    """Runs of equal cost, without a change of order: neighbours begin alike."""
    for _, run in itertools.groupby(work, key=_cost):
        items = list(run)
        for start in range(0, len(items), MAX_RUN):
            yield items[start : start + MAX_RUN]


async def streamed(runs: Iterable[list[Work]]) -> AsyncIterator[list[Work]]:
    for run in runs:
        yield run


def _cost(work: Work) -> int:
    return work.cost


async def infer_one(work: Work, engine: StreamEngine, stop: StopRequest) -> object:
    """One record through an engine that batches by itself, unless the job was asked to stop first."""
    if not stop.requested:
        try:
            return sound(await engine.infer(work.payload))
        except StoppedError as error:
            if not stop.requested:
                raise sound_error(error) from error
        except EngineDeadError:
            if not stop.requested:  # else the signal has also reached the engine's processes
                raise
    return StoppedError("the job was asked to stop")


@dataclass(frozen=True, slots=True)
class WorkCalls:
    """The `EngineCalls` of a job."""

    stop: StopRequest
    max_attempts: int
    in_flight: InFlightFile | None = None
    forward: Callable[[list[object]], object] | None = None
    """Runs batches instead of the engine's own `forward`."""

    def batches(self, engine: BatchEngine) -> Callable[[list[Work] | BatchRows], Sequence[object]]:
        return functools.partial(self._infer, self.forward or engine.forward)

    def _infer(self, forward: Callable[[list[object]], object], work: list[Work] | BatchRows) -> Sequence[object]:
        """One batch through the engine. After the grace period of a stop, records are returned unprocessed.

        Raises:
            Exception: what the engine raised. The batcher runs the batch again in halves.
        """
        if self.stop.is_over:
            return [StoppedError("the job was asked to stop")] * len(work)
        try:
            results = self._noted(forward, work)
            if type(results) is not list or len(results) != len(work):
                results = checked(results, len(work), "the engine")
        except StoppedError as error:
            raise sound_error(error) from error
        except ProcessTimeoutError:
            raise
        except TRANSIENT as error:
            # Probably not a record failure: retry each later. At the last attempt a record may be the cause.
            most = self.max_attempts
            if most == 1 or (type(work) is list and any(item.attempt >= most for item in work)):
                raise  # rows of blocks are tried for the first time
            return [error] * len(work)
        return list(map(sound, results)) if type(results) is list else results  # numbers are sound

    def _noted(self, forward: Callable[[list[object]], object], work: list[Work] | BatchRows) -> object:
        """The results of a batch, which is noted while it is in the engine."""
        blocks = work if isinstance(work, BatchRows) else None
        batch = [item.payload for item in work] if blocks is None else cast("list[object]", blocks.payloads())
        if self.in_flight is None:
            return forward(batch)
        extent = extent_of([item.record.position for item in work]) if blocks is None else blocks.extent()
        self.in_flight.enter(extent)
        try:
            return forward(batch)
        finally:
            self.in_flight.leave(extent)

    def steps(self, engine: StepEngine) -> WorkSteps:
        return WorkSteps(engine, self.stop)

    def requests(self, engine: StreamEngine) -> Callable[[Work], Awaitable[object]]:
        return functools.partial(infer_one, engine=engine, stop=self.stop)


class WorkSteps:
    """A `StepModel` of work: the engine sees the payloads. After a stop request no record is added."""

    def __init__(self, engine: StepEngine, stop: StopRequest) -> None:
        self._engine = engine
        self._sharing = engine if isinstance(engine, SharingStepModel) else None
        self._stop = stop
        self._work: dict[int, Work] = {}

    def span(self, record: Work) -> tuple[float, float]:
        return self._engine.span(record.payload)

    def add(self, key: int, record: Work) -> None:
        if self._stop.requested:
            raise StoppedError("the job was asked to stop")
        try:
            self._engine.add(key, record.payload)
        except StoppedError as error:
            raise sound_error(error) from error
        self._work[key] = record

    def step(self) -> Sequence[tuple[int, object]]:
        try:
            finished = self._engine.step()
        except StoppedError as error:
            raise sound_error(error) from error
        if not isinstance(finished, (list, tuple)) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in finished
        ):
            return finished  # the caller reports the error
        for key, _ in finished:
            self._work.pop(key, None)
        return [(key, sound(result)) for key, result in finished]

    def needs(self, key: int) -> float:
        return self._engine.needs(key)

    def shared(self, key: int) -> float:
        return 0.0 if self._sharing is None else self._sharing.shared(key)

    def overlap(self, record: Work) -> float:
        return 0.0 if self._sharing is None else self._sharing.overlap(record.payload)

    def group(self, record: Work) -> Hashable:
        return group_of(self._engine, record.payload)

    def remove(self, key: int) -> Work | None:
        """Remove a record; returns the work to continue it with."""
        payload = self._engine.remove(key)
        work = self._work.pop(key, None)
        return None if work is None or payload is None else work._replace(payload=payload)


def sound_error(error: StoppedError) -> ProcessError:
    """An engine's own StoppedError, which does not mean that this job was stopped, as the record's error."""
    return ProcessError(f"the engine raised StoppedError: {text_of(error)}")


def sound(result: object) -> object:
    """An engine's result, or the record's error for a coroutine or generator, which nothing would run.

    The engine's own StoppedError is a record's error too: it does not mean that this job was stopped.
    """
    if isinstance(result, StoppedError):
        return sound_error(result)
    return unfinished("the engine", result) or result if isinstance(result, PROMISES) else result
