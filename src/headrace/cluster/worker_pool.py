"""Distributes the records of a job to workers. Work units of a dead worker go to other workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from headrace.cluster.work_units import IN_FLIGHT, WorkUnitSize
from headrace.errors import BrokenOffError, EngineDeadError, HeadraceError, StoppedError, WorkerDiedError
from headrace.events import Event, Listener, RecordFailed, WorkerLost, WorkUnitDone
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.processes.crash_isolation import WorkUnit, after_death

_LAST_REPLIES_S = 2.0
"""Seconds to wait for replies that a dead worker had already sent."""
_DEATHS_IN_A_ROW = 8
"""Consecutive deaths of workers, without a finished work unit in between, that end the job."""


@dataclass(frozen=True, slots=True)
class WorkUnitReply:
    """A worker's reply to a work unit."""

    results: Sequence[object]
    """Output or exception of each record."""
    costs: Sequence[int]
    """Cost of each record, in the engine's unit; 0 if it could not be prepared."""
    events: Sequence[Event] = ()
    """Events since the last reply, on the worker's clock."""
    batches: int = 0
    busy_s: float = 0.0
    """Seconds that the engine was busy since the last reply."""


class Worker(Protocol):
    """A process that holds one engine and one batcher."""

    async def load(self) -> float:
        """Wait until the model is loaded; returns the offset of this process's clock to the worker's, in seconds.

        Raises:
            WorkerDiedError: the worker died.
            NoRoomError: no machine has room for it.
            BrokenOffError: the connection to the cluster is lost.
            HeadraceError: the model cannot be loaded.
        """

    async def work(self, payloads: list[bytes]) -> WorkUnitReply:
        """Process a work unit. Several calls may run concurrently.

        Raises:
            WorkerDiedError: the worker died, and the work unit is lost.
        """

    async def watch(self) -> NoReturn:
        """Check the worker's health until it dies or cannot be reached. Raises WorkerDiedError: the worker died."""

    def kill(self) -> None:
        """Kill the worker, if it is alive."""


class NoRoomError(HeadraceError):
    """No machine has room for a worker now."""


@dataclass(slots=True)
class _WorkerSlot:
    """A place in the pool. A dead worker is replaced in its slot."""

    name: str
    size: WorkUnitSize
    worker: Worker
    clock_offset_s: float = 0.0
    ready: bool = False
    """Whether the worker has loaded and is alive."""
    has_no_room: bool = False
    """Whether no machine has room for the worker."""
    running: dict[asyncio.Task[WorkUnitReply], WorkUnit[Work]] = field(default_factory=dict)
    replied_at: float = 0.0


