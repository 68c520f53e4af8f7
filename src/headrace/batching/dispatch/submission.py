"""How records get in: what they cost, whether there is room, and who takes them from there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.batching.dispatch.admission import Admission
from headrace.batching.dispatch.stream import Part
from headrace.batching.dispatch.wakeup import Wakeup
from headrace.batching.options import Options, number
from headrace.batching.pending import Entry, PendingResult, fail
from headrace.batching.policy.cost import CostRule, checked_cost
from headrace.batching.policy.waiting_queue import WaitingQueue
from headrace.batching.stats import Meter
from headrace.batching.tasks import current_task
from headrace.errors import ConfigError, DeadlineExceededError, NotRunningError, QueueFullError, RecordTooLargeError


@dataclass(frozen=True, slots=True)
class WaitingRoom:
    """What an intake and a dispatcher share."""

    lineup: WaitingQueue
    admission: Admission
    wakeup: Wakeup
    meter: Meter
    options: Options


class Dispatching(Protocol):
    """What takes records out of the waiting room until each has its reply. It sleeps on the room's `wakeup`."""

    def arrived(self, cost: float) -> None:
        """A record has joined the lineup while the dispatcher slept."""
        ...

    def flush(self) -> None:
        """No more is coming for a while."""
        ...

    def drain(self) -> None:
        """End once nothing waits."""
        ...

    def end(self) -> None:
        """Let go of everything: what still runs is left behind."""
        ...

    async def run(self) -> None:
        """Serve until drained. Whatever ends this task, nobody is left waiting."""
        ...


