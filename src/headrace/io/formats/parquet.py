"""Parquet output: the record's id, its kept columns and its output; vectors are fixed-size lists of numbers."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.io.base import Take
from headrace.io.formats.arrow_types import parquet_problem
from headrace.io.formats.parquet_parts import ParquetParts
from headrace.io.formats.strict_json import OnNan, depth
from headrace.records import Ok

if TYPE_CHECKING:
    import pyarrow as pa

_DEEPEST = 45
"""Nesting that Parquet supports for all types; some types allow more."""
_CRASHES = 500
"""Nesting that is never passed to pyarrow, which crashes at a few thousand levels."""
_INT64 = range(-(2**63), 2**63)
_VECTOR_KINDS = ({"float32"}, {"int8"}, {"uint8"})
"""Types of the numbers in a column of vectors that are kept as they are."""
_MATRIX_KINDS = ({"float32"}, {"float16"})
"""The same for a column of lists of vectors."""


class ParquetWriter(ParquetParts):
    """The columns `id`, those kept, and `column`.

    A column's type is found from its values, part by part, and settled when the parts are merged: numbers widen, and
    where nothing else holds all of them (ids that are integers here and text there, dicts without a key) values become
    text: numbers, dicts and lists as JSON, others such as dates as their own text. Once the output of some record was a
    vector, one that is none fails its record.

    In a folder, where parts stay, the first part with rows fixes the columns and their types for the job: a column
    without a value in it is text, decimals have the most digits there are. A value of a later part that does not fit
    fails its record.

    Args:
        column: the name of the output.
        on_nan: what NaN and infinities become in values that are written as JSON; numbers keep them.
        folder: where the parts are, if they stay.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, column: str, on_nan: OnNan = "null", folder: Path | None = None) -> None:
        super().__init__(column, on_nan, folder)
        self._refused_in: set[str] | None = set() if on_nan == "error" else None
        """Columns written as text when NaN fails its record: NaN then also fails a record that is encoded alone."""
        self._vectors = False
        """Whether an output was a vector."""

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The rows of one part as a small Parquet file.

        Raises:
            Exception: a row cannot be written.
        """
        if outcomes:
            names = list(dict.fromkeys(name for ok in outcomes for name in ok.record.data or ()))
            columns = {"id": self._array("id", [ok.record.id for ok in outcomes])}
            for name in names:
                columns[name] = self._array(name, [(ok.record.data or {}).get(name) for ok in outcomes])
            table = self._pa.table(columns | {self._column: self._outputs(outcomes)})
            if self._folder is not None:
                table = self._as_committed(table)
            self._schema = table.schema
        else:
            table = self._schema.empty_table()
        return self._small_file(table)

    def rearrange(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[bytes]:
        """Rows in another order, as new parts.

        Raises:
            JobError: a part is damaged, or parts do not fit together.
        """
        for rows in self._rearranged(runs, takes):
            yield self._small_file(rows if self._folder is None or not len(rows) else self._as_committed(rows))

    def _small_file(self, table: pa.Table) -> bytes:
        buffer = io.BytesIO()  # usually temporary: do not spend time on compression or statistics
        self._pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
        return buffer.getvalue()

    def _outputs(self, outcomes: Sequence[Ok]) -> pa.Array:
        """The outputs as a column; vectors of equal length as a fixed-size list."""
        self._vectors = self._vectors or any(_is_vector(ok.output) for ok in outcomes)
        outputs = [ok.output for ok in outcomes]
        if not self._vectors:
            return self._array(self._column, outputs)
        if others := [one for one in outputs if not isinstance(one, (list, tuple)) and not hasattr(one, "tolist")]:
            raise TypeError(f"the output is of type {type(others[0]).__name__}, and that of others is a vector")
        return _vector_array(outputs)

    def _array(self, name: str, values: list[object]) -> pa.Array:
        """A column of the values' common type, or text if they have none or Parquet does not support it.

        Raises:
            ValueError: a value is nested too deep.
        """
        pa = self._pa
        kinds = {str(getattr(value, "dtype", "")) for value in values}
        if kinds in _VECTOR_KINDS and all(map(_is_vector, values)):
            return _vector_array(values)
        if kinds in _MATRIX_KINDS and all(getattr(value, "ndim", 0) == 2 for value in values):
            return _matrix_array(values)
        if all(type(value) is int for value in values):
            fits = all(value in _INT64 for value in values)
            return pa.array(values, pa.int64()) if fits else pa.array([str(value) for value in values])
        if any(isinstance(value, (list, tuple, Mapping)) and depth(value, _CRASHES) == _CRASHES for value in values):
            raise ValueError(f"column {name!r} is nested {_CRASHES} deep or more, or holds itself")
        try:
            array = pa.array([value.tolist() if hasattr(value, "tolist") else value for value in values])
        except Exception:  # noqa: BLE001 - pyarrow's classes vary, and `tolist` is the value's own code
            return self._texts(name, values)
        problem = parquet_problem(array.type)
        if problem and not (self._fixed is not None and self._fits(self._fixed.field(name).type, array.type)):
            if any(depth(value, _DEEPEST) == _DEEPEST for value in values):
                raise ValueError(f"column {name!r} is nested deeper than Parquet takes: {problem}")
            return self._texts(name, values)
        if self._refused_in and name in self._refused_in:
            self._texts(name, values)  # raises where one is NaN
        return array

    def _texts(self, name: str, values: list[object]) -> pa.Array:
        if self._refused_in is not None:
            self._refused_in.add(name)
        return self._as_texts(values, self._json)


def _is_vector(output: Any) -> bool:
    """Whether it is a list of floats, or a one-dimensional array of numbers."""
    if isinstance(output, (list, tuple)):
        return bool(output) and type(output[0]) is float
    return getattr(output, "ndim", 0) == 1 and any(kind in str(output.dtype) for kind in ("float", "int"))


def _vector_array(vectors: Sequence[object]) -> pa.Array:
    """A column of vectors: of a fixed size if they have one length."""
    import pyarrow as pa

    kinds = {str(getattr(vector, "dtype", "")) for vector in vectors}
    kind = getattr(pa, kinds.pop())() if kinds in ({"int8"}, {"uint8"}) else pa.float32()
    flat = [pa.array(vector, kind) for vector in vectors]
    values, lengths = pa.concat_arrays(flat), [len(vector) for vector in flat]
    if len(set(lengths)) == 1:
        return pa.FixedSizeListArray.from_arrays(values, lengths[0])
    return pa.ListArray.from_arrays(list(itertools.accumulate(lengths, initial=0)), values)


def _matrix_array(matrices: Sequence[Any]) -> pa.Array:
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
