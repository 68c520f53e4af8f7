"""Vectors, and lists of vectors, as Arrow columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

VECTOR_KINDS = ({"float32"}, {"int8"}, {"uint8"})
"""Types of the numbers in a column of vectors that are kept as they are."""
MATRIX_KINDS = ({"float32"}, {"float16"})
"""The same for a column of lists of vectors."""


def is_vector(output: Any) -> bool:
    """Whether it is a list of floats, or a one-dimensional array of numbers."""
    if isinstance(output, (list, tuple)):
        return bool(output) and type(output[0]) is float
    return getattr(output, "ndim", 0) == 1 and any(kind in str(output.dtype) for kind in ("float", "int"))


def vector_array(vectors: Sequence[object]) -> pa.Array:
    """A column of vectors: of a fixed size if they have one length."""
    import pyarrow as pa

    kinds = {str(getattr(vector, "dtype", "")) for vector in vectors}
    kind = getattr(pa, kinds.pop())() if kinds in ({"int8"}, {"uint8"}) else pa.float32()
    flat = [pa.array(vector, kind) for vector in vectors]
    values, lengths = pa.concat_arrays(flat), [len(vector) for vector in flat]
    if len(set(lengths)) == 1:
        return pa.FixedSizeListArray.from_arrays(values, lengths[0])
    return pa.ListArray.from_arrays(list(itertools.accumulate(lengths, initial=0)), values)


def matrix_array(matrices: Sequence[Any]) -> pa.Array:
    """A column of lists of vectors, all of one length.

    Raises:
        ValueError: they have several lengths.
    """
    import pyarrow as pa

    widths = {matrix.shape[1] for matrix in matrices}
    if len(widths) != 1:
        raise ValueError(f"vectors of {' and '.join(map(str, sorted(widths)))} components in one column")
    kind = pa.float16() if matrices[0].dtype == "float16" else pa.float32()
    values = pa.concat_arrays([pa.array(matrix.ravel(), kind) for matrix in matrices])
    vectors = pa.FixedSizeListArray.from_arrays(values, widths.pop())
    return pa.ListArray.from_arrays(list(itertools.accumulate(map(len, matrices), initial=0)), vectors)
