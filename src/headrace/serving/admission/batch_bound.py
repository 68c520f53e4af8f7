"""How much a batch may cost while small requests come beside large ones. Pure: callers pass the time."""

from __future__ import annotations

from collections import deque
from itertools import product
from statistics import median

_SHORT_S = 0.025
"""Seconds of a batch while small requests come beside large ones: short beside the 100 ms that people notice."""
_WORTH = 0.6
"""Share of the throughput of full batches that bounded ones keep, even if they take longer."""
_SMALL = 1 / 8
"""Share of a full batch up to which a request is small."""
_LONG = 1 / 2
"""Share of the bound from which a batch is long."""
_OFTEN_S = 1.0
"""Two small requests within this time come often."""
_BESIDE_S = 60.0
"""How long after a small request others are expected."""
_RECENT = 5
"""Batches that count of each size, long and short: an odd number, for medians."""
_EVERY, _PART = 8, 1 / 4
"""While batches are bounded, every eighth is a quarter of the others: both sizes are measured under the same load."""


class BatchBound:
    """Bounds the duration of batches while small requests come beside large ones: a small one waits for the batch that
    runs, then for its own.

    A batch takes a base plus its cost times a slope. Recent long and short batches tell both, by medians (Theil and
    Sen), for other work on the machine delays some of them.

    Args:
        full: the most a batch may cost otherwise.
    """

    def __init__(self, full: float) -> None:
        self._full = self._bound = full
        self._long: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        """Cost and seconds of recent batches."""
        self._short: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._ran = 0
        self._small = 1.0
        """The cost of the latest small request: a quarter of a batch holds it."""
        self._large = 0.0
        """The cost of the requests in progress that are not small."""
        self._until = 0.0
        self._last: deque[float] = deque(maxlen=2)
        """When the last small requests began."""

    def began(self, cost: float, now: float) -> None:
        """A request of this cost was accepted."""
        if cost > _SMALL * self._full:
            self._large += cost
        else:
            self._until = now + _BESIDE_S
            self._last.append(now)
            self._small = max(cost, 1.0)

    def ended(self, cost: float) -> None:
        """It was answered."""
        if cost > _SMALL * self._full:
            self._large -= cost

    def is_before(self, cost: float) -> bool:
        """Whether a request of this cost is small, and comes beside less than a batch's worth of others."""
        return self._large < self._full and cost <= _SMALL * self._full

    def is_beside(self, cost: float) -> bool:
        """Whether a request of this cost is small, and comes beside a batch's worth of others that are not."""
        return self._large >= self._full and cost <= _SMALL * self._full

    def is_often(self, now: float) -> bool:
        """Whether small requests come often, beside a batch's worth of others."""
        return self._large >= self._full and len(self._last) > 1 and now - self._last[0] < _OFTEN_S

    def ran(self, cost: float, duration_s: float) -> None:
        """Learn from a batch."""
        self._ran += 1
        if cost > 0:
            (self._long if cost >= _LONG * self._bound else self._short).append((cost, duration_s))

    def most(self, now: float) -> float:
        """The most a batch may cost now."""
        full = self._full
        if self._large < full or now >= self._until or not self._long:
            self._bound = full
            return full
        highest = median(seconds / cost for cost, seconds in self._long)
        pairs = product(self._long, self._short)
        slopes = [(more_s - less_s) / (more - less) for (more, more_s), (less, less_s) in pairs if more > less]
        slope = min(max(median(slopes), 0.0), highest) if slopes else highest  # a base below zero is noise
        base = max(median(seconds - slope * cost for cost, seconds in self._long), 0.0)
        worth = _WORTH * full / (slope * full + base) if slope or base else 0.0
        least = worth * base / (1 - worth * slope)  # cost / (slope * cost + base) = worth
        within = (_SHORT_S - base) / slope if slope else full
        self._bound = min(max(within, least, self._small / _PART), full)
        is_measure = self._bound < full and not self._ran % _EVERY
        return _PART * self._bound if is_measure else self._bound
