"""Submission: checks a record's cost, waits for room and queues it for the dispatcher."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from headrace.batching.dispatch.admission import Admission
from headrace.batching.dispatch.loop import DispatchContext, DispatchLoop
from headrace.batching.dispatch.wakeup import Wakeup
from headrace.batching.foreign_calls import current_task
from headrace.batching.options import Options, number
from headrace.batching.pending import PendingResult, QueueEntry, fail, is_column
from headrace.batching.policy.cost import CostRule, checked_cost
from headrace.batching.policy.waiting_queue import WaitingQueue
from headrace.batching.stats import BatchMeter
from headrace.errors import ConfigError, DeadlineExceededError, NotRunningError, QueueFullError, RecordTooLargeError


class Submission:
    """One start-to-stop session of a batcher on one event loop: a waiting queue and its dispatcher."""

    def __init__(
        self,
        options: Options,
        cost: CostRule,
        meter: BatchMeter,
        make_dispatcher: Callable[[DispatchContext], DispatchLoop],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        own_time = type(loop).time is not asyncio.BaseEventLoop.time
        self.clock: Callable[[], float] = loop.time if own_time else time.monotonic  # what loop.time() calls
        self.accepts = True
        self.queue = WaitingQueue(options.limits)
        self._wakeup = Wakeup()
        self.admission = Admission(self.queue, self._wakeup, options.capacity, options.max_queue_cost)
        self.dispatcher = make_dispatcher(DispatchContext(self.queue, self.admission, self._wakeup, meter, options))
        self.thread = threading.get_ident()
        self._options = options
        self._cost = cost
        if options.reject_oversized:
            self.admission.inspect_all()
        self._meter = meter

    def check_open(self) -> asyncio.Task[object] | None:
        """Check that records may be submitted from here; returns the running task.

        Raises:
            NotRunningError: the batcher accepts no more records.
            ConfigError: called from another event loop.
        """
        if self.accepts and threading.get_ident() == self.thread:
            task = current_task(self.loop)
            if task is not None or asyncio.get_running_loop() is self.loop:
                return task
        if not self.accepts or self.loop.is_closed():
            raise NotRunningError(f"{self._options.name} is not running any more: it accepts no new records")
        raise ConfigError(
            f"{self._options.name} runs on another event loop: use submit_threadsafe() or submit_blocking() here"
        )

    def checked_cost(self, cost: float, kind: type) -> float:
        """The cost of a record of this type, if the batcher takes it.

        Raises:
            CostError: it is not a finite number >= 0.
            RecordTooLargeError: it exceeds the batch budget, and `oversized="reject"`.
        """
        cost = checked_cost(cost, kind)
        if self._options.reject_oversized and cost > self._options.limits.target_batch_cost:
            raise RecordTooLargeError(
                f"a {kind.__name__} record costs {cost}, more than the budget of a batch, "
                f'{self._options.limits.target_batch_cost}: shorten it, raise the budget, or pass oversized="alone"'
            )
        return cost

    def cost(self, record: object) -> float:
        """The record's cost; raises what its estimator raises, or as `checked_cost`."""
        return self.checked_cost(self._cost.estimate(record), type(record))

    def run_cost(self, records: Sequence[object]) -> float:
        """The cost of each record of a run, as a column says, or that of its first; raises as `cost` does."""
        if is_column(records):
            return self.checked_cost(records.cost, type(records))
        return self.cost(records[0])

    def shared_cost(self, records: Sequence[object]) -> float | None:
        """The cost of each record if all are known to cost the same, else None."""
        return None if self._options.reject_oversized else self._cost.shared(records)

    def enter(self, entry: QueueEntry, reserved: int, priority: int, caller: Hashable) -> bool:
        """Queue the entry, or as many of its first records as there is room for; returns whether all were queued.

        At least `reserved` records may enter.
        """
        self.check_open()
        room = max(self.admission.room(entry.cost), reserved)
        if not room:
            return False
        first = entry if room >= entry.count else entry.split(room)
        first.arrival, first.holder = self.clock(), self
        self.queue.add(first, priority, caller)
        self.queued(first.cost)
        return first is entry

    def enqueue(self, record: object, cost: float, priority: int, caller: Hashable) -> PendingResult:
        """Queue a record that was admitted."""
        pending = PendingResult(loop=self.loop)
        pending.record = record
        pending.cost = cost
        pending.arrival = self.clock()
        pending.holder = self
        queue = self.queue
        try:
            queue.caller_queue(priority, caller).append(pending)
        except BaseException:  # invalid priority or caller: its place is free again
            self.admission.admit_waiting()
            raise
        queue.size += 1
        queue.cost += cost
        self.queued(cost)
        return pending

    def queued(self, cost: float) -> None:
        """Tell a sleeping dispatcher that a record was queued."""
        if self._wakeup.sleeper is not None:
            self.dispatcher.arrived(cost)

    def discard(self, entry: QueueEntry) -> None:
        """Drop a cancelled entry; its place is free immediately."""
        self._meter.left += entry.count
        self.queue.discard(entry)
        self.admission.admit_waiting()
        self._wakeup.wake()

    async def wait_until(self, cost: float, deadline_s: float) -> float:
        """Wait for room; returns the seconds left until the deadline.

        Raises:
            DeadlineExceededError: the deadline has passed.
        """
        ends = self.clock() + number("deadline_s", deadline_s, above=0)
        try:
            async with asyncio.timeout(deadline_s):
                await self.admission.enter(cost)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the queue had no room for the record within its deadline of {deadline_s} s"
            ) from None
        left = ends - self.clock()
        if left <= 0:
            self.admission.admit_waiting()
            raise DeadlineExceededError(f"the record was admitted after its deadline of {deadline_s} s and was not run")
        return left

    def expire_in(self, pending: PendingResult, deadline_s: float) -> None:
        """Fail the record if it is not in a batch after `deadline_s` seconds, > 0."""

        def expire() -> None:
            if pending.holder is self:
                self.discard(pending)
                fail([pending], DeadlineExceededError("the record waited until its deadline and was not run"))

        timer = self.loop.call_later(deadline_s, expire)
        pending.add_done_callback(lambda _: timer.cancel())

    def close(self) -> None:
        self.accepts = False
        self.admission.inspect_all()

    def end(self) -> None:
        """Stop forming batches; what still runs is abandoned."""
        self.close()
        self.dispatcher.end()

    def check_room(self, cost: float) -> None:
        """Raise QueueFullError if there is no room for a record of this cost."""
        if not self.admission.admits(cost):
            raise QueueFullError(
                f"{self.queue.size} records of cost {self.queue.cost} are waiting, and there is no room for one of "
                f"cost {cost}: await submit(), try again later, or raise max_queue_size or max_queue_cost"
            )
