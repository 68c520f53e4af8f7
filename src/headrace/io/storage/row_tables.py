"""Rows in columns, as sources give them."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, TypeAlias, overload

from headrace.io.base import Chunk
from headrace.records import Failed, Record

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.columns import RowNumbers

CHUNK_ROWS = 512
CHUNK_BYTES = 4 * 1024 * 1024
"""Maximum size of a chunk's rows, in bytes."""
TABLE_BYTES = 4 * 1024 * 1024
"""Input bytes of a table, about."""
TABLE_ROWS = 32_768
"""Maximum rows of a table."""
_LONG_ROW_BYTES = 1024
_LONG_ROWS_BYTES = 1024 * 1024
"""Bytes of a table whose rows are longer, because a job may have little memory for records."""


def fewer_if_long(most: int, rows: int, size: int) -> int:
    """The most rows of a table: `most`, or fewer if the `rows` of a text of `size` bytes are long."""
    return most if size <= rows * _LONG_ROW_BYTES else min(most, max(1, rows * _LONG_ROWS_BYTES // size))


_Slice: TypeAlias = slice  # whose name a method of the table has


class RowMaker(ABC):
    """What the rows of a table are made of, one by one."""

    crowd = 1
    """Rows that are made together where one is asked for."""

    @property
    def together(self) -> int:
        """Rows that are made at a time, of all that are wanted."""
        return CHUNK_ROWS

    @abstractmethod
    def rows_at(self, places: Sequence[int]) -> Sequence[object]:
        """The rows at these places, ascending, as Python objects."""

    @abstractmethod
    def lacks(self, name: str, column: pa.Array | None) -> bool:
        """Whether no row of a table with this column has a column of that name, for sure."""

    def record(self, position: int, row: object) -> Record | Failed:
        return Record(position, position, row)

    def bytes_at(self, places: RowNumbers) -> int:  # noqa: ARG002 - subclasses need it
        """Bytes in memory of these rows, beside their columns."""
        return 0


@dataclass(slots=True, eq=False)
class SourceTable(Sequence[Record]):
    """Rows in columns. A row is made when it is asked for, and again when it is asked for again.

    Args:
        places: of the rows in `maker`, ascending.
        columns: their values; none, or None, for a column that was not asked for or that Arrow cannot hold as it is.
        constants: columns of one value each for the rows that lack them: an integer, a text or null.
    """

    positions: NDArray[numpy.int64]
    places: RowNumbers
    maker: RowMaker
    columns: Mapping[str, pa.Array | None]
    typed: bool
    constants: Mapping[str, object] = field(default_factory=dict)
    _left_out: float = field(default=0.0, init=False)
    """Bytes in memory of rows that were left out, for each row that was not."""
    _made: tuple[int, Sequence[Record]] = field(default=(-1, ()), init=False)
    """The first of the rows that were made last, and these."""

    @property
    def nbytes(self) -> int:
        arrays = sum(int(column.nbytes) for column in self.columns.values() if column is not None)
        return self.positions.nbytes + arrays + self.maker.bytes_at(self.places) + int(self._left_out * len(self))

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> pa.Array | None:
        """The values of a column; None for a null constant, or for one that some rows have a value of their own for."""
        if name not in self.constants:
            return self.columns.get(name)
        value = self.constants[name]
        if value is None or not self.maker.lacks(name, self.columns.get(name)):
            return None
        import pyarrow

        return pyarrow.repeat(pyarrow.scalar(value), len(self))

    def lacks(self, name: str) -> bool:
        """Whether no row has the column, for sure."""
        return name not in self.constants and self.maker.lacks(name, self.columns.get(name))

    def record(self, row: int) -> Record:
        first = row - row % self.maker.crowd
        start, records = self._made
        if start != first:
            records = list(self.slice(first, first + self.maker.crowd))
            self._made = first, records
        return records[row - first]

    @overload
    def __getitem__(self, row: int, /) -> Record: ...
    @overload
    def __getitem__(self, row: _Slice, /) -> SourceTable: ...
    def __getitem__(self, row: int | _Slice, /) -> Record | SourceTable:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice of rows has no step, and this one has {step}")
            return self.slice(start, max(start, stop))
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.record(row % len(self))

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), self.maker.together):
            part = slice(start, start + self.maker.together)
            rows = self.maker.rows_at(self.places[part].tolist())
            for record in Chunk.of(map(self.maker.record, self.positions[part].tolist(), rows), 0).records:
                for name, value in self.constants.items():
                    record.data.setdefault(name, value)
                yield record

    def slice(self, start: int, stop: int) -> Self:
        columns = {name: None if column is None else column[start:stop] for name, column in self.columns.items()}
        return self._part(slice(start, stop), columns, self._left_out)

    def only(self, rows: RowNumbers) -> Self:
        """Some of the rows, ascending. The others stay in memory, for `maker` may need what holds them all."""
        columns = {name: None if column is None else _taken(column, rows) for name, column in self.columns.items()}
        return self._part(rows, columns, self.nbytes / max(1, len(rows)))

    def _part(self, rows: _Slice | RowNumbers, columns: Mapping[str, pa.Array | None], left_out: float) -> Self:
        part = replace(self, positions=self.positions[rows], places=self.places[rows], columns=columns)
        part._left_out = left_out
        return part


def _taken(column: pa.Array, rows: RowNumbers) -> pa.Array:
    import pyarrow

    try:
        return column.take(rows)
    except pyarrow.ArrowException:  # a type without this function, such as a string view
        return pyarrow.concat_arrays([column[row : row + 1] for row in rows.tolist()])


def has_arrow() -> bool:
    """Whether pyarrow and NumPy are installed, which tables need."""
    return all(importlib.util.find_spec(module) is not None for module in ("numpy", "pyarrow"))
