"""A job's records to workers and back: pieces go to whoever is free, and those of a dead worker to others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

from headrace.cluster.work_units import IN_FLIGHT, WorkUnitSize
from headrace.errors import BrokenOffError, EngineDeadError, HeadraceError, StoppedError, WorkerDiedError
from headrace.events import Event, Listener, RecordFailed, WorkerLost, WorkUnitDone
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.processes.culprits import WorkUnit, after_death

_LAST_WORDS_S = 2.0
"""What a worker that is given up had sent by then may take so long to arrive."""
_DEATHS_IN_A_ROW = 8
"""So many workers that die, none finishing anything in between, and the job ends: they do not die of single records."""


@dataclass(frozen=True, slots=True)
class WorkUnitReply:
    """What a worker made of a piece."""

    results: Sequence[Any]
    """Output or exception of each record."""
    costs: Sequence[int]
    """Of each record, in the engine's unit; 0 where it could not be prepared."""
    events: Sequence[Event] = ()
    """What was observed since the last reply, on the worker's clock."""
    batches: int = 0
    busy_s: float = 0.0
    """Seconds in which its engine worked since the last reply."""


class Worker(Protocol):
    """A process that holds one engine and one batcher."""

    async def load(self) -> float:
        """Wait until its model is loaded; returns what must be added to its clock to have that of this process.

        Raises:
            WorkerDiedError: it died meanwhile.
            NoRoomError: no machine has room for it.
            BrokenOffError: the cluster is gone.
            HeadraceError: why it cannot load.
        """
        ...

    async def work(self, payloads: list[bytes]) -> WorkUnitReply:
        """The results of a piece; several may be asked for at a time.

        Raises:
            WorkerDiedError: it is gone, and so is what it was working on.
        """
        ...

    async def watch(self) -> None:
        """Look after it until it is gone, or cannot be reached any more.

        Raises:
            WorkerDiedError: it is.
        """
        ...

    def kill(self) -> None:
        """End it at once, if it is there."""
        ...


class NoRoomError(HeadraceError):
    """No machine has room for a worker now."""


@dataclass(slots=True)
class _WorkerSlot:
    """One worker after the other, in one place of the crew."""

    name: str
    size: WorkUnitSize
    worker: Worker
    clock_offset_s: float = 0.0
    serving: bool = False
    """Whether its worker has loaded and lives."""
    homeless: bool = False
    """Whether its worker waits for room on a machine."""
    running: dict[asyncio.Task[WorkUnitReply], WorkUnit[Work]] = field(default_factory=dict)
    replied_at: float = 0.0


