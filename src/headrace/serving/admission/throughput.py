"""The throughput of an engine, measured by its batches or its answers. Pure: callers pass the time."""

from __future__ import annotations

import math

_PRIOR_S = 1.0
"""Weight of a throughput that was measured otherwise, in seconds of batches."""
_MEMORY_S = 10.0
"""Time constant of the throughput of batches."""
_SAMPLE_S = 0.25
"""Minimum seconds of one rate measurement."""
_SMOOTHING = 0.3
"""Weight of a new measurement."""


class BatchRate:
    """The throughput of an engine from its batches, in cost per second, gaps between them included.

    Only full batches measure it. Others give a lower bound of one that is known, because a batch of one short record
    says nothing of full ones, even if others came while it ran.
    """

    def __init__(self) -> None:
        self._cost = self._seconds = 0.0
        self._last: float | None = None
        """When the last batch ended, if records waited then."""

    @property
    def per_s(self) -> float:
        """0 while unknown."""
        return self._cost / self._seconds if self._seconds else 0.0

    def expect(self, per_s: float) -> None:
        """Begin with a throughput that was measured otherwise."""
        self._cost, self._seconds = per_s * _PRIOR_S, _PRIOR_S

    def batch(self, cost: float, duration_s: float, at: float, *, full: bool, waiting: bool) -> None:
        """A batch ended at this time.

        Args:
            full: whether enough records waited for a full one when it was formed.
            waiting: whether records wait for the next one.
        """
        took = duration_s if self._last is None else max(at - self._last, 0.0)
        self._last = at if waiting else None
        if took <= 0:
            return
        if full:
            kept = math.exp(-took / _MEMORY_S)
            self._cost, self._seconds = self._cost * kept + cost, self._seconds * kept + took
        elif 0 < self.per_s * took < cost:
            self.expect(cost / took)


class Rate:
    """The smoothed throughput of a fully loaded engine, in cost per second. Callers pass the time.

    A sample covers as many records as the engine takes at once, because these often finish together. Cancelled records
    may or may not have been processed, so a sample gives a range for the rate; a rate within the range is unchanged.

    Args:
        width: records that the engine processes at once.
        width_cost: their total cost, if reached first.
    """

    def __init__(self, width: int = 1, width_cost: float = float("inf")) -> None:
        self.per_s = 0.0
        """0 while unknown."""
        self._width = width
        self._width_cost = width_cost
        self._since: float | None = None
        self._records = 0
        self._done = self._given_up = 0.0
        self._full = True

    def busy(self, now: float) -> None:
        """Start measuring: there is work."""
        if self._since is None:
            self._since = now

    def ended(self, records: int, cost: float, now: float, *, done: bool, full: bool) -> None:
        """Add finished (`done`) or cancelled records; `full` if the engine was fully loaded meanwhile."""
        self._records += records
        if done:
            self._done += cost
        else:
            self._given_up += cost
        self._full = self._full and full
        elapsed = now - self._since if self._since is not None else 0.0
        complete = self._records >= self._width or self._done + self._given_up >= self._width_cost
        if complete and elapsed >= _SAMPLE_S:
            self._learn(self._done / elapsed, (self._done + self._given_up) / elapsed)
            self._begin(now)

    def idle(self) -> None:
        """Stop measuring: there is no work."""
        self._begin(None)

    def _learn(self, least: float, most: float) -> None:
        if not self._full:
            if self.per_s:  # not fully loaded: only a lower bound
                self.per_s = max(self.per_s, least)
        elif not self.per_s:
            self.per_s = most if least else 0.0
        else:
            nearest = min(max(self.per_s, least), most)
            self.per_s += (nearest - self.per_s) * _SMOOTHING

    def _begin(self, now: float | None) -> None:
        self._since, self._records, self._done, self._given_up, self._full = now, 0, 0.0, 0.0, True
