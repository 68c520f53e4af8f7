"""Finds duplicate ids while the input is read, exactly and in bounded memory.

It sees a 64-bit digest of every id, keyed by a number that is drawn at random for each job, so that nobody can make ids
whose digests are equal. New digests are collected and sorted. A filter tells which are new for sure; the others are
compared with the older ones: arrays in memory and sorted runs in files. If two digests are equal, the input is read
again up to that position to compare the ids. The runs stay in the job's working folder: a resume continues from them
and reads the ids of finished rows again only if no run contains them.

Ids that are integers, each above the one before, need no digests. At the first that is not, the ids before it are read
again and get theirs.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import JobError
from headrace.extras import lazy, require
from headrace.io.formats.arrow_memory import content_of, numbers_of
from headrace.io.storage.atomic import atomic_file, outlives

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray

    Digests: TypeAlias = NDArray[numpy.uint64]
    Places: TypeAlias = NDArray[numpy.int64]
else:
    numpy, pa = lazy("numpy"), lazy("pyarrow")

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
_RUN = re.compile(r"ids-(\d{12,})-(\d{12,})-([0-9a-f]{16})\.u64")
"""First position, position after the last, and key. Files of earlier versions have no key: their ids are read again."""
_ASCENDING = re.compile(r"ids-(\d{12,})-(-?\d+)\.ascending")
"""Position after the last id, and that id, of integers that ascend: an empty file."""
_INTEGER = re.compile(rb"0|-?[1-9]\d{0,17}")
FILTER_BITS = 27
"""A filter of 16 MiB: one in 14 ids of 10 million is looked for among the older ones, and one in 2 of 100 million."""
_WORDS = 64
"""Words of four bytes in an id; longer ids have another digest."""


Found: TypeAlias = tuple[int, str | None]
"""A position and the text of its id; None for a record without one."""


class SeenIds:
    """Ids as they come, in input order or nearly so. All must differ.

    Args:
        folder: for the runs; created if missing.
        reread: reads all ids again from the first record.

    Raises:
        MissingExtraError: numpy is not installed.
    """

    def __init__(self, folder: Path, reread: Callable[[], Iterator[Found]], column: str) -> None:
        self._reread = reread
        self._column = column
        refuse_without_numpy()
        self._stays = outlives(folder)
        self._seen = _Digests(folder)
        self.known = self._seen.load()
        """Ids of the positions before this one are in runs: they need not be given again."""
        self._ascending: _Ascending | None = None if self.known else _Ascending(folder)
        """What is known of ids so far, if each was an integer above the one before; then they have no digests."""
        if self._ascending is not None:
            self.known = self._ascending.end
        self._began = time.monotonic()
        self._looked_s = 0.0

    def unseen(self, next_todo: Callable[[int], int]) -> Unseen:
        """The positions to read: those that are not done, and those whose ids are not known."""
        return Unseen(next_todo, self.known)

    def add(self, ids: Sequence[str | None], positions: Sequence[int], end: int) -> None:
        """Take more ids, those of all positions before `end` that were not taken before.

        Args:
            ids: their texts; None for a record without one.

        Raises:
            JobError: an id is duplicated; the message names it and its first two positions.
        """
        texts = [text.encode() for text in ids if text is not None]
        if self._ascending is not None and self._ascending.takes(_integers(texts), end):
            return
        places = [position for position, text in zip(positions, ids, strict=True) if text is not None]
        ends = numpy.cumsum([0, *map(len, texts)], dtype=numpy.int64)
        self._add_digests(self._seen.key.digests(b"".join(texts), ends), numpy.array(places, numpy.int64), end)

    def add_column(self, ids: pa.Array, positions: Places, end: int) -> None:
        """Take more ids, as `add` does, from a column of texts or integers. Known ones and nulls may be among them."""
        new = positions >= self.known
        if ids.null_count:
            new &= ids.is_valid().to_numpy(zero_copy_only=False)
        if not new.all():
            ids, positions = ids.filter(pa.array(new)), positions[new]
        ids = ids if len(ids) else pa.nulls(0, pa.int64())
        numbers = numbers_of(ids) if ids.type in (pa.int32(), pa.int64()) else None
        if self._ascending is not None and self._ascending.takes(numbers, end):
            return
        self._add_digests(self._seen.key.digests(*content_of(ids.cast(pa.large_string()))), positions, end)

    def _add_digests(self, digests: Digests, positions: Places, end: int) -> None:
        if (before := self._ascending) is not None:
            self._ascending = None
            before.forget()
            found = itertools.takewhile(lambda pair: pair[0] < before.end, self._reread() if before.end else ())
            while some := list(itertools.islice(found, BLOCK)):
                self.add([text for _, text in some], [position for position, _ in some], some[-1][0] + 1)
        self._seen.add(digests, positions, end)
        now = time.monotonic()
        if self._looked_s <= FREE_S + LOOKING * (now - self._began) or self._seen.is_full:
            self.look()
            self._looked_s += time.monotonic() - now

    def look(self) -> None:
        """Compare new ids with all earlier ones. Raises JobError: an id is duplicated."""
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
                again = "; each needs ``overwrite=True``, which computes finished records again" if self._stays else ""
                raise JobError(
                    f"id {identity!r} comes twice: in column {self._column!r} of records {first} and "
                    f'{second}. Make ids unique, name another ``id_column``, or give ``id_column=""`` to use '
                    f"positions{again}"
                )


class _Ascending:
    """Ids so far, each an integer above the one before.

    Args:
        folder: of an empty file, whose name tells the next run so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = [
            (int(match[1]), int(match[2])) for file in folder.iterdir() if (match := _ASCENDING.fullmatch(file.name))
        ]
        self.end, self._last = max(found, default=(0, -(2**63) - 1))
        """The position after the last id."""
        self._noted = self.end

    def takes(self, numbers: NDArray[numpy.int64] | None, end: int) -> bool:
        """Take more ids, those of all positions before `end`; returns whether they ascend, too."""
        if numbers is None or (len(numbers) and int(numbers[0]) <= self._last) or (numbers[1:] <= numbers[:-1]).any():
            return False
        self._last = int(numbers[-1]) if len(numbers) else self._last
        self.end = max(self.end, end)
        if self.end - self._noted >= RUN_RECORDS:
            self.forget()
            (self._folder / f"ids-{self.end:012d}-{self._last}.ascending").touch()
            self._noted = self.end
        return True

    def forget(self) -> None:
        for file in self._folder.glob("ids-*.ascending"):
            file.unlink()


