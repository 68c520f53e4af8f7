"""Parquet output: the record's id, its kept columns and its output; vectors are fixed-size lists of numbers."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import RecordError, tried
from headrace.io.base import Take
from headrace.io.formats.arrow_types import common_type, held_type, nests_dictionary, parquet_problem
from headrace.io.formats.cells import Cell, runs_of, texts_of
from headrace.io.formats.kept_columns import check_parquet_column
from headrace.io.formats.known import Format
from headrace.io.formats.parquet_parts import ParquetParts
from headrace.io.formats.strict_json import OnNan, depth
from headrace.io.formats.tables import ParquetFormat
from headrace.io.formats.values import as_python, for_arrow, plain
from headrace.records import Ok

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray

_DEEPEST = 45
"""Nesting that Parquet supports for all types; some types allow more."""
_CRASHES = 500
"""Nesting that is never passed to pyarrow, which crashes at a few thousand levels."""
_INT64 = range(-(2**63), 2**63)


class ParquetWriter(ParquetParts):
    """The columns `id`, those kept, and `column`.

    A kept column of a table has its type there. The type of another is found from its values, part by part, and settled
    when the parts are merged: numbers widen, and where nothing else holds all of them exactly (ids that are integers
    here and text there, dicts without a key) values become text: numbers, dicts and lists as JSON, others such as dates
    as their own text. Once the output of some record was a vector, one that is none fails its record.

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
            typed = set()
            for name in names:
                values = [(ok.record.data or {}).get(name) for ok in outcomes]
                if any(type(value) is Cell for value in values):
                    columns[name] = self._cells(name, values)
                    typed.add(name)
                else:
                    columns[name] = self._array(name, [plain(value, f"column {name!r}") for value in values])
            table = self._pa.table(columns | {self._column: self._outputs([plain(ok.output) for ok in outcomes])})
            if self._folder is not None:
                table = self._as_committed(table, typed)
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
            yield self._small_file(
                rows if self._folder is None or not len(rows) else self._as_committed(rows, rows.column_names)
            )

    def _small_file(self, table: pa.Table) -> bytes:
        buffer = io.BytesIO()  # usually temporary: do not spend time on compression or statistics
        self._pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
        return buffer.getvalue()

    def _outputs(self, outputs: list[object]) -> pa.Array:
        """The outputs as a column; vectors of equal length as a fixed-size list."""
        self._vectors = self._vectors or any(map(_is_vector, outputs))
        if not self._vectors:
            return self._array(self._column, outputs)
        if others := [one for one in outputs if not isinstance(one, list) and not hasattr(one, "tolist")]:
            raise TypeError(f"the output is of type {type(others[0]).__name__}, and that of others is a vector")
        return self._vector_column(self._column, outputs)

    def _vector_column(self, name: str, vectors: list[Any]) -> pa.Array:
        """Vectors, as text if no type of numbers holds all of them exactly."""
        try:
            return _vector_array(vectors)
        except (self._pa.ArrowException, OverflowError):
            if not all(_is_vector(vector) or set(map(type, vector)) == {int} for vector in vectors):
                raise
            return self._texts(name, vectors)

    def _cells(self, name: str, values: list[object]) -> pa.Array:
        """A column of a table, in its type there; in a common one if the rows are of several tables."""
        pa = self._pa
        kinds = list(dict.fromkeys(value.column.type for value in values if type(value) is Cell))
        kind = held_type(functools.reduce(common_type, kinds))
        if problem := parquet_problem(kind):
            raise RecordError(f"column {name!r} is of type {kind}, which Parquet does not have: {problem}")
        are_cells = all(value is None or type(value) is Cell for value in values)
        become_texts = kind == pa.string() and any(one != kind for one in kinds)
        if are_cells and not become_texts and not nests_dictionary(kind):
            with contextlib.suppress(pa.ArrowException, OverflowError):
                return pa.concat_arrays([_cast(run, kind) for run in runs_of(values)])
        objects = [texts_of([value.exact()])[0] if type(value) is Cell else value for value in values]
        return self._array(name, [plain(value, f"column {name!r}") for value in objects])

    def _array(self, name: str, values: list[Any]) -> pa.Array:
        """A column of the plain values' common type, or text if they have none or Parquet does not support it.

        Raises:
            ValueError: a value is nested too deep.
        """
        pa = self._pa
        if values and all(hasattr(value, "ndim") for value in values):
            if all(map(_is_vector, values)):
                return self._vector_column(name, values)
            if (
                all(value.ndim == 2 for value in values)
                and len({(value.dtype, value.shape[1]) for value in values}) == 1
            ):
                return _matrix_array(values)
        if all(type(value) is int for value in values):
            fits = all(value in _INT64 for value in values)
            return pa.array(values, pa.int64()) if fits else pa.array([str(value) for value in values])
        if any(isinstance(value, (list, dict)) and depth(value, _CRASHES) == _CRASHES for value in values):
            raise ValueError(f"column {name!r} is nested {_CRASHES} deep or more, or holds itself")
        array = tried(lambda: pa.array(for_arrow(values)))
        if isinstance(array, Exception):
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


def _cast(run: pa.Array | list[None], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if isinstance(run, list):
        return pa.nulls(len(run), kind)
    return run if run.type == kind else run.cast(kind)


def _is_vector(output: Any) -> bool:
    """Whether it is a list of numbers with a float among them, or a one-dimensional array of numbers."""
    if isinstance(output, list):
        kinds = set(map(type, output))
        return float in kinds and kinds <= {float, int}
    return getattr(output, "ndim", 0) == 1 and output.dtype.kind in "fiu"


def _vector_array(vectors: Sequence[list[float] | NDArray[numpy.generic]]) -> pa.Array:
    """A column of vectors, in the type of their numbers: of a fixed size if they have one length.

    Raises:
        Exception: the numbers are of several types, and the common one cannot hold one of them exactly.
    """
    import pyarrow as pa

    kinds = {str(vector.dtype) if hasattr(vector, "dtype") else "float64" for vector in vectors}
    if len(kinds) == 1:
        kind = getattr(pa, kinds.pop().replace("float16", "float32"))()
    else:
        kind = pa.float64() if any("float" in kind for kind in kinds) else pa.int64()
        vectors = [as_python(vector) for vector in vectors]
    flat = [pa.array(vector, kind) for vector in vectors]
    values, lengths = pa.concat_arrays(flat), [len(vector) for vector in flat]
    if len(set(lengths)) == 1 and lengths[0]:  # Arrow has no fixed size of 0
        return pa.FixedSizeListArray.from_arrays(values, lengths[0])
    return pa.ListArray.from_arrays(list(itertools.accumulate(lengths, initial=0)), values)


def _matrix_array(matrices: Sequence[NDArray[numpy.generic]]) -> pa.Array:
    """A column of lists of vectors, all of one length and one type of numbers."""
    import pyarrow as pa

    values = pa.concat_arrays([pa.array(matrix.ravel()) for matrix in matrices])
    offsets, width = list(itertools.accumulate(map(len, matrices), initial=0)), matrices[0].shape[1]
    if width:
        vectors = pa.FixedSizeListArray.from_arrays(values, width)
    else:  # Arrow has no fixed size of 0
        vectors = pa.ListArray.from_arrays([0] * (offsets[-1] + 1), values)
    return pa.ListArray.from_arrays(offsets, vectors)


PARQUET = Format(
    name="parquet",
    reader=ParquetFormat,
    writer=lambda layout, _, folder: ParquetWriter(layout.column, layout.on_nan, folder),
    check_column=check_parquet_column,
    extra="io",
)
