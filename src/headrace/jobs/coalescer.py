"""Puts finished records back in input order: they end in any order, and a part holds consecutive positions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.io.parts import Interval
from headrace.records import Outcome

SMALL_RUN_PATIENCE = 5
"""A run of fewer than `small_run` rows waits this many intervals: its neighbours are most likely in flight, and a file
of its own for each fragment would cost more than repeating it after a kill."""


@dataclass(slots=True)
class _Run:
    start: int
    end: int
    oldest: float


class Coalescer:
    """Holds finished outcomes by position and gives out runs without a gap. Pure: told the time, reads no clock.

    A run is given out when it has `part_records` rows, when its oldest row has waited `interval_s` seconds (five times
    as long if it has fewer than `small_run` rows), or when all are asked for. A run never has 2 × `part_records` rows.
    """

    def __init__(self, part_records: int, interval_s: float, small_run: int = 32) -> None:
        self._part_records = part_records
        self._interval_s = interval_s
        self._small_run = min(small_run, part_records)
        self._rows: dict[int, Outcome] = {}
        self._by_start: dict[int, _Run] = {}
        self._by_end: dict[int, _Run] = {}
        self._full: deque[_Run] = deque()

    def __len__(self) -> int:
        """Rows held."""
        return len(self._rows)

    @property
    def full_runs(self) -> int:
        """Runs of at least `part_records` rows that are ready to be taken."""
        return len(self._full)

    def add(self, outcome: Outcome, now: float) -> None:
        """Hold one more outcome; a position comes once."""
        position = outcome.record.position
        self._rows[position] = outcome
        left = self._by_end.pop(position, None)
        right = self._by_start.pop(position + 1, None)
        if left is not None:
            run = left
            run.end = position + 1
            if right is not None:
                run.end = right.end
                run.oldest = min(left.oldest, right.oldest)
        elif right is not None:
            run = right
            run.start = position
        else:
            run = _Run(position, position + 1, now)
        self._by_start[run.start] = self._by_end[run.end] = run
        if run.end - run.start >= self._part_records:
            self._close(run)
            self._full.append(run)

    def take(self, now: float) -> tuple[Interval, list[Outcome]] | None:
        """A run that is due, as its interval and its outcomes in input order; None if none is."""
        if self._full:
            return self._give(self._full.popleft())
        for run in self._by_start.values():
            if now >= self._due(run):
                self._close(run)
                return self._give(run)
        return None

    def take_any(self) -> tuple[Interval, list[Outcome]] | None:
        """Any run, due or not; None if nothing is held."""
        return self.take(float("inf"))

    def next_due(self) -> float | None:
        """The moment at which a run will be due if nothing more comes; None if nothing is held."""
        if self._full:
            return float("-inf")
        return min(map(self._due, self._by_start.values()), default=None)

    def _due(self, run: _Run) -> float:
        small = run.end - run.start < self._small_run
        return run.oldest + self._interval_s * (SMALL_RUN_PATIENCE if small else 1)

    def _close(self, run: _Run) -> None:
        del self._by_start[run.start]
        del self._by_end[run.end]

    def _give(self, run: _Run) -> tuple[Interval, list[Outcome]]:
        outcomes = [self._rows.pop(position) for position in range(run.start, run.end)]
        return Interval(run.start, run.end), outcomes