def _integers(texts: Sequence[bytes]) -> NDArray[numpy.int64] | None:
    """Texts as integers; None if one is no integer as Python writes it, or has more than 18 digits."""
    return numpy.array(list(map(int, texts)), numpy.int64) if all(map(_INTEGER.fullmatch, texts)) else None


@dataclass(frozen=True, slots=True)
class Unseen:
    """Positions as `next_todo` gives them up to a bound, and all from there on."""

    next_todo: Callable[[int], int]
    bound: int

    def __call__(self, position: int) -> int:
        """The first that is to be read, from `position` on."""
        return min(self.next_todo(position), self.bound) if position < self.bound else position

    def next_done(self, position: int) -> int:
        """The first that is not to be read, from `position` on; `sys.maxsize` if there is none."""
        next_done: Callable[[int], int] = getattr(self.next_todo, "next_done", lambda position: position + 1)
        found = next_done(position) if position < self.bound else sys.maxsize
        return found if found < self.bound else sys.maxsize


def refuse_without_numpy() -> None:
    """Check that the check can be made. Raises MissingExtraError: NumPy is not installed."""
    require("numpy", "io", "checking for duplicate ids", '; or give ``id_column=""`` to use positions as ids')


@dataclass(frozen=True, slots=True)
class _Run:
    """A file of sorted digests of positions start..end-1."""

    path: Path
    start: int
    end: int
    count: int


