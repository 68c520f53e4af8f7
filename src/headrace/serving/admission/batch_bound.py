"""How much a batch may cost while small requests come beside large ones. Pure: callers pass the time."""

from __future__ import annotations

from headrace.batching.policy.cost_line import CostLine

_SHORT_S = 0.025
"""Seconds of a batch while small requests come beside large ones: short beside the 100 ms that people notice."""
_WORTH = 0.9
"""Share of the throughput of full batches that bounded ones keep, even if they take longer."""
_SMALL = 1 / 8
"""Share of a full batch up to which a request is small."""
_BESIDE_S = 5.0
"""How long after a small request others are expected."""
_RECENT = 0.98
"""Weight of a batch relative to the next: about the last 50 count."""


class BatchBound:
    """Bounds the duration of batches while small requests come beside large ones: a small one waits for the batch that
    runs, then for its own.

    Args:
        full: the most a batch may cost otherwise.
    """

    def __init__(self, full: float) -> None:
        self._full = full
        self._times = CostLine(_RECENT)
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
        """Learn from a batch."""
        self._times.add(cost, duration_s)

    def most(self, now: float) -> float:
        """The most a batch may cost now."""
        full = self._full
        if not self._large or now >= self._until or not (full_s := self._times.seconds(full)):
            return full
        slope, base = self._times.line
        worth = _WORTH * full / full_s
        least = worth * base / (1 - worth * slope)  # cost / (slope * cost + base) = worth
        return min(max(self._times.cost_within(_SHORT_S), least, 1.0), full)
