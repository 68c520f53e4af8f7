"""The size of the work units that workers get. Pure."""

from __future__ import annotations

IN_FLIGHT = 3
"""Work units per worker: one runs, the next is queued and the reply of the last is in transit."""
MOST = 1024
"""Maximum records of a work unit."""
_UNIT_S = 0.5
"""Target seconds per work unit. It bounds the work lost with a worker, and the wait for the last worker."""


class WorkUnitSize:
    """The number of records in the next work unit of one worker: about half a second of work."""

    def __init__(self, least: int) -> None:
        self.least = min(max(least, 1), MOST)
        self._rate: float | None = None
        self._records = 0
        self._seconds = 0.0

    def learn(self, records: int, seconds: float) -> None:
        """Add records that came back `seconds` after the previous ones."""
        self._records += records
        self._seconds += seconds
        if self._seconds >= _UNIT_S:  # units that share batches return together, so single gaps are not meaningful
            rate = self._records / self._seconds
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._records, self._seconds = 0, 0.0

    @property
    def full(self) -> int:
        """The size if enough records wait."""
        return self.least if self._rate is None else max(self.least, min(int(self._rate * _UNIT_S), MOST))

    def now(self, waiting: int, workers: int) -> int:
        """The size of the next work unit, given the number of waiting records.

        If few records wait, units become smaller so that all workers get some.
        """
        return min(self.full, max(self.least, -(-waiting // (2 * workers))))