class Key:
    """Makes digests: two sums of an id's words, each word times a random number of its own, and of its length.

    Two ids that differ have equal digests with a probability of 2^-64, whatever they are (Thorup, "High speed hashing
    for integers and strings", arXiv:1504.06804: multiply-shift of vectors).

    Args:
        number: of 64 bits.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        drawn = random.Random(number)
        factors = [[drawn.getrandbits(64) for _ in range(_WORDS + 2)] for _ in range(2)]
        self._factors = numpy.array(factors, numpy.uint64)
        self._masks = numpy.array([0, 0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF], numpy.uint32)

    def digests(self, content: bytes | pa.Buffer, bounds: Places) -> Digests:
        """The digest of each id.

        Args:
            content: holds the ids one after the other, in UTF-8.
            bounds: where the first begins, and where each ends.
        """
        starts, lengths = bounds[:-1], numpy.diff(bounds)
        if not len(starts):
            return numpy.empty(0, numpy.uint64)
        first, last = int(bounds[0]), int(bounds[-1])
        padded = numpy.zeros(last - first + 4, numpy.uint8)
        padded[:-4] = numpy.frombuffer(content, numpy.uint8)[first:last] if last > first else 0
        words = numpy.ndarray(len(padded) - 3, numpy.dtype("<u4"), padded, strides=(1,))  # one begins at each byte
        sums = self._factors[:, :1] + self._factors[:, 1:2] * lengths.astype(numpy.uint64)
        for number in range(min(_WORDS, -(-int(lengths.max()) // 4))):
            left = lengths - 4 * number
            at = numpy.minimum(starts - first + 4 * number, len(words) - 1)
            word = words[at] & self._masks[numpy.clip(left, 0, 4)]
            sums += self._factors[:, number + 2 : number + 3] * word.astype(numpy.uint64)
        found: Digests = (sums[0] >> numpy.uint64(32) << numpy.uint64(32)) | (sums[1] >> numpy.uint64(32))
        for row in numpy.flatnonzero(lengths > 4 * _WORDS).tolist():
            start = int(starts[row]) - first
            text = padded[start : start + int(lengths[row])].tobytes()
            found[row] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return found


class _Digests:
    """All digests: sorted runs in files, newer ones in memory, and the newest not yet compared."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filter = _Filter()
        self._runs: list[_Run] = []
        self._recent: list[Digests] = []
        """Sorted arrays of digests that were compared and are in no run."""
        self._recent_count = 0
        self._new: list[tuple[Digests, Places]] = []
        """Digests and positions as arrays, one of each for every chunk of the input."""
        self._new_count = 0
        self._start = self._end = 0
        self.key = Key(secrets.randbits(64))

    def load(self) -> int:
        """Load the runs of earlier reads; returns the first position that they do not contain."""
        self._folder.mkdir(parents=True, exist_ok=True)
        matches = [(match, path) for path in self._folder.iterdir() if (match := _RUN.fullmatch(path.name))]
        # Of two that begin alike the longer first: a kill may have left the shorter, which is merged in it.
        runs = sorted((int(m[1]), -int(m[2]), path, int(m[3], 16)) for m, path in matches)
        if runs:
            self.key = Key(runs[0][3])
        for start, minus_end, path, key in runs:
            if start == self._end and key == self.key.number:
                self._runs.append(_Run(path, start, -minus_end, path.stat().st_size // 8))
                self._start = self._end = -minus_end
        for older in self._older():
            self._filter.add(older)
        return self._end

    def add(self, digests: Digests, positions: Places, end: int) -> None:
        """Take more, in input order; all ids before position `end` have been taken then."""
        self._new.append((digests, positions))
        self._new_count += len(digests)
        self._end = max(self._end, end)

    @property
    def end(self) -> int:
        """The position after the last id."""
        return self._end

    @property
    def is_full(self) -> bool:
        return self._new_count + self._recent_count >= RUN_RECORDS

    def look(self) -> list[int]:
        """The positions of new digests that occurred before, ascending."""
        if not self._new:
            return []
        digests, positions = (numpy.concatenate(arrays) for arrays in zip(*self._new, strict=True))
        self._new, self._new_count = [], 0
        mine = numpy.sort(digests)
        maybe = mine[self._filter.add(mine)]
        twice, known = mine[1:][mine[1:] == mine[:-1]], [mine[:0]]
        for older in self._older() if len(maybe) else ():
            near = maybe[numpy.searchsorted(maybe, older[0]) : numpy.searchsorted(maybe, older[-1], "right")]
            known.append(near[older[numpy.minimum(numpy.searchsorted(older, near), len(older) - 1)] == near])
        self._recent += [mine] if len(mine) else []
        self._recent_count += len(mine)
        before = numpy.concatenate(known)
        suspects: list[int] = positions[numpy.isin(digests, before)].tolist() if len(before) else []
        for digest in numpy.setdiff1d(twice, before) if len(twice) else ():
            suspects += positions[digests == digest].tolist()[1:]
        return sorted(suspects)

    def _older(self) -> Iterator[Digests]:
        """Sorted arrays of all that has been looked for, a bounded part at a time. None is empty."""
        yield from self._recent
        block = numpy.empty(BLOCK, numpy.uint64)  # read into again and again
        for run in self._runs:
            with run.path.open("rb", buffering=0) as file:
                while size := file.readinto(block.data):
                    yield block[: size // 8]

    def put_away(self) -> None:
        """Write a run of all compared digests."""
        self._write(self._start, self._end, [numpy.sort(numpy.concatenate(self._recent))])
        self._recent, self._recent_count = [], 0
        self._start = self._end
        small = [run for run in self._runs if run.count < RUN_RECORDS * MERGED_RUNS]
        if len(small) == MERGED_RUNS:
            del self._runs[-MERGED_RUNS:]
            self._write(small[0].start, small[-1].end, self._merged(small))
            for run in small:
                run.path.unlink()

    def _merged(self, runs: Sequence[_Run]) -> Iterator[Digests]:
        """The digests of several runs as sorted arrays, the lowest first, each about a quarter of a run."""
        pieces = 4 * len(runs)
        edges = numpy.linspace(0, 2.0**64, pieces, endpoint=False).astype(numpy.uint64)[1:]  # digests are spread evenly
        bounds = [[0, *numpy.searchsorted(numpy.fromfile(run.path, numpy.uint64), edges), run.count] for run in runs]
        for number in range(pieces):
            parts = [
                numpy.fromfile(run.path, numpy.uint64, bound[number + 1] - bound[number], offset=8 * bound[number])
                for run, bound in zip(runs, bounds, strict=True)
            ]
            together = numpy.concatenate(parts)
            together.sort()
            yield together

    def _write(self, start: int, end: int, digests: Iterable[Digests]) -> None:
        path = self._folder / f"ids-{start:012d}-{end:012d}-{self.key.number:016x}.u64"
        count = 0
        with atomic_file(path) as file:
            for piece in digests:
                file.write(piece.data)
                count += len(piece)
        self._runs.append(_Run(path, start, end, count))


class _Filter:
    """Tells of digests whether they are new for sure: a bit for each value of their first bits."""

    def __init__(self) -> None:
        self._bits = numpy.empty(0, numpy.uint8)

    def add(self, digests: Digests) -> NDArray[numpy.bool_]:
        """Take more, sorted, so that those of one byte are neighbours. Which of them may have been taken before."""
        places = (digests >> numpy.uint64(64 - FILTER_BITS)).astype(numpy.uint32)
        at, bits = places >> 3, numpy.left_shift(numpy.uint8(1), (places & 7).astype(numpy.uint8))
        if len(at) and not len(self._bits):  # not before: ids that ascend need none
            self._bits = numpy.zeros(1 << (FILTER_BITS - 3), numpy.uint8)
        known: NDArray[numpy.bool_] = (self._bits[at] & bits) != 0
        firsts = numpy.flatnonzero(numpy.diff(at, prepend=-1))
        if len(at):
            self._bits[at[firsts]] |= numpy.bitwise_or.reduceat(bits, firsts)
        return known
