"""Large requests are prepared slice by slice, in turns, and only some batches ahead of the model.

Preparing all of them as they come would take the cores from the small requests beside them, and gain nothing: the model
cannot compute what it has sooner. Callers share the turns as they share batches, by cost: so one waits for at most as
much of each other caller as it has itself, and one slice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from headrace.batching.pending import PendingResult
from headrace.batching.policy.cost import BatchLimits
from headrace.batching.policy.waiting_queue import WaitingQueue


class PreparationTurns:
    """Hands out turns to prepare a slice.

    Args:
        ahead: the cost that waits for the model.
        most: turns begin while less than this waits.
        at_once: maximum turns at the same time.
        slice_cost: the cost of a large slice.
    """

    def __init__(self, ahead: Callable[[], float], most: float, at_once: int, slice_cost: float) -> None:
        self._ahead = ahead
        self._most = most
        self._at_once = at_once
        self._waiting = WaitingQueue(BatchLimits(slice_cost, max_batch_size=1))
        self._running = 0

    def ask(self, cost: float, caller: Hashable) -> asyncio.Future[None]:
        """A turn for a slice of this cost. It is done when the slice may be prepared; pass it to `end` in any case."""
        loop = asyncio.get_running_loop()
        turn = PendingResult(loop=loop)
        turn.cost, turn.arrival, turn.holder = cost, loop.time(), self._waiting
        self._waiting.add(turn, caller=caller)
        self.proceed()
        return turn

    def end(self, turn: asyncio.Future[None]) -> None:
        """The slice is queued, or nobody waits for it any more."""
        if not turn.cancel() and not turn.cancelled():
            self._running -= 1
        self.proceed()

    def proceed(self) -> None:
        """Begin the turns that there is room for. Call this whenever less waits for the model."""
        while self._waiting.size and self._running < self._at_once and self._ahead() < self._most:
            (turn,) = self._waiting.take("idle").entries
            self._running += 1
            turn.set_result(None)
