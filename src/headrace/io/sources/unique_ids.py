"""Finds duplicate ids while the input is read, exactly and in bounded memory.

It sees a 64-bit digest of every id. New digests are collected, sorted, and compared in one pass with the older ones: an
array in memory and sorted runs in files. If two digests are equal, the input is read again up to that position to
compare the ids. The runs stay in the job's working folder: a resume continues from them and reads the ids of finished
rows again only if no run contains them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import JobError
from headrace.extras import require
from headrace.io.storage.atomic import atomic_file

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Digests: TypeAlias = NDArray[numpy.uint64]

RUN_RECORDS = 1 << 17
"""Digests in memory; more make a run of them. As few as come in about two seconds, so that a long job needs no more
memory than a short one."""
MERGED_RUNS = 16
"""Number of runs that are merged into one, to limit the runs to search."""
LOOKING = 1 / 50
"""Share of the time to check new ids in, beside the first `FREE_S`. They are checked as soon as that allows, before
their records are computed: a fast engine would have computed them all before a later check."""
FREE_S = 0.2
"""Seconds of checks that no share bounds."""
BLOCK = 1 << 17
"""Digests of a run that are read at once."""
_RUN = re.compile(r"ids-(\d{12,})-(\d{12,})\.u64")


Found: TypeAlias = tuple[int, str | None]
"""A position and the text of its id; None for a record without one."""


class SeenIds:
    """Ids as they come, in input order or nearly so. Any two must differ.

    Args:
        folder: for the runs; created if missing.
        reread: reads all ids again from the first record.
        column: the id column.

    Raises:
        MissingExtraError: numpy is not installed.
    """

    def __init__(self, folder: Path, reread: Callable[[], Iterator[Found]], column: str) -> None:
        self._reread = reread
        self._column = column
        self._seen = _Digests(numpy_or_refuse(), folder)
        self.known = self._seen.load()
        """Ids of the positions before this one are in runs: they need not be given again."""
        self._began = time.monotonic()
        self._looked_s = 0.0

    def add(self, digests: Sequence[bytes], positions: Sequence[int], end: int) -> None:
        """Take more ids, those of all positions before `end` that were not taken before.

        Args:
            digests: 8 bytes for each id; empty for a record without one.
            positions: of the same records.
            end: a position.

        Raises:
            JobError: an id is duplicated; the message names it and its first two positions.
        """
        if not all(digests):
            positions = [position for position, digest in zip(positions, digests, strict=True) if digest]
        self._seen.add([digest for digest in digests if digest], positions, end)
        now = time.monotonic()
        if self._looked_s <= FREE_S + LOOKING * (now - self._began) or self._seen.is_full:
            self.look()
            self._looked_s += time.monotonic() - now

    def look(self) -> None:
        """Compare new ids with all earlier ones.

        Raises:
            JobError: an id is duplicated.
        """
        for position in self._seen.look():
            self._confirm(position)
        if self._seen.is_full:
            self._seen.put_away()  # not before: a run tells the next reading that its ids are good

    def _confirm(self, suspect: int) -> None:
        """Read the input again, up to the current position.

        Raises:
            JobError: the id is duplicated, or the input has changed.
        """
        read = range(self._seen.end)
        identity = next((value for position, value in self._reread() if position == suspect), None)
        if identity is None:
            raise JobError(f"the input has changed: record {suspect} had an id and now has none; start again")
        for position, value in self._reread():
            if position not in read:
                return  # another id with the same digest
            if position != suspect and value == identity:
                first, second = sorted((position, suspect))
                raise JobError(
                    f"id {identity!r} comes twice: in column {self._column!r} of records {first} and "
                    f'{second}. Make ids unique, name another ``id_column``, or give ``id_column=""`` to use '
                    "positions; "
                    "each needs ``overwrite=True``, which computes finished records again"
                )


def numpy_or_refuse() -> ModuleType:
    """NumPy, which the check needs.

    Raises:
        MissingExtraError: it is not installed.
    """
    module: ModuleType = require(
        "numpy", "io", "checking for duplicate ids", '; or give ``id_column=""`` to use positions as ids'
    )
    return module


@dataclass(frozen=True, slots=True)
class _Run:
    """A file of sorted digests of positions start..end-1."""

    path: Path
    start: int
    end: int
    count: int


class _Digests:
    """All digests: sorted runs in files, newer ones in memory, and the newest not yet compared."""

    def __init__(self, np: ModuleType, folder: Path) -> None:
        self._np = np
        self._folder = folder
        self._runs: list[_Run] = []
        self._recent = np.empty(0, np.uint64)
        """Sorted digests that were compared and are in no run."""
        self._new: list[tuple[Digests, NDArray[numpy.int64]]] = []
        """Digests and positions as arrays, one of each for every chunk of the input."""
        self._new_count = 0
        self._start = self._end = 0

    def load(self) -> int:
        """Load the runs of earlier reads; returns the first position that they do not contain."""
        self._folder.mkdir(parents=True, exist_ok=True)
        matches = [(match, path) for path in self._folder.iterdir() if (match := _RUN.fullmatch(path.name))]
        # Of two that begin alike the longer first: a kill may have left the shorter, which is merged in it.
        for start, minus_end, path in sorted((int(m[1]), -int(m[2]), path) for m, path in matches):
            if start == self._end:
                self._runs.append(_Run(path, start, -minus_end, path.stat().st_size // 8))
                self._start = self._end = -minus_end
        return self._end

    def add(self, digests: list[bytes], positions: Sequence[int], end: int) -> None:
        """Take more, in input order; all ids before position `end` have been taken then."""
        np = self._np
        self._new.append((np.frombuffer(b"".join(digests), np.uint64), np.array(positions, np.int64)))
        self._new_count += len(digests)
        self._end = max(self._end, end)

    @property
    def end(self) -> int:
        """The position after the last id."""
        return self._end

    @property
    def is_full(self) -> bool:
        """Whether there are enough for a run."""
        return self._new_count + len(self._recent) >= RUN_RECORDS

    def look(self) -> list[int]:
        """The positions of new digests that occurred before, ascending."""
        np = self._np
        if not self._new:
            return []
        digests, positions = (np.concatenate(arrays) for arrays in zip(*self._new, strict=True))
        self._new, self._new_count = [], 0
        order = np.argsort(digests, kind="stable")  # of equal ones the first comes first
        digests, positions = digests[order], positions[order]
        known = np.zeros(len(digests), bool)
        known[1:] = digests[1:] == digests[:-1]
        for older in self._older():
            low, high = np.searchsorted(digests, older[0]), np.searchsorted(digests, older[-1], "right")
            mine = digests[low:high]
            known[low:high] |= older[np.minimum(np.searchsorted(older, mine), len(older) - 1)] == mine
        self._recent = np.concatenate((self._recent, digests))
        self._recent.sort()
        return sorted(positions[known].tolist())

    def _older(self) -> Iterator[Digests]:
        """Sorted arrays of all that has been looked for, a bounded part at a time."""
        if len(self._recent):
            yield self._recent
        block = self._np.empty(BLOCK, self._np.uint64)  # read into again and again
        for run in self._runs:
            with run.path.open("rb", buffering=0) as file:
                while size := file.readinto(block):
                    yield block[: size // 8]

    def put_away(self) -> None:
        """Write a run of all compared digests."""
        self._write(self._start, self._end, [self._recent])
        self._recent = self._np.empty(0, self._np.uint64)
        self._start = self._end
        small = [run for run in self._runs if run.count < RUN_RECORDS * MERGED_RUNS]
        if len(small) == MERGED_RUNS:
            del self._runs[-MERGED_RUNS:]
            self._write(small[0].start, small[-1].end, self._merged(small))
            for run in small:
                run.path.unlink()

    def _merged(self, runs: Sequence[_Run]) -> Iterator[Digests]:
        """The digests of several runs as sorted arrays, the lowest first, each about a quarter of a run."""
        np = self._np
        pieces = 4 * len(runs)
        edges = np.linspace(0, 2.0**64, pieces, endpoint=False).astype(np.uint64)[1:]  # digests are spread evenly
        bounds = [[0, *np.searchsorted(np.fromfile(run.path, np.uint64), edges), run.count] for run in runs]
        for number in range(pieces):
            parts = [
                np.fromfile(run.path, np.uint64, bound[number + 1] - bound[number], offset=8 * bound[number])
                for run, bound in zip(runs, bounds, strict=True)
            ]
            together = np.concatenate(parts)
            together.sort()
            yield together

    def _write(self, start: int, end: int, digests: Iterable[Digests]) -> None:
        path = self._folder / f"ids-{start:012d}-{end:012d}.u64"
        count = 0
        with atomic_file(path) as file:
            for piece in digests:
                file.write(piece.data)
                count += len(piece)
        self._runs.append(_Run(path, start, end, count))
