"""How far records grow before they finish, learned from those that have. Pure: no clock, no asyncio."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

_SAMPLE = 256
"""Finished records that are remembered, the latest."""

_ENOUGH = 16
"""Finished records before they are believed; until then every record is taken to grow as far as it may."""


class Growth:
    """Expects of a record what records like it have done.

    What is learned is a share: 0 for a record that finished at the size it began with, 1 for one that grew as far as
    it might. So requests of different limits teach one another. The first to finish are the short ones, which makes the
    estimate hopeful at first; whoever uses it must be able to take a promise back.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._beyond: list[float] | None = None

    def finished(self, start: float, most: float, final: float) -> None:
        """A record that began at `start` and might grow to `most` ended at `final`."""
        if most <= start:
            return
        share = min(max((final - start) / (most - start), 0.0), 1.0)
        self._latest.append(share)
        insort(self._sorted, share)
        if len(self._latest) > _SAMPLE:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._beyond = None

    def expected(self, start: float, most: float, held: float) -> float:
        """What a record will hold at its end, which holds `held` already: between `held` and `most`.

        The mean over the remembered records that grew further than this one has; `most` where there is none.
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
