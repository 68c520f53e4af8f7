"""How much a batch may cost while small requests come beside large ones. Pure: callers pass the time."""

from __future__ import annotations

_SHORT_S = 0.025
"""Seconds of a batch while small requests come beside large ones: short beside the 100 ms that people notice."""
_WORTH = 0.7
"""Share of the throughput of full batches that bounded ones keep, even if they take longer."""
_SMALL, _BIG = 1 / 8, 1 / 2
"""Shares of a full batch: a request or a batch is small up to the first, and a batch is big from the second."""
_BESIDE_S = 60.0
"""How long after a small request others are expected."""
_RECENT = 0.1
"""Weight of the latest batch: about the last ten count."""


class BatchBound:
    """Bounds the duration of batches while small requests come beside large ones: a small one waits for the batch that
    runs, then for its own.

    A batch takes a base plus its cost times a slope. The fastest small batch and recent big ones tell both. A line
    through bounded ones would follow their noise, since they are alike; slow small ones ran beside other work.

    Args:
        full: the most a batch may cost otherwise.
    """

    def __init__(self, full: float) -> None:
        self._full = full
        self._small = self._big = (0.0, 0.0)
        """Cost and seconds of the fastest small batch, and of recent big ones on average; zeros while unknown."""
        self._large = 0
        self._until = 0.0

    def began(self, cost: float, now: float) -> None:
        """A request of this cost was accepted."""
        if cost >= self._full:
            self._large += 1
        elif cost <= _SMALL * self._full:
            self._until = now + _BESIDE_S

    def ended(self, cost: float) -> None:
        """It was answered."""
        if cost >= self._full:
            self._large -= 1

    def ran(self, cost: float, duration_s: float) -> None:
        if cost >= _BIG * self._full:
            mean_cost, mean_s = self._big
            weight = _RECENT if mean_s else 1.0
            self._big = (mean_cost + (cost - mean_cost) * weight, mean_s + (duration_s - mean_s) * weight)
        elif cost <= _SMALL * self._full and not 0 < self._small[1] <= duration_s:
            self._small = (cost, duration_s)

    def most(self, now: float) -> float:
        """The most a batch may cost now."""
        full, (small, small_s), (big, big_s) = self._full, self._small, self._big
        if not self._large or now >= self._until or not big_s:
            return full
        slope = min(max((big_s - small_s) / (big - small), 0.0), big_s / big)  # a base below zero is noise
        base = big_s - slope * big
        worth = _WORTH * full / (slope * full + base)
        least = worth * base / (1 - worth * slope)  # cost / (slope * cost + base) = worth
        within = (_SHORT_S - base) / slope if slope else full
        return min(max(within, least, 1.0), full)