class WorkerPool:
    """What a job needs of a batcher, with the batchers elsewhere.

    Args:
        workers: already begun.
        hire: begins one more, for the place of a dead one.
        least: records that keep one worker's engine busy.
        stop: how the job is asked to stop.
        listener: told all that workers observe, and what becomes of pieces.
    """

    def __init__(
        self, workers: Sequence[Worker], hire: Callable[[], Worker], least: int, stop: StopRequest, listener: Listener
    ) -> None:
        self._hire = hire
        self._stop = stop
        self._listener = listener
        self._lanes = [_WorkerSlot(str(index + 1), WorkUnitSize(least), worker) for index, worker in enumerate(workers)]
        self._waiting: deque[Work] = deque()
        self._suspects: deque[WorkUnit[Work]] = deque()
        self._warden: _WorkerSlot | None = None
        """The lane that alone deals with suspects, and takes nothing else until there are none; None for any."""
        self._out: deque[tuple[Sequence[Work], Sequence[Any], bool]] = deque()
        self._out_records = self._in_flight = self._deaths_in_a_row = 0
        self._failure: BaseException | None = None
        self._signals: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for lane in self._lanes:
            task = loop.create_task(self._staff(lane), name=f"headrace-worker-{lane.name}")
            task.add_done_callback(self._unstaffed)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def runs_as_completed(
        self, runs: AsyncIterable[Sequence[Work]]
    ) -> AsyncGenerator[tuple[Sequence[Work], Sequence[Any], bool], None]:
        """See `BatcherPort`.

        Raises:
            BrokenOffError: the workers cannot go on.
        """
        feeder = asyncio.get_running_loop().create_task(self._feed(runs), name="headrace-cluster-feed")
        try:
            while True:
                while self._out:
                    done = self._out.popleft()
                    self._out_records -= len(done[0])
                    yield done
                    self._notify()
                if self._failure is not None:
                    raise self._failure
                self._hand_back()
                if self._out:
                    continue
                if feeder.done():
                    feeder.result()
                    if not (self._waiting or self._suspects or self._in_flight):
                        return
                await self._change()
        finally:
            feeder.cancel()
            await asyncio.wait({feeder})

    # -- records in ------------------------------------------------------------------------------------------------

    async def _feed(self, runs: AsyncIterable[Sequence[Work]]) -> None:
        try:
            async for run in runs:
                self._waiting.extend(run)
                self._notify()
                while len(self._waiting) >= self._room:
                    await self._change()
        finally:
            self._notify()

    @property
    def _room(self) -> int:
        """Records that may wait for a worker, or for the sink: the next piece of each, twice."""
        return 2 * sum(lane.size.full for lane in self._lanes)

    def _hand_back(self) -> None:
        """Once the job is asked to stop, what no worker has goes back undone."""
        if not self._stop.requested:
            return
        undone = [*self._waiting, *(work for piece in self._suspects for work in piece.work)]
        self._waiting.clear()
        self._suspects.clear()
        self._warden = None
        if undone:
            self._put(undone, [_undone()] * len(undone), some_failed=True)

    def _take(self, lane: _WorkerSlot) -> WorkUnit[Work] | None:
        """The next piece for this lane, if it may have one now."""
        if self._warden is not None and not self._warden.serving and not (self._waiting or lane.running):
            self._warden = None  # its worker is being replaced, and this one has nothing else it could lose
        if self._suspects and self._warden in (None, lane):
            self._warden = lane
            return None if lane.running else self._suspects.popleft()
        if self._warden is lane:
            if lane.running:
                return None  # the last suspect
            self._warden = None
        if not self._waiting or len(lane.running) >= IN_FLIGHT or self._out_records >= self._room:
            return None
        size = lane.size.now(len(self._waiting), len(self._lanes))
        if len(self._waiting) < size and lane.running:
            return None  # more may come, and nobody waits for these
        return WorkUnit([self._waiting.popleft() for _ in range(min(size, len(self._waiting)))])

    # -- workers ---------------------------------------------------------------------------------------------------

    async def _staff(self, lane: _WorkerSlot) -> None:
        """Keep a worker at work in this lane."""
        while True:
            try:
                lane.clock_offset_s = await lane.worker.load()
                lane.replied_at = asyncio.get_running_loop().time()
                lane.serving, lane.homeless = True, False
                try:
                    await self._serve(lane)
                finally:
                    lane.serving = False
            except NoRoomError as error:
                lane.homeless = True
                if all(other.homeless for other in self._lanes):
                    return self._fail(f"no worker is left, and there is no room for another: {error}")
                if self._warden is lane:
                    self._warden = None
                    self._notify()
            except WorkerDiedError as error:
                self._deaths_in_a_row += 1
                if self._deaths_in_a_row >= _DEATHS_IN_A_ROW:
                    return self._fail(f"{self._deaths_in_a_row} workers died in a row, none finished anything: {error}")
                if self._stop.requested:
                    return None
                lane.worker = self._hire()
            except BrokenOffError:
                raise
            except HeadraceError as error:
                return self._fail(f"worker {lane.name} cannot load the model: {error}")

    def _unstaffed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error  # the cluster is gone, or a bug: nobody may wait for this lane
            self._notify()

    def _fail(self, why: str) -> None:
        self._failure = BrokenOffError(f"{why}; what is finished is kept, run again to continue")
        self._notify()

    async def _serve(self, lane: _WorkerSlot) -> None:
        """Give the lane's worker pieces until it dies."""
        loop = asyncio.get_running_loop()
        watch = loop.create_task(lane.worker.watch(), name=f"headrace-watch-{lane.name}")
        try:
            while True:
                self._hand_back()
                while (piece := self._take(lane)) is not None:
                    payloads = [work.payload for work in piece.work]
                    lane.running[loop.create_task(lane.worker.work(payloads))] = piece
                    self._in_flight += 1
                waiting: set[asyncio.Future[Any]] = {*lane.running, watch, self._change()}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in lane.running if task.done()]:
                    self._returned(lane, task)
                if watch.done():
                    watch.result()
        except WorkerDiedError as error:
            await self._lost(lane, error)
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)  # it too may have heard of the death
            for task in lane.running:
                task.cancel()

    def _returned(self, lane: _WorkerSlot, task: asyncio.Task[WorkUnitReply]) -> None:
        """A piece came back.

        Raises:
            WorkerDiedError: or did not; it is then still among those that run.
        """
        piece = lane.running[task]
        reply = task.result()
        results: Sequence[Any] = reply.results
        dead = next((result for result in results if isinstance(result, EngineDeadError)), None)
        if dead is not None and not self._stop.requested:
            raise WorkerDiedError(f"the engine of worker {lane.name} cannot go on: {dead}")
        if dead is not None:  # the signal that asked the job to stop has reached the engine's own processes too
            results = [_undone() if isinstance(result, EngineDeadError) else result for result in results]
        del lane.running[task]
        self._in_flight -= 1
        self._deaths_in_a_row = 0
        now = asyncio.get_running_loop().time()
        lane.size.learn(len(piece.work), now - lane.replied_at)
        lane.replied_at = now
        for event in reply.events:
            self._listener(
                event if isinstance(event, RecordFailed) else replace(event, at=event.at + lane.clock_offset_s)
            )
        failed = sum(isinstance(result, Exception) for result in results)
        self._listener(WorkUnitDone(lane.name, len(piece.work), failed, reply.batches, reply.busy_s, now))
        work = [item._replace(cost=cost) for item, cost in zip(piece.work, reply.costs, strict=True)]
        self._put(work, results, some_failed=failed > 0)

    async def _lost(self, lane: _WorkerSlot, error: WorkerDiedError) -> None:
        """The lane's worker is dead: what had come back by then counts, the rest is for others."""
        lane.serving = False
        lane.worker.kill()  # it may only be out of reach, and must not go on when it comes back
        if lane.running:
            await asyncio.wait(set(lane.running), timeout=_LAST_WORDS_S)
        for task in lane.running:
            task.cancel()
        await asyncio.gather(*lane.running, return_exceptions=True)
        for task in [task for task in lane.running if not task.cancelled() and task.exception() is None]:
            try:
                self._returned(lane, task)
            except WorkerDiedError:
                pass  # another answer of an engine that cannot go on
        pieces = list(lane.running.values())
        lane.running.clear()
        self._in_flight -= len(pieces)
        if self._warden is None:
            self._warden = lane  # what comes after the dead one tries them: the others' workers are not put at risk
        records = sum(len(piece.work) for piece in pieces)
        self._listener(WorkerLost(lane.name, records, str(error), asyncio.get_running_loop().time()))
        for piece in reversed(pieces):
            again = after_death(piece, alone=len(pieces) == 1)
            self._suspects.extendleft(reversed(again))
            if not again:
                poison = WorkerDiedError(f"{piece.deaths + 1} workers died with this record, the last one: {error}")
                self._put(piece.work, [poison], some_failed=True)
        self._notify()

    # -- results out -----------------------------------------------------------------------------------------------

    def _put(self, work: Sequence[Work], results: Sequence[Any], *, some_failed: bool) -> None:
        self._out.append((work, results, some_failed))
        self._out_records += len(work)
        self._notify()

    def _change(self) -> asyncio.Future[None]:
        """A future that is done once something has changed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._signals.append(future)
        return future

    def _notify(self) -> None:
        signals, self._signals = self._signals, []
        for future in signals:
            if not future.done():
                future.set_result(None)


def _undone() -> StoppedError:
    return StoppedError("the job was asked to stop")
