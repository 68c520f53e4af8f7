"""What the ends of batches say: how long at least one was running, and what was gained."""

from __future__ import annotations

from headrace.events import BatchDone

_KEPT = 64


class BusyTime:
    """The length of the union of intervals that arrive in the order of their ends."""

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
        if len(self._open) > _KEPT:  # no batch is so long that it reaches back over so many gaps
            settled_start, settled_end = self._open.pop(0)
            self._settled += settled_end - settled_start

    @property
    def seconds(self) -> float:
        """The time covered so far."""
        return self._settled + sum(end - start for start, end in self._open)


def cost_of_the_ok(batch: BatchDone) -> float:
    """The batch's cost without its failed records' share, taken as even: a batch that never ran has failed whole."""
    return batch.cost * (batch.size - batch.failed) / batch.size
