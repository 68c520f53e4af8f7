"""The interfaces of inputs and outputs of a job."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

from headrace.columns import FinishedRows, RowTable
from headrace.records import Failed, LeftOut, Ok, Record


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of the input, read together."""

    records: Sequence[Record]
    failures: Sequence[Failed]
    """Rows that could not be read as records; each has its position."""
    bytes: int
    """Input bytes of this chunk, including skipped rows."""
    left_out: Sequence[LeftOut] = ()
    """Names that are not read, such as hidden files in an archive."""
    in_order: bool = False
    """Whether neighbours begin alike, so that the engine gets them in this order, not the longest first."""
    table: RowTable | None = None
    """The same rows as `records`, in columns, if the source was asked for columns and can give them."""

    @classmethod
    def of(cls, rows: Iterable[Record | Failed], size: int) -> Chunk:
        """A chunk of these rows, from `size` bytes of the input."""
        rows = list(rows)
        records = [row for row in rows if isinstance(row, Record)]
        return cls(records, [row for row in rows if isinstance(row, Failed)], size)

    @property
    def rows(self) -> int:
        """How many rows there are, those that could not be read among them."""
        return len(self.records) + len(self.failures)

    def split(self, rows: int) -> tuple[Chunk, Chunk]:
        """Its first records with the failures before the next one, and the rest; each has its share of the bytes."""
        table, count = self.table, len(self.records)
        size = self.bytes * rows // count if rows < count else self.bytes
        head = replace(self, records=self.records[:rows], bytes=size)
        rest = replace(self, records=self.records[rows:], failures=(), left_out=(), bytes=self.bytes - size)
        if table is None:
            return head, rest
        end = int(table.positions[rows]) if rows < count else sys.maxsize
        early = [failed for failed in self.failures if failed.record.position < end]
        late = [failed for failed in self.failures if failed.record.position >= end]
        head = replace(head, failures=early, table=table.slice(0, rows))
        return head, replace(rest, failures=late, table=table.slice(rows, count))

    def extent(self, place: Callable[[int], int] | None) -> tuple[int, int]:
        """Position of the first row, or its place in another order, and how many there are."""
        firsts = [failed.record.position for failed in self.failures[:1]]
        if self.records:
            firsts.append(self.records[0].position if self.table is None else int(self.table.positions[0]))
        places = firsts if place is None else map(place, firsts)
        return min(places, default=0), self.rows


