"""Record batches as chunks: as rows of Python objects, or as tables whose columns stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import tried
from headrace.io.base import Chunk
from headrace.io.formats.cells import rows_of, taken
from headrace.io.storage.row_tables import TABLE_ROWS, LazyRecords
from headrace.io.storage.rows import CHUNK_BYTES, CHUNK_ROWS, positions_todo, share, todo
from headrace.records import Record

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.columns import RowNumbers

    Whole: TypeAlias = Callable[[pa.RecordBatch, int], pa.RecordBatch]


@dataclass(slots=True)
class ArrowTable:
    """Rows of a record batch.

    Args:
        places: of the rows in the batch.
        shown: what the batch is from, for messages.
        number: the place of its first row there, counted from 0.
        whole: adds the columns that were not read to rows from such a place on.
    """

    positions: NDArray[numpy.int64]
    batch: pa.RecordBatch
    places: RowNumbers
    shown: str
    number: int
    whole: Whole
    typed: bool = True

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes) + self.positions.nbytes + self.places.nbytes

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> pa.Array | None:
        """The values of a column; None if there is no such column, or if it has text that is not UTF-8."""
        if self.lacks(name):
            return None
        column = self.batch.column(name)
        if not self._is_whole:
            column = taken(column, self.places.tolist())
        return None if isinstance(tried(lambda: column.validate(full=True)), Exception) else column

    def lacks(self, name: str) -> bool:
        return name not in self.batch.schema.names

    def record(self, row: int) -> Record:
        place, position = int(self.places[row]), int(self.positions[row])
        [data] = rows_of(self.whole(self.batch.slice(place, 1), self.number + place), self.shown, self.number + place)
        return Record(position, position, data)

    def records(self) -> Iterator[Record]:
        rows = rows_of(self.whole(self.batch, self.number), self.shown, self.number, self.places.tolist())
        for position, row in zip(self.positions.tolist(), rows, strict=True):
            yield Record(position, position, row)

    def slice(self, start: int, stop: int) -> ArrowTable:
        positions, places = self.positions[start:stop], self.places[start:stop]
        if not len(places):
            return replace(self, positions=positions, batch=self.batch.slice(0, 0), places=places)
        first, last = int(places[0]), int(places[-1])
        batch = self.batch.slice(first, last + 1 - first)
        return replace(self, positions=positions, batch=batch, places=places - first, number=self.number + first)

    @property
    def _is_whole(self) -> bool:
        return len(self.places) == int(self.batch.num_rows)


@dataclass(frozen=True, slots=True)
class Slicer:
    """Makes chunks of the record batches of a table.

    Args:
        shown: what the table is, for messages.
        next_todo: see `headrace.io.base.Source.chunks`.
        in_columns: whether chunks have a `table`.
        whole: see `ArrowTable`.
    """

    shown: str
    next_todo: Callable[[int], int]
    in_columns: bool = False
    whole: Whole = lambda batch, _: batch

    @property
    def most_rows(self) -> int:
        """Maximum rows of a chunk."""
        return TABLE_ROWS if self.in_columns else CHUNK_ROWS

    def chunks(self, batch: pa.RecordBatch, first: int, number: int, size: int) -> Iterator[Chunk]:
        """A record batch as chunks of about 4 MiB or less.

        Args:
            first: the position of its first row.
            number: the place of its first row in the table, counted from 0.
            size: its bytes in the input.
        """
        total = batch.num_rows
        rows = max(1, min(self.most_rows, CHUNK_BYTES * total // max(1, batch.nbytes)))
        for start in range(0, total, rows):
            part, stop = batch.slice(start, rows), min(start + rows, total)
            bytes_read = share(size, start, stop, total)
            if not self.in_columns:
                yield Chunk(self._rows(part, first + start, number + start), (), bytes_read)
                continue
            positions = positions_todo(first + start, first + stop, self.next_todo)
            table = ArrowTable(positions, part, positions - (first + start), self.shown, number + start, self.whole)
            yield Chunk(LazyRecords(table), (), bytes_read, table=table) if len(table) else Chunk((), (), bytes_read)

    def _rows(self, batch: pa.RecordBatch, first: int, number: int) -> list[Record]:
        positions = todo(first, first + batch.num_rows, self.next_todo)
        places = [position - first for position in positions]
        rows = rows_of(self.whole(batch, number), self.shown, number, places) if places else ()
        return [Record(position, position, row) for position, row in zip(positions, rows, strict=True)]
