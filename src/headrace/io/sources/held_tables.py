"""Tables that a library holds in memory, and streams of them: in rows, or in columns, which are made slice by slice."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, cast

from headrace.errors import tried
from headrace.io.base import Chunk, Source
from headrace.io.formats.cells import rows_of, taken
from headrace.io.sources.in_memory import HEAD_ROWS, IterableSource, chunk_of, digest_of
from headrace.io.storage.row_tables import TABLE_ROWS, LazyRecords, has_arrow
from headrace.io.storage.rows import CHUNK_BYTES, CHUNK_ROWS, positions_todo, todo
from headrace.records import Record, outer

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray


_DIGESTED_RUNS = 64
_RUN_ROWS = 16
_CROWD = 16
"""Odd rows come in crowds, and each call of a library takes its time: some are made together."""
_GROWTH = 4
"""How many times longer than the last a slice may be: its bytes are known when it is made."""


class HeldTable(Protocol):
    """Rows of a table in memory, counted from 0."""

    names: Sequence[str]
    """The names of its columns."""
    typed: bool
    """As in `headrace.columns.RowTable`."""

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Sequence[object]:
        """The rows start..stop-1 as Python objects, each a dict, or what else a record can be made of."""
        ...

    def columns(self, names: Sequence[str], start: int, stop: int) -> Mapping[str, pa.Array | None]:
        """The values of these columns, exactly those of the rows; None for one that Arrow cannot hold as it is."""
        ...


class HeldArrow:
    """The rows of an Arrow table or record batch.

    Args:
        number: of its first row in what it belongs to, which is `shown` in messages.
    """

    typed = True

    def __init__(self, table: pa.Table | pa.RecordBatch, number: int = 0, shown: str = "the table") -> None:
        self.names: Sequence[str] = table.schema.names
        self._table = table
        self._number = number
        self._shown = shown

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def rows(self, start: int, stop: int) -> list[dict[str, object]]:
        part, number, rows = self._table.slice(start, stop - start), self._number + start, list[dict[str, object]]()
        for batch in part.to_batches() if hasattr(part, "to_batches") else [part]:
            rows += rows_of(batch, self._shown, number)
            number += batch.num_rows
        return rows

    def columns(self, names: Sequence[str], start: int, stop: int) -> dict[str, pa.Array | None]:
        part = self._table.slice(start, stop - start)
        return {name: as_one(part.column(name)) for name in names}


def as_one(column: pa.Array | pa.ChunkedArray) -> pa.Array | None:
    """The values as one array; None if their chunks cannot be joined."""
    if not hasattr(column, "chunks"):
        return column
    joined = column.chunk(0) if column.num_chunks == 1 else tried(column.combine_chunks)
    return None if isinstance(joined, Exception) or hasattr(joined, "chunks") else joined


@dataclass(slots=True)
class HeldRows:
    """Rows of a table in memory.

    Args:
        base: the position of the table's first row.
        made: the columns that the job uses and Arrow can hold.
    """

    positions: NDArray[numpy.int64]
    held: HeldTable
    base: int
    made: Mapping[str, pa.Array]
    typed: bool
    read: tuple[int, Sequence[Record]] = (-1, ())
    """The rows that were made last, and the first of them."""

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + sum(int(column.nbytes) for column in self.made.values())

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> pa.Array | None:
        return self.made.get(name)

    def lacks(self, name: str) -> bool:
        return name not in self.held.names

    def record(self, row: int) -> Record:
        first = row - row % _CROWD
        start, records = self.read
        if start != first:
            records = list(self.slice(first, first + _CROWD).records())
            self.read = first, records
        return records[row - first]

    def records(self) -> Iterator[Record]:
        positions, start = self.positions.tolist(), 0
        while start < len(positions):
            stop = bisect_left(positions, positions[start] + CHUNK_ROWS, start)
            yield from _in_rows(self.held, self.base, positions[start:stop]).records
            start = stop

    def slice(self, start: int, stop: int) -> HeldRows:
        made = {name: column[start:stop] for name, column in self.made.items()}
        return HeldRows(self.positions[start:stop], self.held, self.base, made, self.typed)


def chunks_of(
    held: HeldTable,
    base: int,
    next_todo: Callable[[int], int],
    names: Sequence[str] | None,
    rows: int = CHUNK_ROWS,
    known: int = 0,
) -> Iterator[Chunk]:
    """The rows that are not done: 512 together; in columns about 4 MiB, and at most 32,768.

    Args:
        base: the position of the first row.
        names: the columns that the job uses, empty for all; None for rows.
        rows: how many the first slice in columns has.
        known: rows at lower positions are left out.
    """
    total, stop = len(held), max(0, known - base)
    used = [name for name in held.names if not names or name in names or name in map(outer, names)]
    while (start := max(stop, next_todo(base + stop) - base)) < total:
        stop = min(start + rows, total)
        columns = {} if names is None else held.columns(used, start, stop)
        sound = {name: column for name, column in columns.items() if column is not None and _is_valid(column)}
        if not sound:
            rows, stop = CHUNK_ROWS, min(start + CHUNK_ROWS, total)
            yield _in_rows(held, base, todo(base + start, base + stop, next_todo))
            continue
        positions = positions_todo(base + start, base + stop, next_todo)
        places = (positions - (base + start)).tolist() if len(positions) < stop - start else None
        made = {name: column if places is None else taken(column, places) for name, column in sound.items()}
        table = HeldRows(positions, held, base, made, held.typed)
        portion = max(1, CHUNK_BYTES * len(table) // max(1, table.nbytes))
        for first in range(0, len(table), portion):
            part = table.slice(first, first + portion)
            yield Chunk(LazyRecords(part), (), 0, table=part)
        rows = min(TABLE_ROWS, _GROWTH * rows, portion)
    if not stop:
        yield Chunk((), (), 0)  # the reader of a stream without an end may end here


def _is_valid(column: pa.Array) -> bool:
    """Whether its text is UTF-8."""
    return not isinstance(tried(lambda: column.validate(full=True)), Exception)


def _in_rows(held: HeldTable, base: int, positions: Sequence[int]) -> Chunk:
    first = positions[0] - base
    rows = held.rows(first, positions[-1] + 1 - base)
    return chunk_of((position, rows[position - base - first]) for position in positions)


class TableSource:
    """A table in memory. It is identified by its length and 1,024 of its rows.

    Args:
        kind: the library's name.
    """

    _names: Sequence[str] | None = None
    """The columns that are asked for; None for rows."""

    def __init__(self, kind: str, held: HeldTable) -> None:
        self._kind = kind
        self._held = held
        self.total_bytes: int | None = None
        self.total_records: int | None = len(held)

    def describe(self) -> Mapping[str, object]:
        total = len(self._held)
        runs = min(_DIGESTED_RUNS, -(-total // _RUN_ROWS))
        starts = sorted({number * max(0, total - _RUN_ROWS) // max(1, runs - 1) for number in range(runs)})
        rows = (row for start in starts for row in self._held.rows(start, min(start + _RUN_ROWS, total)))
        return {"format": self._kind, "records": total, "blake2b": digest_of(rows)}

    def columns(self) -> Mapping[str, pa.Array | None]:
        return self._held.columns(self._held.names, 0, 0)

    def in_columns(self, names: Sequence[str]) -> Self:
        """The same rows, in columns; in rows if pyarrow or NumPy is not installed."""
        source = copy.copy(self)
        source._names = names if has_arrow() else None
        return source

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        return chunks_of(self._held, 0, next_todo, self._names)


class StreamSource(IterableSource):
    """Tables that come one after the other: an iterator, or a function that returns one."""

    def describe(self) -> Mapping[str, object]:
        rows: list[object] = []
        for held in self._tables(self._head):
            rows += held.rows(0, min(len(held), HEAD_ROWS - len(rows)))
        return {"format": "iterable", "first_records": len(rows), "blake2b": digest_of(rows)}

    def in_columns(self, names: Sequence[str]) -> Source:
        """The same rows, in columns; in rows if pyarrow or NumPy is not installed."""
        return _StreamColumns(self, names) if has_arrow() else self

    def chunks(self, next_todo: Callable[[int], int], names: Sequence[str] | None = None) -> Iterator[Chunk]:
        """The rows of all tables that are not done: `chunks_of` each."""
        start = 0
        for held in self._tables(self._head):
            yield from chunks_of(held, start, next_todo, names, TABLE_ROWS)
            start += len(held)
        known = start
        if self._read_anew():
            start = 0
        for held in self._tables(self._reading):
            yield from chunks_of(held, start, next_todo, names, TABLE_ROWS, known)
            start += len(held)

    def _first(self) -> list[object]:
        """The first tables of a reading."""
        head: list[object] = []
        rows = 0
        for held in self._tables(self._reading):
            head.append(held)
            rows += len(held)
            if rows >= HEAD_ROWS:
                break
        return head

    def _tables(self, items: Iterable[object]) -> Iterator[HeldTable]:
        return iter(cast("Iterable[HeldTable]", items))


@dataclass
class _StreamColumns:
    stream: StreamSource
    names: Sequence[str]
    total_bytes: int | None = None
    total_records: int | None = None

    def describe(self) -> Mapping[str, object]:
        """As the stream."""
        return self.stream.describe()

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The chunks of the stream, in columns."""
        return self.stream.chunks(next_todo, self.names)
