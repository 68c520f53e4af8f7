"""What is done: the union of the intervals that committed parts hold. A few numbers, however many records."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headrace.errors import JobError
from headrace.io.parts import Interval


class Ledger:
    """The positions in committed parts, frozen at the moment the job starts.

    Raises:
        JobError: two parts hold the same position.
    """

    def __init__(self, committed: Iterable[Interval]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(committed):
            if start >= end:
                raise JobError(f"a part claims the empty interval {start}..{end}: the parts folder is damaged")
            if self._ends and start < self._ends[-1]:
                raise JobError(
                    f"two parts both hold position {start}: the parts folder is damaged; begin anew with --overwrite"
                )
            if self._ends and start == self._ends[-1]:
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)
        self.done = sum(self._ends) - sum(self._starts)
        """How many positions are done."""

    @property
    def intervals(self) -> list[Interval]:
        """What is done, ascending; neighbours are joined."""
        return [Interval(start, end) for start, end in zip(self._starts, self._ends, strict=True)]

    def next_todo(self, position: int) -> int:
        """The first position >= `position` that is not done."""
        index = bisect_right(self._starts, position) - 1
        return max(position, self._ends[index]) if index >= 0 else position
