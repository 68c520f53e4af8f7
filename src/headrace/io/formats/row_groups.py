"""Where a row group of Parquet ends: after so many bytes, by the rows alone and not by how they were read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_UNKNOWN_BYTES = 64
"""What a value is reckoned as whose type has no known size."""


class RowGroups:
    """Cuts a stream of rows into groups of at most so many bytes and rows; a longer row is a group of its own."""

    def __init__(self, most_bytes: int, most_rows: int) -> None:
        self._most_bytes = most_bytes
        self._most_rows = most_rows
        self._bytes = self._rows = 0

    def ends(self, sizes: Any) -> Iterator[int]:
        """Behind which of the next rows a group ends, by their sizes in bytes (an array of integers)."""
        import numpy

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


def row_bytes(batch: Any) -> Any:
    """How long each row of a record batch is, as a numpy array; what a list holds counts, not the list's own place."""
    import numpy

    sizes = numpy.zeros(batch.num_rows, numpy.int64)
    for column in batch.columns:
        sizes += _value_bytes(column)
    return sizes


def _value_bytes(array: Any) -> Any:
    """The size of each value of an array."""
    import numpy
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, count = array.type, len(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        inner = numpy.concatenate(([0], numpy.cumsum(_value_bytes(_inner(array)))))
        offsets = array.offsets.to_numpy()
        return inner[offsets[1:]] - inner[offsets[:-1]]
    if pa.types.is_fixed_size_list(kind):
        inner = array.values.slice(array.offset * kind.list_size, count * kind.list_size)
        return _value_bytes(inner).reshape(count, kind.list_size).sum(axis=1)
    if pa.types.is_struct(kind):
        return sum((_value_bytes(field) for field in array.flatten()), numpy.zeros(count, numpy.int64))
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False).astype(numpy.int64)
    try:
        width = max(1, kind.bit_width // 8)
    except ValueError:
        width = _UNKNOWN_BYTES
    return numpy.full(count, width, numpy.int64)


def _inner(array: Any) -> Any:
    """What a list array's offsets count in."""
    import pyarrow as pa

    if pa.types.is_map(array.type):
        return pa.StructArray.from_arrays([array.keys, array.items], names=["key", "item"])
    return array.values
