"""The dispatch loop: acquire a slot, form a batch, admit the next records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace.batching.dispatch.isolation import LargestFit, halves, should_split
from headrace.batching.dispatch.loop import DispatchContext, DispatchLoop
from headrace.batching.dispatch.offload import CallTimer, ProcessCaller
from headrace.batching.foreign_calls import must_propagate
from headrace.batching.options import BatchOptions
from headrace.batching.pending import QueueEntry, fail, records_of, resolve
from headrace.batching.policy.cost import BatchCost
from headrace.batching.policy.waiting_queue import FormedBatch
from headrace.device_errors import is_out_of_memory
from headrace.errors import ProcessTimeoutError, StoppedError
from headrace.events import BatchDone, BatchFormed, BatchSplit, CloseReason

logger = logging.getLogger("headrace")


class _SingleRecordBatch:
    """Holds the only record of a running batch: cancelling the record cancels the call."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def discard(self, entry: QueueEntry) -> None:
        entry.holder = None
        self._task.cancel()


class Dispatcher(DispatchLoop):
    """Owns every batch until each of its records has a result."""

    def __init__(self, context: DispatchContext, options: BatchOptions) -> None:
        super().__init__(context)
        self._batch_timeout_s = options.batch_timeout_s
        self._caller = ProcessCaller(options.process_fn, offload=options.offload, name=f"{context.options.name}-worker")
        self._concurrent = options.max_concurrent_batches
        self._overlap = options.overlap
        self._slots = asyncio.Semaphore(options.slots)
        self._last_done = 0.0
        self._runs: dict[asyncio.Task[None], list[QueueEntry]] = {}
        self._cancelled_calls: set[asyncio.Task[Sequence[object]]] = set()
        self._memory = LargestFit()
        self._flush_count = 0
        self._enough = 1
        """Queue size at which to wake a sleeping dispatcher."""
        self._longest = 0.0
        self._company_s = 0.0
        """Seconds for which records have waited for company since the slot was free."""

    def arrived(self, cost: float) -> None:
        if cost > self._longest:
            self._longest = cost
        if self._queue.size >= self._enough or self._is_full():
            self._wakeup.wake()

    def flush(self) -> None:
        self._flush_count = self._queue.size
        self._wakeup.wake()

    def set_budget(self, cost: float) -> None:
        """Change the most that later batches may cost; the limit after an out-of-memory error stays."""
        self._queue.set_budget(min(cost, self._memory.cost))
        self._wakeup.wake()

    def end(self) -> None:
        self._ended = True
        self._caller.close()

    async def _serve(self) -> None:
        while True:
            await self._slots.acquire()
            free_since = self._clock()
            self._company_s = 0.0
            reason = await self._until_ready()
            if reason is None:
                break
            self._begin(self._queue.take(reason), free_since)
            self._admission.admit_waiting()
        while self._runs:
            await asyncio.wait(self._runs)

    async def _until_ready(self) -> CloseReason | None:
        """Wait for a reason to close a batch and return it; None when drained. Called with a free slot."""
        queue, timeout = self._queue, self._batch_timeout_s
        while True:
            self._flush_count = min(self._flush_count, queue.size)  # some of those records may have left
            if not queue.size:
                if self._draining and not self._admission.waiting:
                    return None
                await self._sleep(1, None)
                continue
            limits = queue.limits
            by_length = limits.padded and queue.size < limits.max_batch_size  # otherwise the number of records decides
            self._longest = queue.longest() if by_length else 0.0
            if self._is_full():
                return "boundary"  # `take` replaces it with the limit that the batch meets
            if self._draining or self._flush_count:
                return "drain"
            if (
                self._overlap and len(self._runs) >= self._concurrent
            ):  # it could only wait there, and here it may become larger
                await self._sleep(queue.limits.max_batch_size, None)
                continue
            if not timeout or self._admission.is_full:
                return "idle"
            deadline = queue.oldest_arrival() + timeout
            if (now := self._clock()) >= deadline:
                return "timeout"
            await self._sleep(queue.limits.max_batch_size, deadline)
            self._company_s += self._clock() - now

    def _is_full(self) -> bool:
        """Whether more records would not change the next batch."""
        queue = self._queue
        return queue.limits.reached(queue.size, queue.cost, self._longest)

    async def _sleep(self, enough: int, deadline: float | None) -> None:
        """Wait for `enough` records or a full batch, until `deadline` on the loop's clock."""
        self._enough = enough
        await self._wakeup.sleep(deadline)

    def _begin(self, batch: FormedBatch, free_since: float) -> None:
        """Start a batch. Only its task references its entries, so nothing outlives the batch."""
        self._flush_count = max(self._flush_count - batch.size, 0)
        now, number = self._clock(), self._meter.batches
        padded = batch.computed
        self._meter.began(now, batch.size, batch.cost, padded, batch.reason, batch.waits(now))
        if self._options.listener is not None:
            waits = now - free_since, now, self._company_s, now - min(entry.arrival for entry in batch.entries)
            self._emit(BatchFormed, number, batch.size, batch.cost, padded, batch.reason, *waits)
        run = self._run(number, batch, padded)
        task = asyncio.get_running_loop().create_task(run, name=f"{self._options.name}-batch-{number}")
        self._runs[task] = batch.entries
        task.add_done_callback(self._on_batch_done)

    async def _run(self, number: int, batch: FormedBatch, padded: float) -> None:
        started, timer = self._clock(), CallTimer()
        completed = failed = stopped = 0
        cancelled = batch.size
        try:
            if batch.size == 1 and self._caller.cancellable:
                self._make_cancellable(batch.entries[0])
            completed, failed, stopped = await self._process(number, batch.entries, timer)
            cancelled = 0
            if not failed:
                self._memory.succeeded(padded)
        finally:
            now = self._clock()
            # With overlap, this one only waited until the batch before it was done.
            took = now - (max(started, self._last_done) if self._overlap else started)
            self._last_done = now
            if not self._left_behind:
                self._meter.ended(now, batch.size, failed, completed, took)
                none = failed + cancelled
                facts = number, batch.size, none, batch.cost, padded, took, now, stopped + cancelled
                self._emit(BatchDone, *facts, timer.handed_s(took))
                self._slots.release()

    async def _process(self, number: int, batch: list[QueueEntry], timer: CallTimer) -> tuple[int, int, int]:
        """Run a batch and resolve each record as soon as its outcome is known.

        Isolating one bad record takes at most 2·log2(records) extra calls.

        Returns:
            How many records got a result, how many an exception, and how many of those a `StoppedError`.
        """
        completed = failed = stopped = 0
        parts = [batch]
        while parts:
            part = parts.pop()
            if part is not batch:
                part = [entry for entry in part if not entry.done()]
            if not part:
                continue
            began = self._clock()
            try:
                results = await self._call(timer, records_of(part))
            except BaseException as exc:  # an engine may raise anything; it fails only its records
                if must_propagate(exc):
                    raise
                size = sum(entry.count for entry in part)
                if size == 1 or not should_split(exc, self._options.on_error):
                    failed += fail(part, exc)
                    continue
                self._report_split(number, part, exc, self._clock() - began)
                first, second = halves(part, size)
                if first[-1] not in part:  # split off an entry: it belongs to the batch too
                    batch.append(first[-1])
                parts += [second, first]
            else:
                good, bad = resolve(part, results)
                completed += good
                failed += bad
                stopped += sum(isinstance(result, StoppedError) for result in results) if bad else 0
        return completed, failed, stopped

    def _make_cancellable(self, entry: QueueEntry) -> None:
        """Let the only record of the running batch cancel it; at once if the record is done already."""
        task = asyncio.current_task()
        assert task is not None  # each batch is one
        entry.holder = _SingleRecordBatch(task)
        if entry.done():
            entry.holder.discard(entry)

    def _on_batch_done(self, task: asyncio.Task[None]) -> None:
        entries = self._runs.pop(task)
        if self._overlap:
            self._wakeup.wake()
        if not task.cancelled() and (exc := task.exception()) is not None:
            fail(entries, exc)  # a bug, but the callers must not hang
            logger.error("%s: %s ended unexpectedly", self._options.name, task.get_name(), exc_info=exc)

    async def _call(self, timer: CallTimer, records: Sequence[object]) -> Sequence[object]:
        timeout = self._options.process_timeout_s
        if timeout is None:
            return await self._caller.call(records, timer)
        call = asyncio.get_running_loop().create_task(
            self._caller.call(records, timer), name=f"{self._options.name}-call"
        )
        finished = False
        try:
            finished = bool((await asyncio.wait({call}, timeout=timeout))[0])
        finally:
            if not finished:  # it takes too long, or this task is cancelled
                self._cancel_call(call)
        if not finished:
            raise ProcessTimeoutError(
                f"process_fn did not return a batch of {len(records)} records within process_timeout_s={timeout}; "
                "its result is ignored. Raise the limit or use smaller batches"
            )
        return call.result()

    def _cancel_call(self, call: asyncio.Task[Sequence[object]]) -> None:
        """Cancel a call without waiting for its end, which is still tracked here."""
        call.cancel()
        self._cancelled_calls.add(call)
        call.add_done_callback(self._forget)

    def _forget(self, call: asyncio.Task[Sequence[object]]) -> None:
        self._cancelled_calls.discard(call)
        if not call.cancelled():
            call.exception()  # mark as retrieved, so that the loop does not report it

    def _report_split(self, number: int, part: list[QueueEntry], cause: BaseException, took_s: float) -> None:
        """A failed part is run again in halves; later batches are smaller if it ran out of memory."""
        out_of_memory = is_out_of_memory(cause)
        if out_of_memory:
            limits = self._queue.limits
            failed = BatchCost(limits)
            for entry in part:
                failed.add(entry.cost, entry.count)
            self._memory.failed(failed.computed)
            self._queue.set_budget(min(limits.target_batch_cost, self._memory.cost))
        size = sum(entry.count for entry in part)
        self._emit(BatchSplit, number, size, cause, out_of_memory, self._clock(), took_s)

    def _abandon(self, cause: BaseException) -> None:
        if self._left_behind:
            return  # the loop is gone, and its callers with it
        self.refuse(cause)
        for task, entries in self._runs.items():
            fail(entries, cause)
            task.cancel()
