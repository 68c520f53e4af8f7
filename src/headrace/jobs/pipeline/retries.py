"""Records that failed for a passing reason: they wait, longer each time, and are tried again."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import ProcessTimeoutError, TransientError
from headrace.records import Record

TRANSIENT = (TransientError, ConnectionError, TimeoutError)
"""What may pass by itself, by type; an error's text says nothing."""
LONGEST_WAIT_S = 60.0


def may_pass(error: object) -> bool:
    """Whether a record that failed so may succeed later. One that was too late would only hold up the engine again."""
    return isinstance(error, TRANSIENT) and not isinstance(error, ProcessTimeoutError)


class Retry(NamedTuple):
    """A record to be tried once more."""

    record: Record
    attempt: int
    """1 for the first try of all."""


class RetryQueue:
    """Where records wait for their next try. Pure: told the time, reads no clock.

    The n-th wait is drawn from 0 to `wait_s` × 2ⁿ⁻¹ seconds ("full jitter": M. Brooker, Exponential Backoff And Jitter,
    2015), at most 60: those that failed together do not come back together.
    """

    def __init__(
        self, max_attempts: int, wait_s: float, dice: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._max_attempts = max_attempts
        self._wait_s = wait_s
        self._dice = dice
        self._waiting: list[tuple[float, int, Retry]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def wants(self, error: object, attempt: int) -> bool:
        """Whether what failed so at this attempt is to be tried again."""
        return attempt < self._max_attempts and may_pass(error)

    def add(self, record: Record, attempt: int, now: float) -> None:
        """Let a record wait that has failed at this attempt."""
        wait = self._dice(0.0, min(self._wait_s * 2.0 ** (attempt - 1), LONGEST_WAIT_S))
        heapq.heappush(self._waiting, (now + wait, record.position, Retry(record, attempt + 1)))

    def due_in(self, now: float) -> float | None:
        """Seconds until the first has waited long enough; None where none waits."""
        return max(self._waiting[0][0] - now, 0.0) if self._waiting else None

    def take(self, now: float, most: int) -> list[Retry]:
        """Those that have waited long enough."""
        due: list[Retry] = []
        while self._waiting and self._waiting[0][0] <= now and len(due) < most:
            due.append(heapq.heappop(self._waiting)[2])
        return sorted(due, key=lambda again: again.record.position)