class Submission:
    """One life of a batcher, from start to end on one event loop: a waiting room and the dispatcher behind it."""

    def __init__(
        self,
        options: Options,
        cost: CostRule,
        meter: Meter,
        make_dispatcher: Callable[[WaitingRoom], Dispatching],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        own_time = type(loop).time is not asyncio.BaseEventLoop.time
        self.clock: Callable[[], float] = loop.time if own_time else time.monotonic  # which is what loop.time() calls
        self.accepts = True
        self.lineup = WaitingQueue(options.limits)
        self._wakeup = Wakeup()
        self.admission = Admission(self.lineup, self._wakeup, options.capacity, options.max_queue_cost)
        self.dispatcher = make_dispatcher(WaitingRoom(self.lineup, self.admission, self._wakeup, meter, options))
        self.thread = threading.get_ident()
        self._options = options
        self._cost = cost
        if options.reject_oversized:
            self.admission.inspect_all()
        self._meter = meter

    def check_open(self) -> Any:
        """The running task, once it is known that records may be submitted from here.

        Raises:
            NotRunningError: the batcher takes no records any more.
            ConfigError: the code runs on another event loop.
        """
        if self.accepts and threading.get_ident() == self.thread:
            task = current_task(self.loop)
            if task is not None or asyncio.get_running_loop() is self.loop:
                return task
        if not self.accepts or self.loop.is_closed():
            raise NotRunningError(f"{self._options.name} is not running any more: it takes no new records")
        raise ConfigError(
            f"{self._options.name} runs on another event loop: use submit_threadsafe() or submit_blocking() here"
        )

    def checked_cost(self, record: Any, explicit: float | None) -> float:
        """What a record costs.

        Raises:
            CostError: not a finite number >= 0.
            RecordTooLargeError: more than a batch may cost, and `oversized="reject"`.
        """
        cost = checked_cost(self._cost(record) if explicit is None else explicit, record)
        if self._options.reject_oversized and cost > self._options.limits.target_batch_cost:
            raise RecordTooLargeError(
                f"a {type(record).__name__} record costs {cost}, more than the budget of a batch, "
                f'{self._options.limits.target_batch_cost}: shorten it, raise the budget, or pass oversized="alone"'
            )
        return cost

    def ticket(self, record: Any, cost: float, priority: int, caller: Hashable) -> PendingResult[Any]:
        """Let a record wait, for which there is room."""
        ticket: PendingResult[Any] = PendingResult(loop=self.loop)
        ticket.record = record
        ticket.cost = cost
        ticket.arrival = self.clock()
        ticket.home = self
        lineup = self.lineup
        try:
            lineup.queue(priority, caller).append(ticket)
        except BaseException:  # not a priority, or not a caller: the room it had is another's
            self.admission.let_in()
            raise
        lineup.size += 1
        lineup.cost += cost
        if self._wakeup.sleeper is not None:
            self.dispatcher.arrived(cost)
        return ticket

    def join(self, entry: Entry, priority: int, caller: Hashable) -> None:
        """Let an entry wait, for which there is room."""
        entry.arrival = self.clock()
        entry.home = self
        self.lineup.add(entry, priority, caller)
        if self._wakeup.sleeper is not None:
            self.dispatcher.arrived(entry.cost)

    def discard(self, entry: Entry) -> None:
        """A waiting entry is wanted no more: its place is free at once."""
        self._meter.left += entry.count
        self.lineup.discard(entry)
        self.admission.let_in()
        self._wakeup.wake()

    async def wait_until(self, cost: float, deadline_s: float) -> float:
        """Wait for room; returns the seconds left of the deadline.

        Raises:
            DeadlineExceededError: none are left.
        """
        ends = self.clock() + number("deadline_s", deadline_s, above=0)
        try:
            async with asyncio.timeout(deadline_s):
                await self.admission.enter(cost)
        except TimeoutError:
            raise DeadlineExceededError(
                f"there was no room for the record within its deadline of {deadline_s} s"
            ) from None
        left = ends - self.clock()
        if left <= 0:
            self.admission.let_in()
            raise DeadlineExceededError(f"the record was let in after its deadline of {deadline_s} s, and was not run")
        return left

    def expire_in(self, ticket: PendingResult[Any], deadline_s: float) -> None:
        """Fail the ticket if it is not in a batch after `deadline_s`, a number > 0."""

        def expire() -> None:
            if ticket.home is self:
                self.discard(ticket)
                fail([ticket], DeadlineExceededError("the record waited until its deadline, and was not run"))

        timer = self.loop.call_later(deadline_s, expire)
        ticket.add_done_callback(lambda _: timer.cancel())

    def close(self) -> None:
        """Let no more records in."""
        self.accepts = False
        self.admission.inspect_all()

    def end(self) -> None:
        """Let go of everything: no batch is formed any more, and what still runs is left behind."""
        self.close()
        self.dispatcher.end()

    def refuse(self, cause: Exception) -> None:
        """Fail whoever waits for a batch, or for room."""
        self.admission.refuse_all(cause)
        self._meter.left += self.lineup.size
        fail(self.lineup.clear(), cause)

    def check_room(self, cost: float) -> None:
        """Raise QueueFullError unless a record of this cost may enter now."""
        if not self.admission.admits(cost):
            raise QueueFullError(
                f"{self.lineup.size} records of cost {self.lineup.cost} are waiting, and there is no room for one of "
                f"cost {cost}: await submit(), come back later, or raise max_queue_size or max_queue_cost"
            )


class StreamPort:
    """Where a mapped stream enters: each stream is one caller."""

    def __init__(self, intake: Submission, cost: CostRule, options: Options, priority: int) -> None:
        self._intake = intake
        self._shared_cost = None if options.reject_oversized else cost.shared
        self._priority = priority

    def cost(self, record: Any) -> float:
        """What a record costs; raises what its estimator raises, or that it is too large."""
        return self._intake.checked_cost(record, None)

    def shared_cost(self, records: Sequence[Any]) -> float | None:
        """What each of the records costs, if that is known to be the same without asking each."""
        return None if self._shared_cost is None else self._shared_cost(records)

    def enter(self, part: Part, reserved: int) -> bool:
        """Admit the part, or as many of its first records as there is room for; whether none is left."""
        self._intake.check_open()
        room = max(self._intake.admission.room(part.cost), reserved)
        if not room:
            return False
        first = part if room >= part.count else part.split(room)
        self._intake.join(first, self._priority, self)
        return first is part

    async def wait_for_room(self, cost: float) -> None:
        """Wait until a record of this cost may enter."""
        await self._intake.admission.enter(cost)

    def flush(self) -> None:
        """No more is coming for a while."""
        self._intake.dispatcher.flush()
