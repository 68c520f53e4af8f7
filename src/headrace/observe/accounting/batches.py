"""The busy time of an engine, from the ends of its batches."""

from __future__ import annotations

_KEPT = 64


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
