"""Records that failed for a transient reason wait here for their next attempt."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from headrace.engines.requests.formed import Try
from headrace.records import Record
from headrace.retry import RetryPolicy, is_transient


class Retry(NamedTuple):
    record: Record
    attempt: int
    """Number of the next attempt; the first attempt of a record is 1."""
    tries: tuple[Try, ...] = ()
    """The answers so far that do not have their form."""


class RetryQueue:
    """Records that wait for their next attempt. Pure: reads no clock.

    Args:
        policy: how often a record is tried, and how long it waits between attempts.
        chance: a random number between 0 and 1; `random.random` by default.
    """

    def __init__(self, policy: RetryPolicy, chance: Callable[[], float] | None = None) -> None:
        self._policy = policy
        self._chance = chance
        self._waiting: list[tuple[float, int, Retry]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def wants(self, error: object, attempt: int) -> bool:
        """Whether to retry a record that failed with `error` at this attempt."""
        return self._policy.allows(attempt) and is_transient(error)

    def again(self, retry: Retry, now: float) -> None:
        """Add a record that is asked again at once."""
        heapq.heappush(self._waiting, (now, retry.record.position, retry))

    def add(self, record: Record, attempt: int, now: float, tries: tuple[Try, ...] = ()) -> None:
        due = now + self._policy.wait_s(attempt, chance=self._chance)
        heapq.heappush(self._waiting, (due, record.position, Retry(record, attempt + 1, tries)))

    def due_in(self, now: float) -> float | None:
        """Seconds until the first retry is due; None if no record waits."""
        return max(self._waiting[0][0] - now, 0.0) if self._waiting else None

    def take(self, now: float, most: int) -> list[Retry]:
        """At most `most` records whose retry is due."""
        due: list[Retry] = []
        while self._waiting and self._waiting[0][0] <= now and len(due) < most:
            due.append(heapq.heappop(self._waiting)[2])
        return sorted(due, key=lambda again: again.record.position)
