"""One window, with rows in the order of work or sorted again; and several sorted ones as parts of the output."""

from __future__ import annotations

import heapq
import itertools
import json
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from headrace.io.base import PartWriter, Take
from headrace.io.storage.parts import Interval, PartFolder
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.order_file import ORDER, iter_order, read_order, write_order

PART_ROWS = 4096
_PART_BYTES = 16 * 1024 * 1024
"""Size of the parts that windows are merged into."""
_RUN_BYTES = 256 * 1024
"""Size of the parts that wait for other windows: at most one of each is in memory while all are put together."""


class _Committed:
    parts: PartFolder
    committed: list[Interval]
    """The committed places in this window, from 0."""

    @property
    def finished(self) -> int:
        return sum(end - start for start, end in self.committed)

    def letters(self) -> Iterator[tuple[int, bytes]]:
        """The dead letters with their positions, part by part."""
        for twin in self.parts.twins(self.committed):
            for line in twin.read_bytes().splitlines(keepends=True):
                yield json.loads(line)["position"], line


class OpenWindow(_Committed):
    """The records of one window, and what of them is committed."""

    def __init__(self, number: int, positions: array[int], parts: PartFolder) -> None:
        self.number = number
        self.positions = positions
        """In the order of work."""
        self.parts = parts
        self.committed = []
        places = sorted(range(len(positions)), key=positions.__getitem__)
        self._sorted = array("Q", (positions[place] for place in places))
        self._places = array("Q", places)

    def place(self, position: int) -> int | None:
        """The place of a record in the order of work; None if it is not in this window."""
        found = bisect_left(self._sorted, position)
        if found == len(self._sorted) or self._sorted[found] != position:
            return None
        return self._places[found]

    @property
    def done(self) -> list[int]:
        """The positions of the committed records, ascending."""
        return sorted(self.positions[place] for start, end in self.committed for place in range(start, end))

    @property
    def left(self) -> int:
        """How many records are not committed."""
        return len(self.positions) - self.finished

    def lies_in(self, ledger: Ledger) -> bool:
        """Whether all its records are finished there."""
        return all(ledger.next_todo(position) != position for position in self._sorted)

    def beside(self, parts: Sequence[Interval]) -> list[Interval]:
        """The parts with none of its records."""
        return _beside(self._sorted, parts)

    def rearranged(self, writer: PartWriter, pieces: Sequence[Sequence[int]]) -> Iterator[tuple[bytes, bytes]]:
        """The rows and the dead letters of committed positions, for each of `pieces`.

        Needs memory for the rows of the window.
        """
        self.committed.sort()
        letters = dict(self.letters())
        places = chain.from_iterable(range(start, end) for start, end in self.committed)
        good = (self.positions[place] for place in places)
        row_of = {position: row for row, position in enumerate(p for p in good if p not in letters)}
        chosen = [[row_of[position] for position in piece if position in row_of] for piece in pieces]
        paths = [self.parts.part_path(interval) for interval in self.committed]
        made = writer.rearrange([paths], [Take([len(row_of)], chosen)])
        for piece, rows in zip(pieces, made, strict=True):
            yield rows, b"".join(letters[position] for position in piece if position in letters)

    def sort_into(self, folder: Path, writer: PartWriter) -> None:
        """Write what is committed to a new folder, in input order, for a `SortedWindow`."""
        folder.mkdir()
        done = self.done
        write_order(folder / ORDER, array("Q", done))
        parts = PartFolder(folder, writer.suffix)
        most = _rows_of(_RUN_BYTES, [self])
        pieces = [done[start : start + most] for start in range(0, len(done), most)]
        for number, (rows, failures) in enumerate(self.rearranged(writer, pieces)):
            start = number * most
            parts.commit(Interval(start, start + len(pieces[number])), rows, failures)


class SortedWindow(_Committed):
    """A window whose rows are in input order, and wait for the rows of other windows between them."""

    def __init__(self, path: Path, suffix: str) -> None:
        self.path = path
        self.parts = PartFolder(path, suffix)
        self.committed = self.parts.committed()

    @property
    def done(self) -> Iterator[int]:
        """The positions of the records, ascending. Not all are in memory at a time."""
        return iter_order(self.path / ORDER)

    def beside(self, parts: Sequence[Interval]) -> list[Interval]:
        return _beside(read_order(self.path / ORDER), parts)

    def rows(self) -> list[Path]:
        return [self.parts.part_path(interval) for interval in self.committed]


def collated(
    windows: Sequence[SortedWindow], writer: PartWriter, joins: Callable[[int, int], bool]
) -> Iterator[tuple[Interval, bytes, bytes]]:
    """The rows and the dead letters of all these windows in input order, as parts of about 16 MiB at most.

    A part's interval is from its first position to its last. Memory is bounded: it holds one part, and of each window
    32 KiB of lines, or one part of other formats.

    Args:
        joins: whether a position may be in the same part as the one before.
    """
    made: deque[tuple[Interval, bytes]] = deque()

    def takes() -> Iterator[Take]:
        letters = [window.letters() for window in windows]
        next_letters = [next(one, None) for one in letters]
        for part in _parts(windows, joins):
            counts, rows, failures = [0] * len(windows), [], []
            for position, number in part:
                letter = next_letters[number]
                if letter is not None and letter[0] == position:
                    failures.append(letter[1])
                    next_letters[number] = next(letters[number], None)
                else:
                    rows.append((number, counts[number]))
                    counts[number] += 1
            firsts = list(itertools.accumulate(counts, initial=0))
            made.append((Interval(part[0][0], part[-1][0] + 1), b"".join(failures)))
            yield Take(counts, [[firsts[number] + row for number, row in rows]])

    for rows in writer.rearrange([window.rows() for window in windows], takes()):
        interval, failures = made.popleft()
        yield interval, rows, failures


def _rows_of(size: int, windows: Sequence[OpenWindow | SortedWindow]) -> int:
    """How many rows of these windows have about this size; at most those of a part."""
    paths = [window.parts.part_path(interval) for window in windows for interval in window.committed]
    rows = sum(window.finished for window in windows)
    return min(PART_ROWS, rows * size // max(1, sum(path.stat().st_size for path in paths)) + 1)


def _parts(windows: Sequence[SortedWindow], joins: Callable[[int, int], bool]) -> Iterator[list[tuple[int, int]]]:
    """The positions of all windows, ascending, each with the number of its window, cut into parts."""
    part: list[tuple[int, int]] = []
    most = _rows_of(_PART_BYTES, windows)
    for one in heapq.merge(*(zip(w.done, itertools.repeat(number)) for number, w in enumerate(windows))):
        if part and (len(part) == most or not joins(part[-1][0], one[0])):
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def stretches(positions: Sequence[int], most: int) -> Iterator[range]:
    """Ascending positions as ranges of consecutive ones, each of at most `most`."""
    start = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1 or end - start == most:
            yield range(positions[start], positions[end - 1] + 1)
            start = end


def _beside(positions: array[int], parts: Sequence[Interval]) -> list[Interval]:
    return [part for part in parts if bisect_left(positions, part.start) == bisect_left(positions, part.end)]
