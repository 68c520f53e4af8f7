"""Predicts how far records grow, from finished records. Pure: no clock, no asyncio."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

_SAMPLE = 256
"""How many of the latest finished records to keep."""

_ENOUGH = 16
"""Minimum finished records for a prediction; below it, every record is expected to reach its maximum."""


class Growth:
    """Predicts a record's final cost from finished records.

    It keeps the growth of each as a share: 0 for a record that did not grow, 1 for one that reached its maximum, so
    that requests with different limits are comparable. Short records finish first, which makes early estimates too
    low; callers must be able to evict records.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._beyond: list[float] | None = None

    def finished(self, start: float, most: float, final: float) -> None:
        """A record with initial cost `start` and maximum `most` finished at `final`."""
        if most <= start:
            return
        share = min(max((final - start) / (most - start), 0.0), 1.0)
        self._latest.append(share)
        insort(self._sorted, share)
        if len(self._latest) > _SAMPLE:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._beyond = None

    def expected(self, start: float, most: float, held: float) -> float:
        """The expected final cost of a record that has reached `held`: between `held` and `most`.

        The mean over the kept records that grew further than this one; `most` if there are none.
        """
        if most <= start or held >= most or len(self._sorted) < _ENOUGH:
            return max(most, held)
        first = bisect_right(self._sorted, (held - start) / (most - start)) if held > start else 0
        longer = len(self._sorted) - first
        if not longer:
            return most
        if self._beyond is None:
            self._beyond = [0.0]
            for share in reversed(self._sorted):
                self._beyond.append(self._beyond[-1] + share)
        return max(held, start + (most - start) * self._beyond[longer] / longer)
