"""Boundaries of Parquet row groups, which depend only on the rows, not on how they were read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.extras import lazy
from headrace.io.formats.arrow_memory import lengths_of, numbers_of

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray
else:
    numpy, pa = lazy("numpy"), lazy("pyarrow")

_UNKNOWN_BYTES = 64
"""Assumed size of a value whose type has no known size."""


class RowGroups:
    """Divides a stream of rows into groups by bytes and rows; a larger row forms a separate group."""

    def __init__(self, most_bytes: int, most_rows: int) -> None:
        self._most_bytes = most_bytes
        self._most_rows = most_rows
        self._bytes = self._rows = 0

    def ends(self, sizes: NDArray[numpy.int64]) -> Iterator[int]:
        """The indices after which groups end, from the sizes of the next rows in bytes."""
        total = numpy.concatenate(([0], numpy.cumsum(sizes)))
        start = 0
        while True:
            room = total[start] + self._most_bytes - self._bytes
            end = int(numpy.searchsorted(total, room, "right")) - 1
            end = min(max(end, start), start + self._most_rows - self._rows)
            if end == start and not self._rows and start < len(sizes):
                end = start + 1
            full = end < len(sizes) or self._rows + end - start >= self._most_rows
            if not full:
                self._rows += end - start
                self._bytes += int(total[end] - total[start])
                return
            yield end
            self._bytes = self._rows = 0
            start = end


def row_bytes(batch: pa.RecordBatch) -> NDArray[numpy.int64]:
    """The size of each row of a record batch in bytes; lists count by their values, without offsets."""
    sizes = numpy.zeros(batch.num_rows, numpy.int64)
    for column in batch.columns:
        sizes += _value_bytes(column)
    return sizes


def _value_bytes(array: pa.Array) -> NDArray[numpy.int64]:
    """The size of each value of an array."""
    kind, count = array.type, len(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        values, offsets = _inner(array), numbers_of(array.offsets)
        if width := _width(values.type):
            ends: NDArray[numpy.int64] = offsets * width
        else:
            ends = numpy.concatenate(([0], numpy.cumsum(_value_bytes(values))))[offsets]
        return ends[1:] - ends[:-1]
    if pa.types.is_fixed_size_list(kind):
        if width := _width(kind.value_type):
            return numpy.full(count, kind.list_size * width, numpy.int64)
        inner = array.values.slice(array.offset * kind.list_size, count * kind.list_size)
        sums: NDArray[numpy.int64] = _value_bytes(inner).reshape(count, kind.list_size).sum(axis=1)
        return sums
    if pa.types.is_struct(kind):
        return sum((_value_bytes(field) for field in array.flatten()), numpy.zeros(count, numpy.int64))
    if (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        return lengths_of(array)
    return numpy.full(count, _width(kind) or _UNKNOWN_BYTES, numpy.int64)


def _width(kind: pa.DataType) -> int | None:
    """The bytes of each value of a type; None if they differ or are unknown."""
    try:
        bits: int = kind.bit_width
    except ValueError:
        return None
    return max(1, bits // 8)


def _inner(array: pa.Array) -> pa.Array:
    """The values that a list array's offsets refer to."""
    if pa.types.is_map(array.type):
        return pa.StructArray.from_arrays([array.keys, array.items], names=["key", "item"])
    return array.values
