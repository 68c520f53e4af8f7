"""Records that failed for a transient reason: they wait, longer each time, and are tried again."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from headrace.records import Record
from headrace.retry import RetryPolicy, is_transient


class Retry(NamedTuple):
    """A record to be tried once more."""

    record: Record
    attempt: int
    """1 for the first try of all."""


class RetryQueue:
    """Where records wait for their next try. Pure: told the time, reads no clock.

    Args:
        policy: how often a record is tried, and how long it waits in between.
        chance: a random number between 0 and 1; `random.random` by default.
    """

    def __init__(self, policy: RetryPolicy, chance: Callable[[], float] | None = None) -> None:
        self._policy = policy
        self._chance = chance
        self._waiting: list[tuple[float, int, Retry]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def wants(self, error: object, attempt: int) -> bool:
        """Whether what failed so at this attempt is to be tried again."""
        return self._policy.allows(attempt) and is_transient(error)

    def add(self, record: Record, attempt: int, now: float) -> None:
        """Let a record wait that has failed at this attempt."""
        due = now + self._policy.wait_s(attempt, chance=self._chance)
        heapq.heappush(self._waiting, (due, record.position, Retry(record, attempt + 1)))

    def due_in(self, now: float) -> float | None:
        """Seconds until the first has waited long enough; None where none waits."""
        return max(self._waiting[0][0] - now, 0.0) if self._waiting else None

    def take(self, now: float, most: int) -> list[Retry]:
        """Those that have waited long enough."""
        due: list[Retry] = []
        while self._waiting and self._waiting[0][0] <= now and len(due) < most:
            due.append(heapq.heappop(self._waiting)[2])
        return sorted(due, key=lambda again: again.record.position)
