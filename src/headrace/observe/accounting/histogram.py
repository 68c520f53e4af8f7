"""Histograms of positive numbers of any size, in bounded memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_PER_DOUBLING = 8
"""A percentile is off by at most 9 % (2 ** (1/8))."""
_SMALLEST = 1e-9

Bucket: TypeAlias = tuple[float, float, float, float]
"""Lower bound, upper bound, count and sum."""
Buckets: TypeAlias = Sequence[Bucket]
"""Ascending; those that hold anything."""


class Histogram:
    """Counts numbers in buckets whose bounds grow by the same factor; numbers below 1e-9 count as 0."""

    def __init__(self) -> None:
        self._counts: defaultdict[int | None, list[float]] = defaultdict(lambda: [0, 0.0])
        self._last = 0.0
        self._bucket: list[float] | None = None
        """The bucket of the last number, which often comes again: most batches are of the same size."""

    def add(self, value: float) -> None:
        bucket = self._bucket
        if bucket is None or value != self._last:
            bucket = self._counts[math.floor(math.log2(value) * _PER_DOUBLING) if value >= _SMALLEST else None]
            self._bucket, self._last = bucket, value
        bucket[0] += 1
        bucket[1] += value

    def __bool__(self) -> bool:
        return bool(self._counts)

    def buckets(self) -> list[Bucket]:
        found = [(0.0, 0.0, *self._sums(None))] if None in self._counts else []
        keys = sorted(key for key in self._counts if key is not None)
        return found + [(_bound(key), _bound(key + 1), *self._sums(key)) for key in keys]

    def _sums(self, key: int | None) -> tuple[float, float]:
        count, total = self._counts[key]
        return count, total


def _bound(key: int) -> float:
    return float(2 ** (key / _PER_DOUBLING))


def merge_histograms(histograms: Iterable[Buckets]) -> list[Bucket]:
    """The sum of several histograms."""
    sums: defaultdict[tuple[float, float], list[float]] = defaultdict(lambda: [0, 0.0])
    for buckets in histograms:
        for lower, upper, count, total in buckets:
            bucket = sums[lower, upper]
            bucket[0] += count
            bucket[1] += total
    return [(lower, upper, count, total) for (lower, upper), (count, total) in sorted(sums.items())]


def percentile(buckets: Buckets, share: float) -> float:
    """The number that `share` (0 to 1) of all numbers do not exceed, to 9 %; 0 if there are none."""
    left = share * sum(count for _, _, count, _ in buckets)
    for _, _, count, total in buckets:
        left -= count
        if left <= 0:
            return total / count
    return buckets[-1][3] / buckets[-1][2] if buckets else 0.0


def mean(buckets: Buckets) -> float:
    """The mean of all numbers; 0 if there are none."""
    count = sum(bucket[2] for bucket in buckets)
    return sum(bucket[3] for bucket in buckets) / count if count else 0.0
