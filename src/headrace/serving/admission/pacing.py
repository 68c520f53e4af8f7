"""A factor of a latency target and a recent maximum, learned from past requests. Pure: callers pass the time."""

from __future__ import annotations

_LEAST, _MOST = 0.1, 2.0
"""Bounds of a margin: bulk work never stops, and a wrong margin is corrected within an hour."""


class Margin:
    """The factor of a latency target to plan with, so that at most the share `late` of requests miss the target.

    It accounts for delays other than batches. A miss lowers the factor and a hit raises it, in steps that balance at
    that share: quantile tracking by stochastic approximation (Robbins and Monro, 1951).
    """

    def __init__(self, late: float = 0.005, step: float = 0.04) -> None:
        self.value = 1.0
        """Factor of the target."""
        self._late = late
        self._step = step

    def observe(self, *, missed: bool) -> None:
        """Add an answered request."""
        change = self._late - 1 if missed else self._late
        self.value = min(max(self.value + self._step * change, _LEAST), _MOST)


class Recent:
    """The maximum of the last one to two periods. Callers pass the time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._before = self._now = 0.0
        self._since = 0.0

    def add(self, value: float, at: float) -> None:
        """Add a value."""
        self._rotate(at)
        self._now = max(self._now, value)

    def largest(self, at: float) -> float:
        """The recent maximum; 0 if there is none."""
        self._rotate(at)
        return max(self._now, self._before)

    def _rotate(self, at: float) -> None:
        if at - self._since >= self._period_s:
            self._before = self._now if at - self._since < 2 * self._period_s else 0.0
            self._now, self._since = 0.0, at