class Source(Protocol):
    """An input that can be read repeatedly in the same order. All methods block and run on a reader thread."""

    total_bytes: int | None
    total_records: int | None

    def describe(self) -> Mapping[str, object]:
        """JSON-serializable facts that identify the content (sizes and digests, not only names)."""
        ...

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The input's rows that are not done, from the first.

        `next_todo(position)` is the first position >= its argument that is not done, so that many finished rows are
        skipped in one step. Skipped rows still give occasional empty chunks, whose bytes a progress bar counts.

        Raises:
            JobError: the rest of the input cannot be read.
        """
        ...


@runtime_checkable
class ColumnSource(Source, Protocol):
    """An input that can be read in columns."""

    def in_columns(self, names: Sequence[str]) -> Source:
        """The same input for a job that uses these columns alone: its chunks have a `table` where that is possible.

        The rows, their positions and their failures stay the same. A row may be made when it is asked for.
        """
        ...


@runtime_checkable
class _SparingSource(Protocol):
    def needing(self, names: Sequence[str]) -> Source: ...


def needing(source: Source, names: Sequence[str]) -> Source:
    """The same rows, which may lack other columns than these where those cannot be read, if the source knows how."""
    return source.needing(names) if isinstance(source, _SparingSource) else source


@runtime_checkable
class TypedSource(Protocol):
    """An input that knows its columns and their types, also without a row."""

    def columns(self) -> Mapping[str, object]:
        """The columns without rows: Arrow arrays, or None for one without a type of Arrow."""
        ...


def typed_columns(source: Source) -> Mapping[str, object]:
    """The columns of an input that knows them without a row; none of another."""
    return source.columns() if isinstance(source, TypedSource) else {}


class Take(NamedTuple):
    """The next rows of several runs, and the new parts to make of them."""

    counts: Sequence[int]
    """How many rows to take of each run."""
    orders: Sequence[Sequence[int]]
    """For each new part the numbers of its rows, counted from 0 through all that were taken."""


class OutputFields(Protocol):
    """Takes the fields of outputs apart: see `headrace.io.formats.flat`."""

    def row(self, ok: Ok, /) -> Ok:
        """The record with the fields as columns. Raises RecordError."""
        ...

    def rows(self, finished: FinishedRows, /) -> FinishedRows:
        """The same of rows in columns."""
        ...


class PartWriter(ABC):
    """Encodes finished rows as the bytes of a part in one format."""

    suffix: str
    """File name ending, such as `.jsonl`."""

    nulled: int
    """NaN and infinities written as null so far, in a format without them."""

    fields: OutputFields | None = None
    """What takes the fields of outputs apart before they are encoded."""

    def encode_rows(self, outcomes: Sequence[Ok]) -> bytes:
        """The rows of one part, with the fields of their outputs as columns if asked for. Raises as `encode`."""
        return self.encode(outcomes if self.fields is None else [self.fields.row(ok) for ok in outcomes])

    def expect(self, rows: Callable[[], Sequence[Ok]]) -> None:  # noqa: ARG002 - subclasses need it
        """Learn the types of the rows from such as these, for an output that gets none. Raises Exception: it cannot."""
        return

    def check(self, *, begun: bool) -> None:
        """Check, before the job starts, that what takes the rows is there and can take them. Writes nothing.

        Args:
            begun: whether the job writes on what it has written before, or replaces rows on purpose.

        Raises:
            ConfigError: it cannot be reached, cannot take the rows, or has rows of others.
        """

    def is_gone(self) -> bool:
        """Whether the rows of earlier runs are no longer where `encode` has put them, beside the parts. May block."""
        return False

    @abstractmethod
    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The rows of one part, in the order given.

        Raises:
            JobError: the output cannot be written at all.
            Exception: some row cannot be written.
        """

    def encode_columns(self, pieces: Sequence[FinishedRows]) -> bytes | None:  # noqa: ARG002 - subclasses need it
        """The rows of one part, given in columns: the same bytes as `encode` makes of them, for formats of text.

        None if this format or these values need the rows one by one; then `encode` is called.

        Raises:
            Exception: some row cannot be written.
        """
        return None

    @abstractmethod
    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Dead letters, one JSON line each, in the order given; never fails because of a record's content."""

    merges_early = False
    """Whether `merge` takes an iterator of parts of which the next may not be there yet."""

    def merge(self, parts: Iterable[Path], target: BinaryIO) -> None:
        """Write the rows of all parts, in the order given, as one file.

        Args:
            parts: a sequence; or an iterator, if `merges_early`. An error then says only that this needs all of them.

        The content (uncompressed, every byte) depends only on the rows, not on the boundaries of parts. Memory is
        bounded. Outputs that are not files have empty parts, and nothing to merge.
        """

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """Write rows of `base` and of the parts `more` as one file, alternating by the counts in `turns`.

        The rest of `base` follows the last turn. A negative number drops rows of `more`. Memory is bounded.
        """

    def rearrange(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[bytes]:  # noqa: ARG002
        """Rows of several runs as new parts. A run is a list of parts that is read from its first row to its last.

        Needs memory for the rows of a take, and for one part of each run.
        """
        return (b"" for take in takes for _ in take.orders)

    def publish(self, parts: Callable[[], Sequence[Path]], scratch: Path) -> None:
        """Bring the parts of a finished job where they are to be, if that is not where they are. May be repeated.

        Args:
            scratch: a local folder, created on use.

        Raises:
            BrokenOffError: it has failed; the next run repeats it.
        """

    def close(self) -> None:
        """Release what writing has opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlugin:
    """An input that is no file of a known format, registered in the entry points `headrace.sources`.

    The names of its entry points say what it takes, so that nothing is imported for other inputs: `lake` is an address
    `lake://...`, `lake.Table` an object of that class of that library, `/_lake` a local folder that holds that name,
    and `__lake__` an object whose class has that method.
    """

    open: Callable[[Any, str | None], Source | None]
    """The rows of an address, folder or object, and of a query if it takes one. None if the address is no source of
    this kind, but of files. Raises ConfigError."""
    takes_query: bool = False
    """Whether its rows are those of a query, `--sql`."""
    pinned: Callable[[str, str | None], str] | None = None
    """The address of exactly what an address means now, such as with a commit; the second is the one with which the
    job that is resumed was begun, if any."""
    extra: str = ""
    """The extra of Headrace that it needs."""


def class_names(value: object) -> Iterator[str]:
    """`library.Class` of an object's class and its bases: recognizes other libraries' objects without an import."""
    for kind in type(value).__mro__:
        yield f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
