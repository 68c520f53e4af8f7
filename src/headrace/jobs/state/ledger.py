"""The finished positions, from committed parts, in at most one bit each."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from headrace.errors import JobError
from headrace.io.storage.parts import Interval

_BITS = 12
_PAGE = 1 << _BITS
_FULL = (1 << _PAGE) - 1


class Ledger:
    """The positions in committed parts when the job starts.

    Stored in pages of 4,096 positions: a finished page takes a few bytes, others take one bit per position. 100 million
    records take at most 17 MB.

    Raises:
        JobError: two parts hold the same position.
    """

    def __init__(self, committed: Iterable[Interval]) -> None:
        self._pages: dict[int, int] = {}
        """Page → bit n for its n-th position."""
        self.done = 0
        """Number of finished positions."""
        self._beyond = 0
        """No position from this one on is finished."""
        self._known = (0, 0)
        """Start and end of the finished range found last, which is often asked for again."""
        for start, end in committed:
            if start >= end:
                raise JobError(f"a part has the empty interval {start}..{end}: the parts folder is damaged")
            self._add(start, end)
            self.done += end - start
            self._beyond = max(self._beyond, end)

    def _add(self, start: int, end: int) -> None:
        for number in range(start >> _BITS, ((end - 1) >> _BITS) + 1):
            first = number << _BITS
            low, high = max(start - first, 0), min(end - first, _PAGE)
            bits = _FULL if high - low == _PAGE else ((1 << (high - low)) - 1) << low
            page = self._pages.get(number, 0)
            if twice := page & bits:
                position = first + (twice & -twice).bit_length() - 1
                raise JobError(
                    f"two parts hold position {position}: the parts folder is damaged; start again with "
                    "``overwrite=True``"
                )
            page |= bits
            self._pages[number] = _FULL if page == _FULL else page  # finished pages share one object

    @property
    def is_whole(self) -> bool:
        return self.next_todo(0) == self.done

    def next_todo(self, position: int) -> int:
        """The first position >= `position` that is not finished."""
        if position >= self._beyond:
            return position
        low, high = self._known
        if low <= position < high:
            return high
        number, offset = position >> _BITS, position & (_PAGE - 1)
        free = self._free(number, offset)
        while not free:
            number, offset = number + 1, 0
            free = self._free(number, 0)
        found = (number << _BITS) + offset + (free & -free).bit_length() - 1
        if found > position:
            self._known = (position, found)
        return found

    __call__ = next_todo

    def next_done(self, position: int) -> int:
        """The first position >= `position` that is finished; `sys.maxsize` if there is none."""
        number, offset = position >> _BITS, position & (_PAGE - 1)
        while position < self._beyond:
            if bits := self._pages.get(number, 0) >> offset:
                return (number << _BITS) + offset + (bits & -bits).bit_length() - 1
            number, offset = number + 1, 0
            position = number << _BITS
        return sys.maxsize

    def _free(self, number: int, offset: int) -> int:
        """The unfinished positions of a page from `offset` on, as bits."""
        page = self._pages.get(number, 0)
        return 0 if page is _FULL else (_FULL ^ page) >> offset
