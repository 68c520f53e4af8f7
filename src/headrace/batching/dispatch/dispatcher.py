"""The loop that turns what waits into batches: take a slot, then form the batch, then let the next records in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from headrace.batching.dispatch import isolation
from headrace.batching.dispatch.isolation import MemoryLimit
from headrace.batching.dispatch.offload import ProcessCaller
from headrace.batching.dispatch.submission import WaitingRoom
from headrace.batching.options import BatchOptions
from headrace.batching.pending import Entry, fail
from headrace.batching.policy.cost import batch_cost
from headrace.batching.policy.waiting_queue import Batch
from headrace.errors import ProcessTimeoutError, StoppedError
from headrace.events import BatchDone, BatchFormed, BatchSplit, CloseReason

logger = logging.getLogger("headrace")


class _Running:
    """Where a record is that is a batch of its own: leaving it ends the call, for nobody else waits for it."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def discard(self, entry: Entry) -> None:
        """The record is wanted no more."""
        entry.home = None
        self._task.cancel()


class Dispatcher:
    """Owns every batch from its forming until each of its records has a reply."""

    def __init__(self, room: WaitingRoom, options: BatchOptions) -> None:
        self._lineup = room.lineup
        self._admission = room.admission
        self._wakeup = room.wakeup
        self._meter = room.meter
        self._options = room.options
        self._batch_timeout_s = options.batch_timeout_s
        self._caller = ProcessCaller(options.process_fn, offload=options.offload, name=f"{room.options.name}-worker")
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._slots = asyncio.Semaphore(options.max_concurrent_batches)
        self._runs: dict[asyncio.Task[None], list[Entry]] = {}
        self._given_up: set[asyncio.Task[Any]] = set()
        self._memory = MemoryLimit()
        self._draining = False
        self._ended = False
        self._hurry = 0
        self._enough = 1
        """Records for which a sleeping dispatcher is woken."""
        self._longest = 0.0

    def arrived(self, cost: float) -> None:
        """A record has joined the lineup while the dispatcher slept."""
        if cost > self._longest:
            self._longest = cost
        if self._lineup.size >= self._enough or self._is_full():
            self._wakeup.wake()

    def flush(self) -> None:
        """No more is coming for a while: close batches without waiting until what waits now has gone."""
        self._hurry = self._lineup.size
        self._wakeup.wake()

    def drain(self) -> None:
        """End once nothing waits."""
        self._draining = True
        self._wakeup.wake()

    def end(self) -> None:
        """Let go of everything: batches that still run are left behind, and neither counted nor told of."""
        self._ended = True
        self._caller.close()

    @property
    def _left_behind(self) -> bool:
        return self._ended or self._loop.is_closed()

    async def run(self) -> None:
        """Serve until drained. Whatever ends this task, nobody is left waiting."""
        cause: BaseException = StoppedError(f"{self._options.name} stopped before this record was processed")
        try:
            await self._serve()
            while self._runs:
                await asyncio.wait(self._runs)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as exc:
            logger.critical("%s failed, and its waiting records with it", self._options.name, exc_info=exc)
            cause = exc
            raise
        finally:
            self._abandon(cause)

    async def _serve(self) -> None:
        while True:
            await self._slots.acquire()
            free_since = self._clock()
            reason = await self._until_ready()
            if reason is None:
                return
            self._begin(self._lineup.take(reason), free_since)
            self._admission.let_in()

    async def _until_ready(self) -> CloseReason | None:
        """Why to close a batch now; None when drained. Called with a slot free."""
        lineup, timeout = self._lineup, self._batch_timeout_s
        while True:
            self._hurry = min(self._hurry, lineup.size)  # those it was for may have left
            if not lineup.size:
                if self._draining and not self._admission.waiting:
                    return None
                await self._sleep(1, None)
                continue
            self._longest = lineup.longest() if lineup.limits.padded else 0.0
            if self._is_full():
                return "boundary"  # unless it meets the limit that makes it full, which `take` finds out
            if self._draining or self._hurry:
                return "drain"
            if not timeout or self._admission.is_full:
                return "idle"
            deadline = lineup.oldest_arrival() + timeout
            if self._clock() >= deadline:
                return "timeout"
            await self._sleep(lineup.limits.max_batch_size, deadline)

    def _is_full(self) -> bool:
        """Whether more company would not change the next batch."""
        lineup = self._lineup
        size, limits = lineup.size, lineup.limits
        return (
            size >= limits.max_batch_size
            or lineup.cost >= limits.target_batch_cost
            or (limits.padded and size * self._longest >= limits.target_batch_cost)
        )

    async def _sleep(self, enough: int, deadline: float | None) -> None:
        """Wait for `enough` records or a full batch, until `deadline` on the loop's clock."""
        self._enough = enough
        await self._wakeup.sleep(deadline)

    def _begin(self, batch: Batch, free_since: float) -> None:
        """Start a batch. Its entries are kept by its task alone, so that nothing outlives the batch."""
        self._hurry = max(self._hurry - batch.size, 0)
        now, number = self._clock(), self._meter.batches
        padded = batch.padded_cost() if self._lineup.limits.padded else batch.cost
        self._meter.began(now, batch, padded)
        self._emit(BatchFormed, number, batch.size, batch.cost, padded, batch.reason, now - free_since, now)
        run = self._run(number, batch, padded)
        task = asyncio.get_running_loop().create_task(run, name=f"{self._options.name}-batch-{number}")
        self._runs[task] = batch.entries
        task.add_done_callback(self._over)

    async def _run(self, number: int, batch: Batch, padded: float) -> None:
        started = self._clock()
        completed = failed = stopped = 0
        try:
            if batch.size == 1 and self._caller.cancellable:
                self._let_leave(batch.entries[0])
            completed, failed, stopped = await isolation.process(
                batch.entries, self._call, self._options.on_error, self._on_split(number)
            )
            if not failed:
                self._memory.succeeded(padded)
        finally:
            now = self._clock()
            if not self._left_behind:
                self._meter.ended(now, batch.size, failed, completed, now - started)
                self._emit(BatchDone, number, batch.size, failed, batch.cost, padded, now - started, now, stopped)
                self._slots.release()

    def _let_leave(self, entry: Entry) -> None:
        """From the running batch of its own, if the record is not gone already."""
        task = asyncio.current_task()
        assert task is not None  # each batch is one
        entry.home = _Running(task)
        if entry.done():
            entry.home.discard(entry)

    def _over(self, task: asyncio.Task[None]) -> None:
        entries = self._runs.pop(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            fail(entries, exc)  # this is a bug: the records must not wait for its repair
            logger.error("%s: %s ended unexpectedly", self._options.name, task.get_name(), exc_info=exc)

    async def _call(self, records: list[Any]) -> Any:
        timeout = self._options.process_timeout_s
        if timeout is None:
            return await self._caller.call(records)
        call = asyncio.get_running_loop().create_task(self._caller.call(records), name=f"{self._options.name}-call")
        try:
            done, _ = await asyncio.wait({call}, timeout=timeout)
        except BaseException:
            self._give_up(call)
            raise
        if not done:
            self._give_up(call)
            raise ProcessTimeoutError(
                f"process_fn has not returned a batch of {len(records)} records within process_timeout_s={timeout}; "
                "its result will be ignored. Raise the limit or make batches smaller"
            )
        return call.result()

    def _give_up(self, call: asyncio.Task[Any]) -> None:
        """Cancel a call without waiting for it to agree; its end is still owned here."""
        call.cancel()
        self._given_up.add(call)
        call.add_done_callback(self._forget)

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._given_up.discard(call)
        if not call.cancelled():
            call.exception()  # read, so that the loop does not report what nobody waits for

    def _on_split(self, number: int) -> Callable[[list[Entry], BaseException], None]:
        def split(part: list[Entry], cause: BaseException) -> None:
            out_of_memory = isolation.is_out_of_memory(cause)
            if out_of_memory:
                limits = self._lineup.limits
                costs = [entry.cost for entry in part for _ in range(entry.count)]
                self._memory.failed(batch_cost(costs, padded=limits.padded))
                self._lineup.set_budget(min(limits.target_batch_cost, self._memory.cost))
            self._emit(BatchSplit, number, sum(entry.count for entry in part), cause, out_of_memory, self._clock())

        return split

    def _abandon(self, cause: BaseException) -> None:
        """Fail whoever still waits, and let go of what still runs."""
        if self._left_behind:
            return  # the loop is gone, and with it whoever waited
        self._admission.refuse_all(cause)
        self._meter.left += self._lineup.size
        fail(self._lineup.clear(), cause)
        for task, entries in self._runs.items():
            fail(entries, cause)
            task.cancel()

    def _emit(self, event: type[Any], *fields: Any) -> None:
        """Tell the listener, from the event loop itself: if it raises, the loop reports it and no batch bears it."""
        if self._options.listener is not None and not self._left_behind:
            self._loop.call_soon(self._options.listener, event(*fields))
