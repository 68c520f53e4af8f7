"""Figures from the ends of batches: busy time, the cost of successful records, and what a batch takes beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.events import BatchDone

_KEPT = 64
_LEAST_POINTS = 10
_LEAST_APART = 3.0
"""Batches as far from the mean as the farthest one."""
_ERROR = 0.15
"""Of the duration of a batch, that its fixed part may be off by."""


class BusyTime:
    """The total length of a union of intervals, which arrive in order of their ends."""

    def __init__(self) -> None:
        self._settled = 0.0
        self._open: list[tuple[float, float]] = []

    def add(self, end: float, duration_s: float) -> None:
        """Count the interval of `duration_s` seconds that ended at `end`."""
        start = end - duration_s
        while self._open and self._open[-1][1] >= start:
            earlier_start, earlier_end = self._open.pop()
            start, end = min(start, earlier_start), max(end, earlier_end)
        self._open.append((start, end))
        if len(self._open) > _KEPT:  # no batch is long enough to span this many gaps
            settled_start, settled_end = self._open.pop(0)
            self._settled += settled_end - settled_start

    @property
    def seconds(self) -> float:
        """The time covered so far."""
        return self._settled + sum(end - start for start, end in self._open)


def successful_cost(batch: BatchDone) -> float:
    """The batch's cost without the share of failed records, assuming equal costs."""
    return batch.cost * (batch.size - batch.failed) / batch.size


@dataclass(slots=True)
class CostLine:
    """A straight line through (cost, duration) of batches, by least squares."""

    count: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    least: float = math.inf
    most: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a batch."""
        self.count += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y
        self.yy += y * y
        if x < self.least:
            self.least = x
        if x > self.most:
            self.most = x

    def intercept(self) -> float | None:
        """Where it begins; None if the points are too few, too close together or too far from a line to tell."""
        if self.count < _LEAST_POINTS or not self.x:
            return None
        mean, duration = self.x / self.count, self.y / self.count
        spread = self.xx - self.x * mean
        if spread < _LEAST_APART * max(self.most - mean, mean - self.least, 1e-6 * mean) ** 2:
            return None  # one batch unlike the others decides where the line goes
        slope = (self.xy - mean * self.y) / spread
        intercept = duration - slope * mean
        noise = max(self.yy - duration * self.y - slope * slope * spread, 0.0) / (self.count - 2)
        error = math.sqrt(noise * (1 / self.count + mean * mean / spread))  # standard error of the intercept
        return max(intercept, 0.0) if error < _ERROR * duration else None
