"""Histograms of positive numbers of any size, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_PER_DOUBLING = 8
"""A percentile is at most 9 % (2 ** (1/8)) too high."""
_SMALLEST = 1e-9

Buckets: TypeAlias = Sequence[Sequence[float]]
"""Ascending (lower bound, upper bound, count) of buckets that hold anything."""


class Histogram:
    """Counts numbers in buckets whose bounds grow by the same factor; numbers below 1e-9 count as 0."""

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()

    def add(self, value: float) -> None:
        """Count one number."""
        self._counts[math.floor(math.log2(value) * _PER_DOUBLING) if value >= _SMALLEST else None] += 1

    def buckets(self) -> list[list[float]]:
        """The buckets that hold anything."""
        found = [[0.0, 0.0, float(self._counts[None])]] if self._counts[None] else []
        keys = sorted(key for key in self._counts if key is not None)
        return found + [
            [2 ** (k / _PER_DOUBLING), 2 ** ((k + 1) / _PER_DOUBLING), float(self._counts[k])] for k in keys
        ]


def merged(histograms: Iterable[Buckets]) -> list[list[float]]:
    """The sum of several histograms."""
    counts: Counter[tuple[float, float]] = Counter()
    for buckets in histograms:
        for lower, upper, count in buckets:
            counts[lower, upper] += count  # type: ignore[assignment]  # counts are whole, and floats in JSON
    return [[lower, upper, count] for (lower, upper), count in sorted(counts.items())]


def percentile(buckets: Buckets, share: float) -> float:
    """The number that `share` (0 to 1) of all numbers do not exceed, at most 9 % too high; 0 if there are none."""
    left = share * sum(count for _, _, count in buckets)
    for _, upper, count in buckets:
        left -= count
        if left <= 0:
            return upper
    return buckets[-1][1] if buckets else 0.0
