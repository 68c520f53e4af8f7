"""Rows in columns, as sources give them: what all kinds of `RowTable` share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, overload, runtime_checkable

from headrace.columns import RowTable
from headrace.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

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


class LazyRecords(Sequence[Record]):
    """The rows of a table, each made when it is asked for, and again when it is asked for again."""

    def __init__(self, table: SourceTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, place: int, /) -> Record: ...
    @overload
    def __getitem__(self, place: slice, /) -> LazyRecords: ...
    def __getitem__(self, place: int | slice, /) -> Record | LazyRecords:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self._table))
            if step != 1:
                raise ValueError(f"a slice of rows has no step, and this one has {step}")
            return LazyRecords(self._table.slice(start, max(start, stop)))
        row = place + len(self._table) if place < 0 else place
        if not 0 <= row < len(self._table):
            raise IndexError(f"row {place} of {len(self._table)}")
        return self._table.record(row)

    def __iter__(self) -> Iterator[Record]:
        return self._table.records()


@runtime_checkable
class SourceTable(RowTable, Protocol):
    """A table of a file, which can tell whether a column is in none of its rows."""

    def lacks(self, name: str) -> bool:
        """Whether no row has the column, for sure."""
        ...

    def records(self) -> Iterator[Record]:
        """All rows, for less than one by one."""
        ...


class WithConstants:
    """The rows of a table, with columns of one value each for the rows that lack them.

    Args:
        constants: integers, texts or null, by column.
    """

    def __init__(self, table: SourceTable, constants: Mapping[str, object]) -> None:
        self._table = table
        self._constants = constants
        self.positions = table.positions
        self.typed = table.typed

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> pa.Array | None:
        """The values of a column; None for a null constant, or for one that some rows have a value of their own for."""
        if name not in self._constants:
            return self._table.column(name)
        if self._constants[name] is None or not self._table.lacks(name):
            return None
        import pyarrow

        return pyarrow.repeat(pyarrow.scalar(self._constants[name]), len(self))

    def lacks(self, name: str) -> bool:
        return name not in self._constants and self._table.lacks(name)

    def record(self, row: int) -> Record:
        return self._completed(self._table.record(row))

    def records(self) -> Iterator[Record]:
        return map(self._completed, self._table.records())

    def _completed(self, record: Record) -> Record:
        for name, value in self._constants.items():
            record.data.setdefault(name, value)
        return record

    def slice(self, start: int, stop: int) -> WithConstants:
        return WithConstants(self._table.slice(start, stop), self._constants)


def has_arrow() -> bool:
    """Whether pyarrow and NumPy are installed, which tables need."""
    return all(importlib.util.find_spec(module) is not None for module in ("numpy", "pyarrow"))
