"""How long a batch takes, learned from those that were run. Pure: told everything, reads no clock."""

from __future__ import annotations

_FORGET = 0.98
"""Weight of a batch against the one after it: the last 50 or so count."""
_LEAST, _MOST = 0.1, 2.0
"""Bounds of a margin: bulk work is never quite given up, and nothing is planned that an hour could not take back."""
_SPREAD = 0.01
"""Costs that vary by less than this share of their mean say nothing of the slope."""


class TimeModel:
    """`duration = a * cost + b`, fitted by least squares to the recent batches."""

    def __init__(self) -> None:
        self._weight = self._cost = self._duration = self._cost2 = self._both = 0.0

    def observe(self, cost: float, duration_s: float) -> None:
        """Learn of one more batch."""
        self._weight = self._weight * _FORGET + 1
        self._cost = self._cost * _FORGET + cost
        self._duration = self._duration * _FORGET + duration_s
        self._cost2 = self._cost2 * _FORGET + cost * cost
        self._both = self._both * _FORGET + cost * duration_s

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return self._cost > 0

    @property
    def line(self) -> tuple[float, float]:
        """(a, b): seconds per unit of cost, and per batch; neither is negative."""
        if not self.known:
            return 0.0, 0.0
        mean_cost, mean = self._cost / self._weight, self._duration / self._weight
        variance = self._cost2 / self._weight - mean_cost**2
        if variance <= (_SPREAD * mean_cost) ** 2:
            return mean / mean_cost, 0.0  # all alike: the pessimist's line for larger batches
        slope = (self._both / self._weight - mean_cost * mean) / variance
        slope = min(max(slope, 0.0), mean / mean_cost)
        return slope, max(mean - slope * mean_cost, 0.0)  # which rounding alone can push below

    def seconds(self, cost: float) -> float:
        """How long a batch of this cost takes."""
        slope, base = self.line
        return slope * cost + base

    def cost_within(self, seconds: float) -> float:
        """The largest cost of a batch that takes no longer; 0 if none is so quick."""
        slope, base = self.line
        if seconds <= base:
            return 0.0
        return (seconds - base) / slope if slope else float("inf")


class Margin:
    """How much of a target to plan with, so that no more than `late` of all requests miss it.

    A plan knows nothing of what delays a request besides batches: this follows what is seen. Each miss makes it a step
    smaller and each hit as much larger as holds the balance at that share: the tracking of a quantile by stochastic
    approximation (Robbins and Monro, 1951).
    """

    def __init__(self, late: float = 0.005, step: float = 0.04) -> None:
        self.value = 1.0
        """Factor of the target."""
        self._late = late
        self._step = step

    def observe(self, *, missed: bool) -> None:
        """One more request has been answered."""
        change = self._late - 1 if missed else self._late
        self.value = min(max(self.value + self._step * change, _LEAST), _MOST)


class Recent:
    """The largest value of late: of the last one or two periods. Told the time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._before = self._now = 0.0
        self._since = 0.0

    def add(self, value: float, at: float) -> None:
        """One more value."""
        self._turn(at)
        self._now = max(self._now, value)

    def largest(self, at: float) -> float:
        """The largest of late; 0 for none."""
        self._turn(at)
        return max(self._now, self._before)

    def _turn(self, at: float) -> None:
        if at - self._since >= self._period_s:
            self._before = self._now if at - self._since < 2 * self._period_s else 0.0
            self._now, self._since = 0.0, at
