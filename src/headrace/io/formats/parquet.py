"""The format Parquet and its output: a record's id, its kept columns and its output; vectors are fixed-size lists."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from headrace.columns import Column, FinishedRows, Outputs
from headrace.errors import JobError, RecordError, tried
from headrace.extras import lazy, require
from headrace.io.base import Take
from headrace.io.formats.arrow_memory import of_numbers
from headrace.io.formats.arrow_types import common_type, held_type, nests_dictionary, parquet_problem, widest_type
from headrace.io.formats.cells import exact_values, is_arrow, runs_of, texts_of
from headrace.io.formats.kept_columns import check_parquet_column
from headrace.io.formats.known import Format
from headrace.io.formats.row_groups import RowGroups, row_bytes
from headrace.io.formats.strict_json import OnNan, StrictJson, depth, own_text
from headrace.io.formats.tables import ParquetFormat
from headrace.io.formats.values import (
    LibraryValue,
    are_plain,
    as_python,
    by_key,
    for_arrow,
    of_one_simple_type,
    plain,
    rows_of_array,
)
from headrace.io.formats.writer import RowWriter
from headrace.io.storage.lines import interleaved
from headrace.io.storage.locations import file_names
from headrace.records import Ok, Shape

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    _Plain: TypeAlias = list[LibraryValue] | NDArray[numpy.generic]
    """Outputs: plain values, or vectors in the rows of an array."""
else:
    pa, pq = lazy("pyarrow"), lazy("pyarrow.parquet")

_DEEPEST = 45
"""Nesting that Parquet supports for all types; some types allow more."""
_CRASHES = 500
"""Nesting that is never passed to pyarrow, which crashes at a few thousand levels."""
_INT64 = range(-(2**63), 2**63)
ROW_GROUP_BYTES = 16 * 1024 * 1024
MOST_ROWS = 1 << 19
"""Maximum rows of a row group."""
_READ_BYTES = 4 * 1024 * 1024
"""Approximate size of the rows read together for a merge, in bytes."""
_READ_ROWS = 65_536
_WAY_OUT = "give the column one type with a function (``prepare``), or write one .parquet file, whose columns widen"


class ParquetWriter(RowWriter):
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
        parsed: the type of the outputs' field `parsed`; None to find it from its values.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    suffix = ".parquet"
    merges_early = True

    def __init__(
        self, column: str, on_nan: OnNan = "null", folder: Path | None = None, parsed: Shape | None = None
    ) -> None:
        super().__init__(StrictJson(own_text, on_nan, compact=False))
        require("pyarrow", "io", "Parquet output", ", or write to a .jsonl file")
        self._column = column
        self._folder = folder
        self._parsed = None if parsed is None else _type_of(parsed)
        self._fixed: pa.Schema | None = None
        """The schema of the parts in the folder, once there is one."""
        self._schema = pa.schema([("id", pa.int64()), (column, pa.list_(pa.float32()))])
        """Schema of the last part with rows, used for parts without rows."""
        self._refused_in: set[str] | None = set() if on_nan == "error" else None
        """Columns written as text when NaN fails its record: NaN then also fails a record that is encoded alone."""
        self._vectors = False
        """Whether an output was a vector."""

    def expect(self, rows: Callable[[], Sequence[Ok]]) -> None:
        other = ParquetWriter(self._column)
        other.fields, other._parsed = self.fields, self._parsed
        other.encode_rows(rows())
        *kept, output = [(field.name, field.type) for field in other._schema]
        known = [(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in kept]
        self._schema = pa.schema([*known, (output[0], _without_rows(output[1]))])

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        if not outcomes:
            return self._small_file(self._schema.empty_table())
        names = dict.fromkeys(name for ok in outcomes for name in ok.record.data or ())
        kept = {name: runs_of([(ok.record.data or {}).get(name) for ok in outcomes]) for name in names}
        ids = self._array("id", [ok.record.id for ok in outcomes])
        return self._part(ids, kept, [[ok.output for ok in outcomes]])

    def encode_columns(self, pieces: Sequence[FinishedRows]) -> bytes:
        pieces = [piece for piece in pieces if len(piece)]
        if not pieces:
            return self.encode(())
        ids = self._joined("id", columns := [piece.ids for piece in pieces])
        if ids is None:
            ids = self._array("id", [value for column in columns for value in exact_values(column)])
        names = dict.fromkeys(name for piece in pieces for name in piece.kept or ())
        kept = {name: self._runs(name, pieces) for name in names}
        return self._part(ids, kept, [piece.outputs for piece in pieces])

    def _runs(self, name: str, pieces: Sequence[FinishedRows]) -> pa.Array | list[pa.Array | list[object]]:
        """A kept column: as it will be written, or columns of tables and lists of values."""
        columns = [(piece.kept or {}).get(name, [None] * len(piece)) for piece in pieces]
        if not any(piece.typed for piece in pieces) and (joined := self._joined(name, columns)) is not None:
            return joined
        runs: list[pa.Array | list[object]] = []
        for piece, column in zip(pieces, columns, strict=True):
            runs += [column] if piece.typed and is_arrow(column) else runs_of(exact_values(column))
        return runs

    def _joined(self, name: str, columns: Sequence[Column]) -> pa.Array | None:
        """Arrays of values without a type of a table, if theirs is the one that would be found; None if it may differ.

        A column without a value has another, and one that was text before has to be checked for NaN.
        """
        arrays = [column for column in columns if is_arrow(column)]
        kind = arrays[0].type if len(arrays) == len(columns) else None
        if kind not in (pa.string(), pa.int64(), pa.float64(), pa.bool_()) or (self._refused_in or set()) & {name}:
            return None
        if any(array.type != kind for array in arrays) or all(array.null_count == len(array) for array in arrays):
            return None
        return pa.concat_arrays(arrays)

    def _part(
        self,
        ids: pa.Array,
        kept: Mapping[str, pa.Array | list[pa.Array | list[object]]],
        outputs: Sequence[Outputs],
    ) -> bytes:
        columns, typed = {"id": ids}, set()
        for name, runs in kept.items():
            if is_arrow(runs):
                columns[name] = runs
            elif any(map(is_arrow, runs)):
                columns[name] = self._cells(name, runs)
                typed.add(name)
            else:
                columns[name] = self._array(name, [plain(value, f"column {name!r}") for run in runs for value in run])
        table = pa.table(columns | {self._column: self._outputs(list(map(_plain, outputs)))})
        if self._folder is not None:
            table = self._as_committed(table, typed)
        self._schema = table.schema
        return self._small_file(table)

    def _small_file(self, table: pa.Table) -> bytes:
        buffer = io.BytesIO()  # usually temporary: do not spend time on compression or statistics
        pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
        return buffer.getvalue()

    def _outputs(self, blocks: Sequence[_Plain]) -> pa.Array:
        """The outputs as a column; vectors of equal length as a fixed-size list."""
        self._vectors = self._vectors or any(
            not isinstance(block, list) or any(map(_is_vector, block)) for block in blocks
        )
        if not self._vectors:
            return self._with_parsed(_rows(blocks))
        lists = [block for block in blocks if isinstance(block, list)]
        if others := [one for one in _rows(lists) if not isinstance(one, list) and not hasattr(one, "tolist")]:
            raise TypeError(f"the output is of type {type(others[0]).__name__}, and that of others is a vector")
        return self._vector_column(self._column, blocks)

    def _with_parsed(self, outputs: list[LibraryValue]) -> pa.Array:
        """Outputs that are no vectors; their field `parsed` with its own type, if the schema gives it one."""
        found = self._array(self._column, outputs)
        if pa.types.is_list(found.type) and self._parsed is not None and not found.null_count:
            inner = self._with_parsed([one for several in outputs for one in several])
            return pa.ListArray.from_arrays(found.offsets, inner)
        if self._parsed is None or not pa.types.is_struct(found.type) or found.null_count:
            return found
        try:
            values = pa.array([output["parsed"] for output in outputs], self._parsed)
        except (KeyError, TypeError, ValueError, OverflowError):  # a function has changed it, or a number is too large
            return found
        names = [found.type.field(number).name for number in range(found.type.num_fields)]
        fields = [values if name == "parsed" else found.field(name) for name in names]
        return pa.StructArray.from_arrays(fields, names)

    def _vector_column(self, name: str, blocks: Sequence[_Plain]) -> pa.Array:
        """Vectors, as text if no type of numbers holds all of them exactly."""
        try:
            return _vector_array(blocks)
        except (pa.ArrowException, OverflowError):
            vectors = _rows(blocks)
            if not all(_is_vector(vector) or set(map(type, vector)) == {int} for vector in vectors):
                raise
            return self._texts(name, vectors)

    def _cells(self, name: str, runs: list[pa.Array | list[object]]) -> pa.Array:
        """A column of a table, in its type there; in a common one if the rows are of several tables."""
        kinds = list(dict.fromkeys(run.type for run in runs if is_arrow(run)))
        kind = held_type(functools.reduce(common_type, kinds))
        if problem := parquet_problem(kind):
            raise RecordError(f"column {name!r} is of type {kind}, which Parquet does not have: {problem}")
        are_cells = all(is_arrow(run) or all(value is None for value in run) for run in runs)
        become_texts = kind == pa.string() and any(one != kind for one in kinds)
        if are_cells and not become_texts and not nests_dictionary(kind):
            with contextlib.suppress(pa.ArrowException, OverflowError):
                return pa.concat_arrays([_cast(run, kind) for run in runs])
        objects = [value for run in runs for value in (texts_of(run) if is_arrow(run) else run)]
        return self._array(name, [plain(value, f"column {name!r}") for value in objects])

    def _array(self, name: str, values: list[LibraryValue]) -> pa.Array:
        """A column of the plain values' common type, or text if they have none or Parquet does not support it.

        Raises:
            ValueError: a value is nested too deep.
        """
        if values and all(hasattr(value, "ndim") for value in values):
            if all(map(_is_vector, values)):
                return self._vector_column(name, [values])
            if _are_matrices(values):
                return _matrix_array(values)
        if all(type(value) is int for value in values):
            fits = all(value in _INT64 for value in values)
            return pa.array(values, pa.int64()) if fits else pa.array([str(value) for value in values])
        if (array := _struct_array(values)) is None:
            _refuse_endless(name, values)
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

    # -- parts as one file, or as others ------------------------------------------------------------------------------

    def merge(self, parts: Iterable[Path], target: BinaryIO) -> None:
        """Write one file with row groups of about 16 MiB, independent of part boundaries. Memory is bounded.

        Raises:
            JobError: a part is damaged, or parts do not fit together; parts of an iterator must have the same columns.
        """
        if isinstance(parts, Sequence):
            schema = self._merged_schema(parts)
            self._write(self._batches(parts, schema), schema, target)
            return
        first: list[Path] = []
        for part in parts:
            first.append(part)
            if self._footer(part)[1]:
                break
        schema = self._merged_schema(first)
        alike = self._alike(itertools.chain(first, parts), schema)
        self._write(self._batches(alike, schema), schema, target)

    def _alike(self, parts: Iterable[Path], schema: pa.Schema) -> Iterator[Path]:
        """The parts, if each with rows has the columns of this schema."""
        for part in parts:
            found, rows = self._footer(part)
            if rows and set(found) != set(schema):
                raise JobError(f"part {part} has other columns than the parts before")
            yield part

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        schema = self._merged_schema([base, *more])
        old, new = _RowTaker(self._batches([base], schema)), _RowTaker(self._batches(more, schema))
        self._write(interleaved(old.take, new.take, turns), schema, target)

    def rearrange(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[bytes]:
        """Rows in another order, as new parts, in the schema that fits all of them. Each is read whole, and closed.

        Raises:
            JobError: a part is damaged, or parts do not fit together.
        """
        schema = self._merged_schema([part for parts in runs for part in parts])
        readers = [
            _RowTaker(batch for part in parts for batch in list(self._batches([part], schema))) for parts in runs
        ]
        for counts, orders in takes:
            taken = [batch for run, count in zip(readers, counts, strict=True) for batch in run.take(count)]
            table = pa.Table.from_batches(taken, schema)
            for order in orders:
                rows = table.take(pa.array(order, pa.int64()))
                is_kept = self._folder is not None and len(rows)
                yield self._small_file(self._as_committed(rows, rows.column_names) if is_kept else rows)

    def _write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema, target: BinaryIO) -> None:
        delta = {field.name: "DELTA_BINARY_PACKED" for field in schema if field.type in (pa.int32(), pa.int64())}
        how = {"compression": "zstd", "use_dictionary": False, "column_encoding": delta or None}
        with pq.ParquetWriter(target, schema, **how) as writer:
            held: list[object] = []
            group = RowGroups(ROW_GROUP_BYTES, MOST_ROWS)
            for batch in batches:
                start = 0
                for end in group.ends(row_bytes(batch)):
                    held.append(batch.slice(start, end - start))
                    writer.write_table(pa.Table.from_batches(held, schema).combine_chunks())
                    held, start = [], end
                    pa.default_memory_pool().release_unused()  # else each group adds to what the allocator keeps
                if start < batch.num_rows:
                    held.append(batch.slice(start))
            if held:
                writer.write_table(pa.Table.from_batches(held, schema).combine_chunks())

    def _merged_schema(self, parts: Sequence[Path]) -> pa.Schema:
        """The schema that fits the rows of all parts, from their footers, with the output as the last column."""
        found: dict[str, object] = {}
        changed: set[str] = set()
        for part in parts:
            schema, rows = self._footer(part)
            for field in schema if rows else ():
                known = found.setdefault(field.name, field.type)
                if known != field.type:
                    found[field.name] = common_type(known, field.type)
                    changed.add(field.name)
        if not found:
            return self._schema
        for name in changed:
            if not self._can_cast(parts, pa.field(name, found[name])):
                found[name] = pa.string()
        if self._column in found:
            found[self._column] = found.pop(self._column)
        return pa.schema(list(found.items()))

    def _can_cast(self, parts: Sequence[Path], field: pa.Field) -> bool:
        """Whether a column of all parts fits their common type; an integer may be too large for it."""
        try:
            for _ in self._batches(parts, pa.schema([field])):
                pass
        except (pa.ArrowException, OverflowError):
            return False
        return True

    def _footer(self, part: Path) -> tuple[pa.Schema, int]:
        try:
            with part.open("rb") as stream, pq.ParquetFile(stream) as file:
                return file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise JobError(f"part {part} is damaged ({error}); remove it and run again to compute it again") from error

    def _batches(self, parts: Iterable[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of all parts in the merged schema, a few MiB at a time."""
        for part in parts:
            with part.open("rb") as stream, pq.ParquetFile(stream) as file:
                facts = file.metadata
                size = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
                rows = min(max(1, _READ_BYTES * facts.num_rows // max(1, size)), _READ_ROWS)
                there = frozenset(file.schema_arrow.names)
                names = [name for name in schema.names if name in there]
                for batch in file.iter_batches(rows, columns=names) if facts.num_rows else ():
                    columns = [self._fitted(batch, field) for field in schema]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _fitted(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        if batch.schema.get_field_index(field.name) < 0:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(field.name)
        if column.type == field.type:
            return column
        if pa.types.is_null(column.type):
            return pa.nulls(batch.num_rows, field.type)
        if pa.types.is_string(field.type):
            # A NaN committed as a number must not fail the merge.
            return self._as_texts(texts_of(column), StrictJson(own_text, compact=False))
        return column.cast(field.type)

    # -- parts that stay in their folder ------------------------------------------------------------------------------

    def _as_committed(self, table: pa.Table, typed: Collection[str]) -> pa.Table:
        """The rows in the schema of the folder's parts; for the first part, in a schema that later parts can use.

        Args:
            typed: the columns whose type is that of a table.

        Raises:
            RecordError: a value does not fit.
        """
        if self._fixed is None:
            self._fixed = self._committed_schema()
        schema = self._fixed or pa.schema(
            [(field.name, field.type if field.name in typed else widest_type(field.type)) for field in table.schema]
        )
        if unknown := next((name for name in table.column_names if schema.get_field_index(name) < 0), None):
            raise RecordError(f"column {unknown!r} is not in the parts committed before; {_WAY_OUT}")
        return pa.table([self._kept_to(table, field) for field in schema], schema=schema)

    def _kept_to(self, table: pa.Table, field: pa.Field) -> pa.Array:
        if table.schema.get_field_index(field.name) < 0:
            return pa.nulls(table.num_rows, field.type)
        column = table[field.name].combine_chunks()
        found = column.type
        if found == field.type:
            return column
        if pa.types.is_string(field.type):
            return self._as_texts(texts_of(column), self._json)
        if self._fits(field.type, found):
            with contextlib.suppress(pa.ArrowException):  # an integer that a float cannot hold, say
                return column.cast(field.type)
        if self._are_floats(field.type) and self._are_floats(found):
            narrow = column.cast(field.type)  # vectors of Python's floats, in parts that an earlier version began
            if narrow.cast(found).equals(column):
                return narrow
        raise RecordError(
            f"column {field.name!r} is of type {field.type} in the parts committed before, and here {found}; {_WAY_OUT}"
        )

    def _are_floats(self, kind: pa.DataType) -> bool:
        types = pa.types
        return bool(types.is_fixed_size_list(kind) and types.is_floating(kind.value_type))

    def _fits(self, kept: pa.DataType, found: pa.DataType) -> bool:
        return bool(pa.types.is_null(found) or common_type(kept, found) == kept)

    def _committed_schema(self) -> pa.Schema | None:
        """The schema of the first part, in input order or not yet; None if there is no part."""
        assert self._folder is not None, "asked for by `encode`"
        for folder in (self._folder, *sorted(self._folder.glob("_headrace/order/*"))):
            parts = [name for name in file_names(folder) if name.startswith("part-") and name.endswith(self.suffix)]
            if parts:
                return self._footer(folder / min(parts))[0]
        return None

    def _as_texts(self, values: list[object], encoder: StrictJson) -> pa.Array:
        return pa.array([encoder.text(value) for value in values], pa.string())


def _without_rows(kind: pa.DataType) -> pa.DataType:
    """The type with vectors as lists, as no row tells their length; text if nothing is known."""
    if pa.types.is_null(kind):
        return pa.string()
    is_list = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return pa.list_(_without_rows(kind.value_type)) if is_list else kind


def _cast(run: pa.Array | list[None], kind: pa.DataType) -> pa.Array:
    if isinstance(run, list):
        return pa.nulls(len(run), kind)
    if pa.types.is_dictionary(run.type) and run.dictionary.null_count:  # which Parquet does not write
        run = run.dictionary_decode().dictionary_encode()
    return run if run.type == kind else run.cast(kind)


def _is_vector(output: LibraryValue) -> bool:
    """Whether it is a list of numbers with a float among them, or a one-dimensional array of numbers."""
    if isinstance(output, list):
        kinds = set(map(type, output))
        return float in kinds and kinds <= {float, int}
    return getattr(output, "ndim", 0) == 1 and output.dtype.kind in "fiu"


def _plain(outputs: LibraryValue) -> _Plain:
    """Outputs as plain values, or as the array that they are in if each row of it is a vector."""
    array = rows_of_array(outputs)
    if array is None and (columns := by_key(outputs)) is not None and all(map(are_plain, columns.values())):
        return list(outputs)
    if array is None or (array.ndim == 2 and array.dtype.kind == "b"):
        return [plain(output) for output in outputs]
    vectors: NDArray[numpy.generic] = array
    return vectors if vectors.ndim == 2 else list(vectors.tolist())


def _rows(blocks: Sequence[_Plain]) -> list[LibraryValue]:
    return [output for block in blocks for output in block]


def _vector_array(blocks: Sequence[_Plain]) -> pa.Array:
    """A column of vectors, in the type of their numbers: of a fixed size if they have one length.

    Raises:
        Exception: the numbers are of several types, and the common one cannot hold one of them exactly.
    """
    of_lists = [getattr(vector, "dtype", "float64") for block in blocks if isinstance(block, list) for vector in block]
    kinds = {*map(str, of_lists), *(str(block.dtype) for block in blocks if not isinstance(block, list))}
    if len(kinds) == 1:
        kind = getattr(pa, kinds.pop().replace("float16", "float32"))()
    else:
        kind = pa.float64() if any("float" in kind for kind in kinds) else pa.int64()
        blocks = [[as_python(vector) for vector in block] for block in blocks]
    flat: list[pa.Array] = []
    lengths: list[int] = []
    for block in blocks:
        if isinstance(block, list):
            vectors = [pa.array(vector, kind) for vector in block]
            flat += vectors
            lengths += map(len, vectors)
        else:
            flat.append(_cast(of_numbers(block.ravel()), kind))
            lengths += [block.shape[1]] * len(block)
    values = pa.concat_arrays(flat)
    if len(set(lengths)) == 1 and lengths[0]:  # Arrow has no fixed size of 0
        return pa.FixedSizeListArray.from_arrays(values, lengths[0])
    return pa.ListArray.from_arrays(list(itertools.accumulate(lengths, initial=0)), values)


def _refuse_endless(name: str, values: Sequence[object]) -> None:
    if any(isinstance(value, (list, dict)) and depth(value, _CRASHES) == _CRASHES for value in values):
        raise ValueError(f"column {name!r} is nested {_CRASHES} deep or more, or holds itself")


def _struct_array(values: Sequence[LibraryValue]) -> pa.Array | None:
    """Dicts with the same keys, and values of one simple type for each, as pyarrow makes it of them more slowly."""
    columns = by_key(values) or {}
    if not columns or not all(of_one_simple_type(column) for column in columns.values()):
        return None
    found = tried(lambda: pa.StructArray.from_arrays(list(map(pa.array, columns.values())), list(columns)))
    return None if isinstance(found, Exception) else found


def _are_matrices(arrays: Sequence[NDArray[numpy.generic]]) -> bool:
    """Whether they are lists of vectors, all of one length and one type of numbers."""
    return all(one.ndim == 2 for one in arrays) and len({(one.dtype, one.shape[1]) for one in arrays}) == 1


def _matrix_array(matrices: Sequence[NDArray[numpy.generic]]) -> pa.Array:
    """A column of lists of vectors, all of one length and one type of numbers."""
    values = pa.concat_arrays([pa.array(matrix.ravel()) for matrix in matrices])
    offsets, width = list(itertools.accumulate(map(len, matrices), initial=0)), matrices[0].shape[1]
    if width:
        vectors = pa.FixedSizeListArray.from_arrays(values, width)
    else:  # Arrow has no fixed size of 0
        vectors = pa.ListArray.from_arrays([0] * (offsets[-1] + 1), values)
    return pa.ListArray.from_arrays(offsets, vectors)


class _RowTaker:
    """Record batches from which any number of rows can be taken."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._left: pa.RecordBatch | None = None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows > 0:
            batch = self._left if self._left is not None else next(self._batches, None)
            if batch is None:
                return
            self._left = batch.slice(rows) if batch.num_rows > rows else None
            taken = batch.slice(0, rows)
            rows -= taken.num_rows
            yield taken


PARQUET = Format(
    name="parquet",
    reader=ParquetFormat,
    writer=lambda layout, _, folder: ParquetWriter(layout.column, layout.on_nan, folder, layout.parsed),
    check_column=check_parquet_column,
    extra="io",
)


def _type_of(shape: Shape) -> pa.DataType:
    if isinstance(shape, dict):
        return pa.struct([(name, _type_of(inner)) for name, inner in shape.items()])
    if isinstance(shape, list):
        return pa.list_(_type_of(shape[0]))
    known = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
    return known.get(shape, pa.string())
