"""Arrow arrays over existing memory: `pyarrow.array` imports pandas, which takes as long as a short job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.extras import lazy

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray
else:
    numpy, pa = lazy("numpy"), lazy("pyarrow")


def of_numbers(numbers: NDArray[numpy.generic]) -> pa.Array:
    """The integers or floats of an array of one dimension."""
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(
        kind, len(numbers), [None, pa.py_buffer(numpy.ascontiguousarray(numbers).view(numpy.uint8))]
    )


def numbers_of(array: pa.Array) -> NDArray[numpy.int64]:
    """The integers of an array, of 32 or 64 bits, without nulls."""
    content = array.buffers()[1]
    found = numpy.frombuffer(content or b"", f"i{array.type.byte_width}")[array.offset : array.offset + len(array)]
    return found.astype(numpy.int64, copy=False)


def lengths_of(array: pa.Array) -> NDArray[numpy.int64]:
    """The bytes of each value of an array of texts or of bytes; any number for a null."""
    wide = str(array.type).startswith("large_")
    ends = numpy.frombuffer(array.buffers()[1] or bytes(8), numpy.int64 if wide else numpy.int32)
    return numpy.diff(ends[array.offset : array.offset + len(array) + 1]).astype(numpy.int64, copy=False)


def of_text(text: bytes, bounds: NDArray[numpy.int64]) -> pa.Array:
    """The pieces of a text, as bytes: where the first begins, and where each ends."""
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)


def of_pieces(pieces: Sequence[bytes]) -> pa.Array:
    """Some bytes each."""
    bounds = numpy.zeros(len(pieces) + 1, numpy.int64)
    numpy.cumsum(numpy.fromiter(map(len, pieces), numpy.int64, len(pieces)), out=bounds[1:])
    return of_text(b"".join(pieces), bounds)


def content_of(array: pa.Array) -> tuple[pa.Buffer, NDArray[numpy.int64]]:
    """The text that an array of `large_binary` or `large_string` is in, and its bounds there."""
    _, ends, content = array.buffers()
    bounds = numpy.frombuffer(ends or bytes(8), numpy.int64)[array.offset : array.offset + len(array) + 1]
    return content if content is not None else pa.py_buffer(b""), bounds
