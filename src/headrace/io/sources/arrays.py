"""Rows of a NumPy array, or of a tensor of PyTorch: each stands for {"array": row}."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from headrace.io.base import Chunk
from headrace.io.sources.in_memory import ARRAY, SequenceSource
from headrace.io.storage.row_tables import TABLE_BYTES, TABLE_ROWS, RowMaker, SourceTable
from headrace.io.storage.rows import positions_todo

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
        total, maker = len(self._array), _ArrayRows(self._array)
        rows = min(max(1, TABLE_BYTES * total // max(self._array.nbytes, 1)), TABLE_ROWS)
        for start in range(0, total, rows):
            positions = positions_todo(start, min(start + rows, total), next_todo)
            if len(positions):
                table = ArrayTable(positions, positions, maker, {ARRAY: maker.column(positions)}, typed=False)
                yield Chunk(table, (), 0, table=table)
            else:
                yield Chunk((), (), 0)


class _ArrayRows(RowMaker):
    def __init__(self, array: NDArray[numpy.generic]) -> None:
        self._array = array

    def rows_at(self, places: Sequence[int]) -> list[dict[str, object]]:
        return [{ARRAY: self._array[place]} for place in places]

    def lacks(self, name: str, column: pa.Array | None) -> bool:  # noqa: ARG002 - others need it
        return name != ARRAY

    def column(self, positions: NDArray[numpy.int64]) -> pa.Array:
        """Some rows as lists of a fixed size."""
        import numpy
        import pyarrow

        first, last = int(positions[0]), int(positions[-1]) + 1
        is_whole = last - first == len(positions)
        rows = numpy.ascontiguousarray(self._array[first:last] if is_whole else self._array[positions])
        column = pyarrow.array(rows.reshape(-1))
        for size in reversed(rows.shape[1:]):
            column = pyarrow.FixedSizeListArray.from_arrays(column, size)
        return column


class ArrayTable(SourceTable):
    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those of the array not counted."""
        return self.positions.nbytes