class WorkerPool:
    """The batcher of a job whose batchers run on workers.

    Args:
        least: records that keep the engine of one worker busy.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        start_worker: Callable[[], Worker],
        least: int,
        stop: StopRequest,
        listener: Listener,
    ) -> None:
        self._start_worker = start_worker
        self._stop = stop
        self._listener = listener
        self._slots = [_WorkerSlot(str(index + 1), WorkUnitSize(least), worker) for index, worker in enumerate(workers)]
        self._waiting: deque[Work] = deque()
        self._suspects: deque[WorkUnit[Work]] = deque()
        self._suspect_slot: _WorkerSlot | None = None
        """The slot that alone retries suspects, and takes no other work until none are left. None allows any slot."""
        self._out: deque[tuple[Sequence[Work], Sequence[object], bool]] = deque()
        self._out_records = self._in_flight = self._deaths_in_a_row = 0
        self._failure: BaseException | None = None
        self._signals: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for slot in self._slots:
            task = loop.create_task(self._run_slot(slot), name=f"headrace-worker-{slot.name}")
            task.add_done_callback(self._slot_ended)
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
    ) -> AsyncGenerator[tuple[Sequence[Work], Sequence[object], bool], None]:
        """Yield the results of runs of records as work units come back.

        Raises:
            BrokenOffError: the workers cannot continue.
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

    # -- input ------------------------------------------------------------------------------------------------------

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
        """Maximum records that wait for a worker, or for the sink: two work units per worker."""
        return 2 * sum(slot.size.full for slot in self._slots)

    def _hand_back(self) -> None:
        """After a stop request, return the records that no worker has as not processed."""
        if not self._stop.requested:
            return
        unprocessed = [*self._waiting, *(work for unit in self._suspects for work in unit.work)]
        self._waiting.clear()
        self._suspects.clear()
        self._suspect_slot = None
        if unprocessed:
            self._put(unprocessed, [_stopped()] * len(unprocessed), some_failed=True)

    def _take(self, slot: _WorkerSlot) -> WorkUnit[Work] | None:
        if self._suspect_slot is not None and not self._suspect_slot.ready and not (self._waiting or slot.running):
            self._suspect_slot = None  # its worker is being replaced, and this slot has no other work to lose
        if self._suspects and self._suspect_slot in (None, slot):
            self._suspect_slot = slot
            return None if slot.running else self._suspects.popleft()
        if self._suspect_slot is slot:
            if slot.running:
                return None  # still runs the last suspect
            self._suspect_slot = None
        if not self._waiting or len(slot.running) >= IN_FLIGHT or self._out_records >= self._room:
            return None
        size = slot.size.now(len(self._waiting), len(self._slots))
        if len(self._waiting) < size and slot.running:
            return None  # wait for a full unit: this worker is busy
        return WorkUnit([self._waiting.popleft() for _ in range(min(size, len(self._waiting)))])

    # -- workers ---------------------------------------------------------------------------------------------------

    async def _run_slot(self, slot: _WorkerSlot) -> None:
        while True:
            try:
                slot.clock_offset_s = await slot.worker.load()
                slot.replied_at = asyncio.get_running_loop().time()
                slot.ready, slot.has_no_room = True, False
                try:
                    await self._serve(slot)
                finally:
                    slot.ready = False
            except NoRoomError as error:
                slot.has_no_room = True
                if all(other.has_no_room for other in self._slots):
                    return self._fail(f"no worker is left, and there is no room for another: {error}")
                if self._suspect_slot is slot:
                    self._suspect_slot = None
                    self._notify()
            except WorkerDiedError as error:
                self._deaths_in_a_row += 1
                if self._deaths_in_a_row >= _DEATHS_IN_A_ROW:
                    return self._fail(f"{self._deaths_in_a_row} workers died in a row without any result: {error}")
                if self._stop.requested:
                    return None
                slot.worker = self._start_worker()
            except BrokenOffError:
                raise
            except HeadraceError as error:
                return self._fail(f"worker {slot.name} cannot load the model: {error}")

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error  # the cluster is gone, or a bug: do not wait for this slot
            self._notify()

    def _fail(self, why: str) -> None:
        self._failure = BrokenOffError(f"{why}; finished records are kept, run again to continue")
        self._notify()

    async def _serve(self, slot: _WorkerSlot) -> None:
        loop = asyncio.get_running_loop()
        watch = loop.create_task(slot.worker.watch(), name=f"headrace-watch-{slot.name}")
        try:
            while True:
                self._hand_back()
                while (unit := self._take(slot)) is not None:
                    payloads = [work.payload for work in unit.work]
                    slot.running[loop.create_task(slot.worker.work(payloads))] = unit
                    self._in_flight += 1
                waiting: set[asyncio.Future[Any]] = {*slot.running, watch, self._change()}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in slot.running if task.done()]:
                    self._on_reply(slot, task)
                if watch.done():
                    watch.result()
        except WorkerDiedError as error:
            await self._worker_died(slot, error)
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)  # it may have failed too
            for task in slot.running:
                task.cancel()

    def _on_reply(self, slot: _WorkerSlot, task: asyncio.Task[WorkUnitReply]) -> None:
        """Process the reply to a work unit.

        Raises:
            WorkerDiedError: there is no reply. The work unit stays in `running`.
        """
        unit = slot.running[task]
        reply = task.result()
        results = reply.results
        dead = next((result for result in results if isinstance(result, EngineDeadError)), None)
        if dead is not None and not self._stop.requested:
            raise WorkerDiedError(f"the engine of worker {slot.name} has died: {dead}")
        if dead is not None:  # the signal that stops the job has also reached the engine's processes
            results = [_stopped() if isinstance(result, EngineDeadError) else result for result in results]
        del slot.running[task]
        self._in_flight -= 1
        self._deaths_in_a_row = 0
        now = asyncio.get_running_loop().time()
        slot.size.learn(len(unit.work), now - slot.replied_at)
        slot.replied_at = now
        for event in reply.events:
            self._listener(
                event if isinstance(event, RecordFailed) else replace(event, at=event.at + slot.clock_offset_s)
            )
        failed = sum(isinstance(result, Exception) for result in results)
        self._listener(WorkUnitDone(slot.name, len(unit.work), failed, reply.batches, reply.busy_s, now))
        work = [item._replace(cost=cost) for item, cost in zip(unit.work, reply.costs, strict=True)]
        self._put(work, results, some_failed=failed > 0)

    async def _worker_died(self, slot: _WorkerSlot, error: WorkerDiedError) -> None:
        """Handle a dead worker: keep the replies it had sent, and return its other work units."""
        slot.ready = False
        slot.worker.kill()  # it may only be unreachable, and must not continue later
        if slot.running:
            await asyncio.wait(set(slot.running), timeout=_LAST_REPLIES_S)
        for task in slot.running:
            task.cancel()
        await asyncio.gather(*slot.running, return_exceptions=True)
        for task in [task for task in slot.running if not task.cancelled() and task.exception() is None]:
            try:
                self._on_reply(slot, task)
            except WorkerDiedError:
                pass  # another reply of a dead engine
        units = list(slot.running.values())
        slot.running.clear()
        self._in_flight -= len(units)
        if self._suspect_slot is None:
            self._suspect_slot = slot  # its replacement retries them, so that no other worker is put at risk
        records = sum(len(unit.work) for unit in units)
        self._listener(WorkerLost(slot.name, records, str(error), asyncio.get_running_loop().time()))
        for unit in reversed(units):
            again = after_death(unit, alone=len(units) == 1)
            self._suspects.extendleft(reversed(again))
            if not again:
                poison = WorkerDiedError(f"{unit.deaths + 1} workers died with this record; the last: {error}")
                self._put(unit.work, [poison], some_failed=True)
        self._notify()

    # -- output -----------------------------------------------------------------------------------------------------

    def _put(self, work: Sequence[Work], results: Sequence[object], *, some_failed: bool) -> None:
        self._out.append((work, results, some_failed))
        self._out_records += len(work)
        self._notify()

    def _change(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._signals.append(future)
        return future

    def _notify(self) -> None:
        signals, self._signals = self._signals, []
        for future in signals:
            if not future.done():
                future.set_result(None)


def _stopped() -> StoppedError:
    return StoppedError("the job was stopped")
