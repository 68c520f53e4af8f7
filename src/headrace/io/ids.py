"""Ids that come twice: found while the input is read, in bounded memory, and never by mistake.

Of every id a 64-bit digest is kept: a million at a time in memory, then as a sorted run in a file, which is searched
through the page cache. Two equal digests are a suspicion; the input is read again up to that place to see the ids
themselves. The runs stay in the job's working folder: a resume goes on from them, and reads the ids of finished rows
again only where no run holds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import JobError, MissingExtraError
from headrace.io.base import Chunk, Source
from headrace.io.parts import atomic_file

RUN_RECORDS = 1 << 18
MERGED_RUNS = 8
"""So many runs are merged into one: fewer to search, and no more than 16 MiB to sort."""
_RUN = re.compile(r"ids-(\d{12,})-(\d{12,})\.u64")


class UniqueIds:
    """A source whose ids in `column` must differ, as text: 1 and "1" are the same.

    A row without an id, or with one that is no id, is left to those who read the id to use it.

    Args:
        source: the rows.
        column: holds the id.
        folder: gives the folder for the runs, which is made if it is not there; asked when reading begins.

    Raises:
        MissingExtraError: numpy is not installed.
    """

    def __init__(self, source: Source, column: str, folder: Callable[[], Path]) -> None:
        try:
            import numpy
        except ImportError as error:
            raise MissingExtraError(
                'looking for ids that come twice needs numpy: pip install "headrace[io]"; or give --id-column "" to '
                "use positions as ids"
            ) from error
        self._np: Any = numpy
        self._source = source
        self._column = column
        self._folder = folder
        self.total_bytes = source.total_bytes
        self.total_records = source.total_records

    def describe(self) -> Mapping[str, Any]:
        """The input's own description."""
        return self._source.describe()

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The source's chunks, as long as no id comes twice.

        Raises:
            JobError: one does; the message names the id and its first two places.
        """
        runs = _Runs(self._np, self._folder())
        known = runs.load()

        def next_unknown(position: int) -> int:
            # A finished row is passed over only where a run holds its id.
            return next_todo(position) if position < known else position

        for chunk in self._source.chunks(next_unknown):
            fresh = [record for record in chunk.records if record.position >= known]
            digests = [_digest(record.data.get(self._column)) for record in fresh]
            for twin in runs.add(digests):
                self._confirm(fresh[twin].data[self._column], fresh[twin].position)
            if chunk.records or chunk.failures:
                last = max(row.position for row in (*chunk.records, *(failed.record for failed in chunk.failures)))
                runs.reached(last + 1)
            yield _still_to_do(chunk, next_todo)

    def _confirm(self, identity: Any, second: int) -> None:
        """Read the input again up to the second place.

        Raises:
            JobError: the id is there before.
        """
        for chunk in self._source.chunks(lambda position: position):
            for record in chunk.records:
                if record.position >= second:
                    return  # another id with the same digest
                if str(record.data.get(self._column)) == str(identity):
                    raise JobError(
                        f"id {identity!r} comes twice: in column {self._column!r} of records {record.position} and "
                        f'{second}. Make ids unique, name another --id-column, or give --id-column "" to use positions'
                    )


def _still_to_do(chunk: Chunk, next_todo: Callable[[int], int]) -> Chunk:
    return Chunk(
        [record for record in chunk.records if next_todo(record.position) == record.position],
        [failed for failed in chunk.failures if next_todo(failed.record.position) == failed.record.position],
        chunk.bytes,
    )


def _digest(value: Any) -> bytes:
    """Eight bytes; none for what is no id."""
    if type(value) is not str and type(value) is not int:
        return b""
    return hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()


class _Runs:
    """Digests seen so far: sorted runs in files, and the newest in memory."""

    def __init__(self, np: Any, folder: Path) -> None:
        self._np = np
        self._folder = folder
        self._sorted: list[Any] = []
        self._spans: list[tuple[int, int]] = []
        self._recent: set[bytes] = set()
        self._start = self._end = 0

    def load(self) -> int:
        """Take up the runs of earlier readings; returns the first position they do not hold."""
        self._folder.mkdir(parents=True, exist_ok=True)
        matches = (_RUN.fullmatch(path.name) for path in self._folder.iterdir())
        # Of two that begin alike the longer first: a kill may have left the shorter, which is merged in it.
        for start, minus_end in sorted((int(m[1]), -int(m[2])) for m in matches if m):
            if start == self._end:
                self._map(start, -minus_end)
                self._start = self._end = -minus_end
        return self._end

    def add(self, digests: list[bytes]) -> list[int]:
        """Take more, in the order of their positions; returns which of them were there before."""
        np, recent = self._np, self._recent
        suspects: list[int] = []
        for number, digest in enumerate(digests):
            if digest in recent:
                suspects.append(number)
            elif digest:
                recent.add(digest)
        if self._sorted and digests:
            keys = np.frombuffer(b"".join(digest or bytes(8) for digest in digests), np.uint64)
            for run in self._sorted:
                places = np.minimum(np.searchsorted(run, keys), len(run) - 1)
                suspects += [int(n) for n in np.flatnonzero(run[places] == keys) if digests[n]]
        return sorted(suspects)

    def reached(self, end: int) -> None:
        """All ids before position `end` have been taken; makes a run of them when there are enough."""
        self._end = max(self._end, end)
        if len(self._recent) < RUN_RECORDS:
            return
        np = self._np
        self._write(self._start, self._end, np.frombuffer(b"".join(self._recent), np.uint64))
        self._recent = set()
        self._start = self._end
        small = [run for run in self._sorted if len(run) < RUN_RECORDS * MERGED_RUNS]
        if len(small) == MERGED_RUNS:
            spans = self._spans[-MERGED_RUNS:]
            del self._sorted[-MERGED_RUNS:], self._spans[-MERGED_RUNS:]
            self._write(spans[0][0], spans[-1][1], np.concatenate(small))
            for start, stop in spans:
                self._path(start, stop).unlink()

    def _write(self, start: int, end: int, digests: Any) -> None:
        with atomic_file(self._path(start, end)) as file:
            file.write(self._np.sort(digests).tobytes())
        self._map(start, end)

    def _map(self, start: int, end: int) -> None:
        self._sorted.append(self._np.memmap(self._path(start, end), self._np.uint64, "r"))
        self._spans.append((start, end))

    def _path(self, start: int, end: int) -> Path:
        return self._folder / f"ids-{start:012d}-{end:012d}.u64"
