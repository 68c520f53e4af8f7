"""The bounded waiting room, in records and in cost: whoever comes when it is full waits, or is refused."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.batching.dispatch.wakeup import Wakeup
from headrace.batching.pending import own_copy
from headrace.batching.policy.waiting_queue import WaitingQueue

_UNLIMITED = float("inf")


class Admission:
    """Lets records into a `WaitingQueue` as far as it has room; those that wait enter in the order they came.

    A record that alone costs more than the whole room enters once the room is empty. The dispatcher is woken when
    somebody begins to wait for room, or gives up a place without using it.
    """

    def __init__(self, lineup: WaitingQueue, wakeup: Wakeup, capacity: int, max_cost: float | None) -> None:
        self._lineup = lineup
        self._wakeup = wakeup
        self.capacity = capacity
        self.max_cost = _UNLIMITED if max_cost is None else max_cost
        self._waiters: deque[tuple[asyncio.Future[None], float]] = deque()
        self._reserved = 0
        self._reserved_cost = 0.0
        self._refusal: BaseException | None = None
        self._inspects = max_cost is not None
        self.open_below = 0
        """While fewer records than this wait, a record may enter without asking `admits`."""
        self._set_open()

    def inspect_all(self) -> None:
        """From now on every record asks: some must be refused for reasons that are not the room's."""
        self._inspects = True
        self._set_open()

    def _set_open(self) -> None:
        self.open_below = 0 if self._inspects or self._waiters or self._reserved else self.capacity

    @property
    def waiting(self) -> int:
        """Submitters that wait for room, those just let in included."""
        return len(self._waiters) + self._reserved

    def admits(self, cost: float) -> bool:
        """Whether a record of this cost may enter now, without overtaking anyone."""
        lineup = self._lineup
        if self._waiters or lineup.size + self._reserved >= self.capacity:
            return False
        return self.max_cost == _UNLIMITED or self._has_room(cost)

    def room(self, cost: float) -> int:
        """How many records of this cost may enter now, without overtaking anyone."""
        if not self.admits(cost):
            return 0
        free = self.capacity - self._lineup.size - self._reserved
        if cost and self.max_cost != _UNLIMITED:
            free = int(min(free, (self.max_cost - self._lineup.cost - self._reserved_cost) // cost))
        return max(free, 1)

    async def enter(self, cost: float) -> None:
        """Wait until a record of this cost may enter; the caller adds it before it awaits anything.

        Raises:
            Exception: what `refuse_all` was given.
        """
        if self.admits(cost):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, cost)
        self._waiters.append(place)
        self._set_open()
        self._wakeup.wake()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(cost)  # cancelled just after it was let in
            elif place in self._waiters:
                self._waiters.remove(place)
            self.let_in()
            self._wakeup.wake()
            raise
        self._give_back(cost)
        if self._refusal is not None:  # since it was let in
            raise own_copy(self._refusal)

    def let_in(self) -> None:
        """Room has been made: let in whoever fits, in order."""
        while self._waiters:
            turn, cost = self._waiters[0]
            if turn.done():  # cancelled
                self._waiters.popleft()
                continue
            if not self._has_room(cost):
                return
            self._waiters.popleft()
            self._reserved += 1
            self._reserved_cost += cost
            turn.set_result(None)
        self._set_open()

    def refuse_all(self, cause: BaseException) -> None:
        """Fail everyone who still waits for room, now and from now on, each with an exception of its own."""
        self._refusal = cause
        for turn, _ in self._waiters:
            if not turn.done():
                turn.set_exception(own_copy(cause))
        self._waiters.clear()
        self._set_open()

    @property
    def is_full(self) -> bool:
        """Whether somebody waits for room, so that nothing more can come in before a batch leaves."""
        return bool(self._waiters) and not self._reserved

    def _has_room(self, cost: float) -> bool:
        taken = self._lineup.size + self._reserved
        if taken >= self.capacity:
            return False
        return self._lineup.cost + self._reserved_cost + cost <= self.max_cost or not taken

    def _give_back(self, cost: float) -> None:
        self._reserved -= 1
        self._reserved_cost -= cost
        self._set_open()
