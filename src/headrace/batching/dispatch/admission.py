"""Backpressure: bounds the waiting queue in records and cost. Callers wait or are refused while it is full."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.batching.dispatch.wakeup import Wakeup
from headrace.batching.pending import own_copy
from headrace.batching.policy.waiting_queue import WaitingQueue

_UNLIMITED = float("inf")


class Admission:
    """Admits records to a `WaitingQueue` while it has room; waiting submitters are admitted in arrival order.

    A record that exceeds the cost limit is admitted once the queue is empty. The dispatcher is woken when a submitter
    starts to wait or releases a reservation without using it.
    """

    def __init__(self, queue: WaitingQueue, wakeup: Wakeup, capacity: int, max_cost: float | None) -> None:
        self._queue = queue
        self._wakeup = wakeup
        self.capacity = capacity
        self.max_cost = _UNLIMITED if max_cost is None else max_cost
        self._waiters: deque[tuple[asyncio.Future[None], float]] = deque()
        self._reserved = 0
        self._reserved_cost = 0.0
        self._refusal: BaseException | None = None
        self._inspects = max_cost is not None
        self.open_below = 0
        """While fewer records than this wait, a record may enter without calling `admits`."""
        self._set_open()

    def inspect_all(self) -> None:
        """Require `admits` for every record from now on, because some must be refused for other reasons."""
        self._inspects = True
        self._set_open()

    def _set_open(self) -> None:
        self.open_below = 0 if self._inspects or self._waiters or self._reserved else self.capacity

    @property
    def waiting(self) -> int:
        """Submitters that wait for room, including those just admitted."""
        return len(self._waiters) + self._reserved

    def admits(self, cost: float) -> bool:
        """Whether a record of this cost may enter now without overtaking a waiting submitter."""
        queue = self._queue
        if self._waiters or queue.size + self._reserved >= self.capacity:
            return False
        return self.max_cost == _UNLIMITED or self._has_room(cost)

    def room(self, cost: float) -> int:
        """How many records of this cost may enter now without overtaking a waiting submitter."""
        if not self.admits(cost):
            return 0
        free = self.capacity - self._queue.size - self._reserved
        if cost and self.max_cost != _UNLIMITED:
            free = int(min(free, (self.max_cost - self._queue.cost - self._reserved_cost) // cost))
        return max(free, 1)

    async def enter(self, cost: float) -> None:
        """Wait until a record of this cost may enter; the caller must add it before its next await.

        Raises:
            Exception: a copy of what was passed to `refuse_all`.
        """
        if self.admits(cost):
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (admitted, cost)
        self._waiters.append(waiter)
        self._set_open()
        self._wakeup.wake()
        entered = False
        try:
            await admitted
            entered = True
        finally:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._release(cost)  # it enters, or was cancelled just after it was admitted
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            if not entered:
                self.admit_waiting()
                self._wakeup.wake()
        if self._refusal is not None:  # refused since it was admitted
            raise own_copy(self._refusal)

    def admit_waiting(self) -> None:
        """Admit waiting submitters in order, as far as there is room."""
        while self._waiters:
            admitted, cost = self._waiters[0]
            if admitted.done():  # cancelled
                self._waiters.popleft()
                continue
            if not self._has_room(cost):
                return
            self._waiters.popleft()
            self._reserved += 1
            self._reserved_cost += cost
            admitted.set_result(None)
        self._set_open()

    def refuse_all(self, cause: BaseException) -> None:
        """Fail every waiting and future submitter with its own copy of `cause`."""
        self._refusal = cause
        for admitted, _ in self._waiters:
            if not admitted.done():
                admitted.set_exception(own_copy(cause))
        self._waiters.clear()
        self._set_open()

    @property
    def is_full(self) -> bool:
        """Whether submitters wait, so that no record can enter before a batch leaves."""
        return bool(self._waiters) and not self._reserved

    def _has_room(self, cost: float) -> bool:
        taken = self._queue.size + self._reserved
        if taken >= self.capacity:
            return False
        return self._queue.cost + self._reserved_cost + cost <= self.max_cost or not taken

    def _release(self, cost: float) -> None:
        self._reserved -= 1
        self._reserved_cost -= cost
        self._set_open()
