"""How long batches take as a function of their cost, learned from past batches. Pure: callers pass the time."""

from __future__ import annotations

import math

_SPREAD = 0.01
"""Minimum relative deviation of costs for a slope: for equal costs, time is assumed to be proportional to cost."""
_LEAST_POINTS = 10
_LEAST_APART = 3.0
"""Minimum spread of costs for `fixed_s`, in units of the farthest batch's squared distance from the mean."""
_ERROR = 0.15
"""Maximum standard error of `fixed_s`, as a share of the mean duration."""


class CostLine:
    """`seconds = slope × cost + fixed`, fitted to batches by least squares.

    Args:
        decay: weight of a batch relative to the next; 1 weighs all alike.
    """

    def __init__(self, decay: float = 1.0) -> None:
        self._decay = decay
        self._weight = self._cost = self._seconds = 0.0
        self._cost2 = self._both = self._seconds2 = 0.0
        self._least, self._most = math.inf, 0.0

    def add(self, cost: float, seconds: float) -> None:
        decay = self._decay
        self._weight = self._weight * decay + 1
        self._cost = self._cost * decay + cost
        self._seconds = self._seconds * decay + seconds
        self._cost2 = self._cost2 * decay + cost * cost
        self._both = self._both * decay + cost * seconds
        self._seconds2 = self._seconds2 * decay + seconds * seconds
        self._least, self._most = min(self._least, cost), max(self._most, cost)

    @property
    def known(self) -> bool:
        return self._cost > 0

    @property
    def line(self) -> tuple[float, float]:
        """(slope, fixed): seconds per unit of cost, and per batch; neither is negative."""
        if not self._weight:
            return 0.0, 0.0
        mean_cost, mean = self._cost / self._weight, self._seconds / self._weight
        if not mean_cost:
            return 0.0, mean
        variance = self._cost2 / self._weight - mean_cost**2
        if variance <= (_SPREAD * mean_cost) ** 2:
            return mean / mean_cost, 0.0
        slope = (self._both / self._weight - mean_cost * mean) / variance
        slope = min(max(slope, 0.0), mean / mean_cost)
        return slope, max(mean - slope * mean_cost, 0.0)  # rounding can make it negative

    def seconds(self, cost: float) -> float:
        """Estimated seconds of a batch of this cost."""
        slope, fixed = self.line
        return slope * cost + fixed

    def cost_within(self, seconds: float) -> float:
        """Maximum cost of a batch within `seconds`; 0 if none is possible."""
        slope, fixed = self.line
        if seconds <= fixed:
            return 0.0
        return (seconds - fixed) / slope if slope else float("inf")

    def fixed_s(self) -> float | None:
        """What a batch takes beside its cost; None if the batches are too few, too alike or too irregular to tell."""
        count = self._weight
        if count < _LEAST_POINTS or not self._cost:
            return None
        mean, duration = self._cost / count, self._seconds / count
        spread = self._cost2 - self._cost * mean
        if spread < _LEAST_APART * max(self._most - mean, mean - self._least, 1e-6 * mean) ** 2:
            return None  # one batch unlike the others decides where the line goes
        slope = (self._both - mean * self._seconds) / spread
        fixed = duration - slope * mean
        noise = max(self._seconds2 - duration * self._seconds - slope * slope * spread, 0.0) / (count - 2)
        error = math.sqrt(noise * (1 / count + mean * mean / spread))  # standard error of the intercept
        return max(fixed, 0.0) if error < _ERROR * duration else None
