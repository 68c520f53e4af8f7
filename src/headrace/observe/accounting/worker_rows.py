"""The figures of a job's workers, from their events; pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.events import WorkerLost, WorkUnitDone


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The figures of one cluster worker, including its replacements."""

    worker: str
    records: int
    failed: int
    batches: int
    busy: float
    """Fraction of the wall time with its engine busy."""
    lost: int
    """Number of its processes that died."""


class WorkerCount:
    """Adds up the events of a worker."""

    def __init__(self) -> None:
        self.records = self.failed = self.batches = self.lost = 0
        self.busy_s = 0.0

    def add(self, event: WorkUnitDone | WorkerLost) -> None:
        if isinstance(event, WorkerLost):
            self.lost += 1
            return
        self.records += event.records
        self.failed += event.failed
        self.batches += event.batches
        self.busy_s += event.busy_s

    def build(self, worker: str, wall: float) -> WorkerRow:
        """The figures, for a job that took `wall` seconds."""
        busy = min(1.0, self.busy_s / wall) if wall > 0 else 0.0
        return WorkerRow(worker, self.records, self.failed, self.batches, busy, self.lost)
