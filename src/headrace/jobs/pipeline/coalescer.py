"""Puts finished records back into input order: they finish in any order, and a part holds consecutive positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.io.storage.parts import Interval
from headrace.records import Outcome

SMALL_RUN = 32
"""A run of fewer rows waits longer in proportion, a single row 32 intervals. Its neighbours are probably in flight, and
a file for each fragment would cost more than computing the fragment again after a kill."""


@dataclass(slots=True)
class _Run:
    start: int
    end: int
    oldest: float


class Coalescer:
    """Holds finished outcomes by position and returns runs of consecutive ones. Pure: reads no clock.

    A run is due when it has `part_records` rows, or when its oldest row has waited `interval_s` seconds (longer if it
    has fewer than 32 rows). A run has fewer rows than 2 × `part_records` plus those added last. `place` numbers the
    positions if they have gaps.
    """

    def __init__(self, part_records: int, interval_s: float, place: Callable[[int], int] | None = None) -> None:
        self.part_records = part_records
        """Rows of a full run; a change applies to rows added later."""
        self._interval_s = interval_s
        self._place = place
        self._rows: dict[int, Outcome] = {}
        self._by_start: dict[int, _Run] = {}
        self._by_end: dict[int, _Run] = {}
        self._full: deque[_Run] = deque()

    def __len__(self) -> int:
        """Rows held."""
        return len(self._rows)

    @property
    def full_runs(self) -> int:
        """Number of full runs."""
        return len(self._full)

    def add(self, outcomes: Sequence[Outcome], now: float) -> None:
        """Add outcomes, each position once. Fastest for consecutive positions."""
        places = [outcome.record.position for outcome in outcomes]
        if self._place is not None:
            places = list(map(self._place, places))
        start = 0
        for end in range(1, len(outcomes) + 1):
            if end == len(outcomes) or places[end] != places[end - 1] + 1:
                self._add_run(places[start], outcomes[start:end], now)
                start = end

    def _add_run(self, start: int, outcomes: Sequence[Outcome], now: float) -> None:
        """Add outcomes of consecutive places."""
        end = start + len(outcomes)
        self._rows.update(zip(range(start, end), outcomes, strict=True))
        left = self._by_end.pop(start, None)
        right = self._by_start.pop(end, None)
        if left is not None:
            run = left
            run.end = end
            if right is not None:
                run.end = right.end
                run.oldest = min(left.oldest, right.oldest)
        elif right is not None:
            run = right
            run.start = start
        else:
            run = _Run(start, end, now)
        self._by_start[run.start] = self._by_end[run.end] = run
        if run.end - run.start >= self.part_records:
            self._close(run)
            self._full.append(run)

    def take(self, now: float, least_wait_s: float = 0.0) -> tuple[Interval, list[Outcome]] | None:
        """The interval and the outcomes, in input order, of a run that is due; None if none is.

        Args:
            least_wait_s: minimum seconds that the oldest row of a run waits, unless the run is full.
        """
        if self._full:
            return self._give(self._full.popleft())
        for run in self._by_start.values():
            if now - run.oldest >= max(least_wait_s, self._interval_s * max(1.0, SMALL_RUN / (run.end - run.start))):
                self._close(run)
                return self._give(run)
        return None

    def _close(self, run: _Run) -> None:
        del self._by_start[run.start]
        del self._by_end[run.end]

    def _give(self, run: _Run) -> tuple[Interval, list[Outcome]]:
        outcomes = [self._rows.pop(position) for position in range(run.start, run.end)]
        return Interval(run.start, run.end), outcomes
