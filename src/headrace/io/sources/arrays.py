"""Rows of a NumPy array, or of a tensor of PyTorch: each stands for {"array": row}."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from headrace.io.base import Chunk
from headrace.io.sources.in_memory import ARRAY, SequenceSource
from headrace.io.storage.row_tables import TABLE_BYTES, TABLE_ROWS, LazyRecords
from headrace.io.storage.rows import positions_todo
from headrace.records import Record

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray


def array_of(rows: object) -> NDArray[numpy.generic] | None:
    """The array of numbers that rows are, without a copy; None if they are none."""
    found = rows
    if callable(detach := getattr(rows, "detach", None)):  # a tensor
        found = detach().cpu().numpy()
    kind = getattr(getattr(found, "dtype", None), "kind", "")
    is_array = type(found).__module__.partition(".")[0] == "numpy" and getattr(found, "ndim", 0) > 0
    return cast("NDArray[numpy.generic]", found) if is_array and kind and kind in "biuf" else None


class ArraySource(SequenceSource):
    """The rows of an array of numbers, of one dimension or more."""

    def __init__(self, array: NDArray[numpy.generic]) -> None:
        super().__init__(array)  # type: ignore[arg-type]  # it has a length, and rows by number
        self._array = array

    def in_columns(self, names: Sequence[str]) -> _ArrayColumns | ArraySource:
        """The same rows in tables, whose column refers to the array."""
        return _ArrayColumns(self._array) if ARRAY in names else self


class _ArrayColumns(ArraySource):
    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of about 1 MiB."""
        total = len(self._array)
        rows = min(max(1, TABLE_BYTES * total // max(self._array.nbytes, 1)), TABLE_ROWS)
        for start in range(0, total, rows):
            positions = positions_todo(start, min(start + rows, total), next_todo)
            if len(positions):
                table = ArrayTable(self._array, positions)
                yield Chunk(LazyRecords(table), (), 0, table=table)
            else:
                yield Chunk((), (), 0)


@dataclass(slots=True)
class ArrayTable:
    array: NDArray[numpy.generic]
    positions: NDArray[numpy.int64]
    typed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those of the array not counted."""
        return self.positions.nbytes

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> pa.Array | None:
        """The rows as lists of a fixed size."""
        if name != ARRAY:
            return None
        import numpy
        import pyarrow

        first, last = int(self.positions[0]), int(self.positions[-1]) + 1
        is_whole = last - first == len(self.positions)
        rows = numpy.ascontiguousarray(self.array[first:last] if is_whole else self.array[self.positions])
        column = pyarrow.array(rows.reshape(-1))
        for size in reversed(rows.shape[1:]):
            column = pyarrow.FixedSizeListArray.from_arrays(column, size)
        return column

    def lacks(self, name: str) -> bool:
        return name != ARRAY

    def record(self, row: int) -> Record:
        position = int(self.positions[row])
        return Record(position, position, {ARRAY: self.array[position]})

    def records(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))

    def slice(self, start: int, stop: int) -> ArrayTable:
        return ArrayTable(self.array, self.positions[start:stop])
