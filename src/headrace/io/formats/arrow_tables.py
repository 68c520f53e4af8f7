"""Tables that are held in memory, or as batches of a file, as chunks: in rows, or in columns, made slice by slice."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.errors import tried
from headrace.extras import lazy
from headrace.io.base import Chunk
from headrace.io.formats.cells import rows_of
from headrace.io.storage.row_tables import TABLE_ROWS, RowMaker, SourceTable
from headrace.io.storage.rows import CHUNK_BYTES, CHUNK_ROWS, positions_todo, share, todo
from headrace.records import outer

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
else:
    numpy = lazy("numpy")

_CROWD = 16
"""Odd rows come in crowds, and each call of a library takes its time: some are made together."""
_GROWTH = 4
"""How many times longer than the last a slice may be: its bytes are known when it is made."""


class HeldTable(RowMaker):
    """Rows of a table in memory, counted from 0."""

    names: Sequence[str]
    """The names of its columns."""
    typed = True
    """As in `headrace.columns.RowTable`."""
    crowd = _CROWD

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, start: int, stop: int) -> Sequence[object]:
        """The rows start..stop-1 as Python objects, each a dict, or what else a record can be made of."""

    @abstractmethod
    def columns(self, names: Sequence[str], start: int, stop: int) -> Mapping[str, pa.Array | None]:
        """The values of these columns, exactly those of the rows; None for one that Arrow cannot hold as it is."""

    def rows_at(self, places: Sequence[int]) -> list[object]:
        found, start = list[object](), 0
        while start < len(places):
            first = places[start]
            stop = bisect_left(places, first + self.together, start)
            rows = self.rows(first, places[stop - 1] + 1)
            found += [rows[place - first] for place in places[start:stop]]
            start = stop
        return found

    def lacks(self, name: str, column: pa.Array | None) -> bool:  # noqa: ARG002 - others need it
        return name not in self.names


class HeldArrow(HeldTable):
    """The rows of an Arrow table or record batch.

    Args:
        number: of its first row in what it belongs to, which is `shown` in messages.
        whole: adds the columns that were not read to rows from such a number on; None if there are none.
    """

    def __init__(
        self,
        table: pa.Table | pa.RecordBatch,
        number: int = 0,
        shown: str = "the table",
        whole: Callable[[pa.RecordBatch, int], pa.RecordBatch] | None = None,
    ) -> None:
        self.names: Sequence[str] = table.schema.names
        self.crowd = _CROWD if whole is None else 1  # the columns that were not read may be large
        self._table = table
        self._number = number
        self._shown = shown
        self._whole = whole

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def together(self) -> int:
        return max(1, min(CHUNK_ROWS, CHUNK_BYTES * len(self) // max(1, int(self._table.nbytes))))

    def rows(self, start: int, stop: int) -> list[dict[str, object]]:
        part, number, rows = self._table.slice(start, stop - start), self._number + start, list[dict[str, object]]()
        for batch in part.to_batches() if hasattr(part, "to_batches") else [part]:
            rows += rows_of(batch if self._whole is None else self._whole(batch, number), self._shown, number)
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


def chunks_of(  # noqa: PLR0913 - keyword-only, and each caller leaves some of them out
    held: HeldTable,
    base: int,
    next_todo: Callable[[int], int],
    names: Sequence[str] | None,
    *,
    rows: int = CHUNK_ROWS,
    known: int = 0,
    size: int = 0,
) -> Iterator[Chunk]:
    """The rows that are not done: 512 together; in columns about 4 MiB, and at most 32,768.

    Args:
        base: the position of the first row.
        names: the columns that the job uses, empty for all; None for rows.
        rows: how many the first slice in columns has.
        known: rows at lower positions are left out.
        size: bytes of the table in the input.
    """
    total, stop, told = len(held), max(0, known - base), 0
    used = [name for name in held.names if not names or name in names or name in map(outer, names)]
    while (first := max(stop, next_todo(base + stop) - base)) < total:
        start = first if stop or total > rows else 0  # any row of a batch keeps all of it in memory, which must count
        stop = min(start + rows, total)
        columns = {} if names is None else held.columns(used, start, stop)
        sound = {name: column for name, column in columns.items() if column is not None and _is_valid(column)}
        if not sound:
            rows = held.together
            stop = min(first + rows, total)
            positions = todo(base + first, base + stop, next_todo)
            made = held.rows_at([position - base for position in positions])
            yield Chunk.of(map(held.record, positions, made), share(size, told, stop, total))
            told = stop
            continue
        places = numpy.arange(start, stop)
        table = SourceTable(places + base, places, held, sound, held.typed)
        portion = max(1, CHUNK_BYTES * len(table) // max(1, table.nbytes))
        left = positions_todo(base + first, base + stop, next_todo) - (base + start)
        if len(left) < len(table):
            table = table.only(left)
        read, told = share(size, told, stop, total), stop
        for row in range(0, len(table), portion):
            part = table.slice(row, row + portion)
            yield Chunk(part, (), share(read, row, row + len(part), len(table)), table=part)
        rows = min(TABLE_ROWS, _GROWTH * rows, portion)
    if (rest := share(size, told, total, total)) or not stop:
        yield Chunk((), (), rest)  # the reader of a stream without an end may end here


def _is_valid(column: pa.Array) -> bool:
    """Whether its text is UTF-8."""
    return not isinstance(tried(lambda: column.validate(full=True)), Exception)
