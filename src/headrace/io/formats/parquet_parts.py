"""What Parquet parts have in common: their schema, and how they become one file or other parts."""

from __future__ import annotations

import collections
import contextlib
import importlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headrace.errors import JobError, RecordError
from headrace.extras import require
from headrace.io.base import Take
from headrace.io.formats.arrow_types import common_type, widest_type
from headrace.io.formats.cells import texts_of
from headrace.io.formats.row_groups import RowGroups, row_bytes
from headrace.io.formats.strict_json import OnNan, StrictJson, own_text
from headrace.io.formats.writer import RowWriter
from headrace.io.storage.locations import file_names

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_BYTES = 16 * 1024 * 1024
MOST_ROWS = 1 << 19
"""Maximum rows of a row group."""
_READ_BYTES = 4 * 1024 * 1024
"""Approximate size of the rows read together for a merge, in bytes."""
_READ_ROWS = 4096
_WAY_OUT = "give the column one type with a function (``prepare``), or write one .parquet file, whose columns widen"


class ParquetParts(RowWriter):
    """Base of the writer of Parquet: parts are small files, whose columns may differ in type.

    Args:
        column: the name of the output.
        on_nan: what NaN and infinities become in values that are written as JSON; numbers keep them.
        folder: where the parts are, if they stay; the first one with rows then fixes the schema of all.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    suffix = ".parquet"

    def __init__(self, column: str, on_nan: OnNan, folder: Path | None) -> None:
        super().__init__(StrictJson(own_text, on_nan, compact=False))
        self._pa = require("pyarrow", "io", "Parquet output", ", or write to a .jsonl file")
        self._pq = importlib.import_module("pyarrow.parquet")
        self._column = column
        self._folder = folder
        self._fixed: pa.Schema | None = None
        """The schema of the parts in the folder, once there is one."""
        pa = self._pa
        self._schema = pa.schema([("id", pa.int64()), (column, pa.list_(pa.float32()))])
        """Schema of the last part with rows, used for parts without rows."""

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """Write one file with row groups of about 16 MiB, independent of part boundaries. Memory is bounded.

        Raises:
            JobError: a part is damaged, or parts do not fit together.
        """
        schema = self._merged_schema(parts)
        self._write(self._batches(parts, schema), schema, target)

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """Alternate rows of both.

        Raises:
            JobError: a file is damaged, or they do not fit together.
        """
        schema = self._merged_schema([base, *more])
        old, new = _RowTaker(self._batches([base], schema)), _RowTaker(self._batches(more, schema))

        def batches() -> Iterator[pa.RecordBatch]:
            for of_base, of_more in turns:
                yield from old.take(of_base)
                if of_more < 0:
                    collections.deque(new.take(-of_more), maxlen=0)
                else:
                    yield from new.take(of_more)
            yield from old.take(sys.maxsize)

        self._write(batches(), schema, target)

    def _rearranged(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[pa.Table]:
        """Rows in another order, in the schema that fits all of them. Each part is read whole, and closed.

        Raises:
            JobError: a part is damaged, or parts do not fit together.
        """
        schema = self._merged_schema([part for parts in runs for part in parts])
        readers = [
            _RowTaker(batch for part in parts for batch in list(self._batches([part], schema))) for parts in runs
        ]
        for counts, orders in takes:
            taken = [batch for run, count in zip(readers, counts, strict=True) for batch in run.take(count)]
            table = self._pa.Table.from_batches(taken, schema)
            for order in orders:
                yield table.take(self._pa.array(order, self._pa.int64()))

    def _write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema, target: BinaryIO) -> None:
        pa, pq = self._pa, self._pq
        with pq.ParquetWriter(target, schema, compression="zstd", use_dictionary=False) as writer:
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
        pa = self._pa
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
            for _ in self._batches(parts, self._pa.schema([field])):
                pass
        except (self._pa.ArrowException, OverflowError):
            return False
        return True

    def _footer(self, part: Path) -> tuple[pa.Schema, int]:
        try:
            with part.open("rb") as stream, self._pq.ParquetFile(stream) as file:
                return file.schema_arrow, file.metadata.num_rows
        except (self._pa.ArrowException, OSError) as error:
            raise JobError(f"part {part} is damaged ({error}); remove it and run again to compute it again") from error

    def _batches(self, parts: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of all parts in the merged schema, a few MiB at a time."""
        for part in parts:
            with part.open("rb") as stream, self._pq.ParquetFile(stream) as file:
                facts = file.metadata
                size = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
                rows = min(max(1, _READ_BYTES * facts.num_rows // max(1, size)), _READ_ROWS)
                names = [name for name in schema.names if name in file.schema_arrow.names]
                for batch in file.iter_batches(rows, columns=names) if facts.num_rows else ():
                    columns = [self._fitted(batch, field) for field in schema]
                    yield self._pa.RecordBatch.from_arrays(columns, schema=schema)

    def _fitted(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        """A column in the merged type; nulls if this part lacks it."""
        pa = self._pa
        if field.name not in batch.schema.names:
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
            table: the rows.
            typed: the columns whose type is that of a table.

        Raises:
            RecordError: a value does not fit.
        """
        pa = self._pa
        if self._fixed is None:
            self._fixed = self._committed_schema()
        schema = self._fixed or pa.schema(
            [(field.name, field.type if field.name in typed else widest_type(field.type)) for field in table.schema]
        )
        if unknown := [name for name in table.column_names if name not in schema.names]:
            raise RecordError(f"column {unknown[0]!r} is not in the parts committed before; {_WAY_OUT}")
        return pa.table([self._kept_to(table, field) for field in schema], schema=schema)

    def _kept_to(self, table: pa.Table, field: pa.Field) -> pa.Array:
        if field.name not in table.column_names:
            return self._pa.nulls(table.num_rows, field.type)
        column = table[field.name].combine_chunks()
        found = column.type
        if found == field.type:
            return column
        if self._pa.types.is_string(field.type):
            return self._as_texts(texts_of(column), self._json)
        if self._fits(field.type, found):
            with contextlib.suppress(self._pa.ArrowException):  # an integer that a float cannot hold, say
                return column.cast(field.type)
        if self._are_floats(field.type) and self._are_floats(found):
            narrow = column.cast(field.type)  # vectors of Python's floats, in parts that an earlier version began
            if narrow.cast(found).equals(column):
                return narrow
        raise RecordError(
            f"column {field.name!r} is of type {field.type} in the parts committed before, and here {found}; {_WAY_OUT}"
        )

    def _are_floats(self, kind: pa.DataType) -> bool:
        types = self._pa.types
        return bool(types.is_fixed_size_list(kind) and types.is_floating(kind.value_type))

    def _fits(self, kept: pa.DataType, found: pa.DataType) -> bool:
        return bool(self._pa.types.is_null(found) or common_type(kept, found) == kept)

    def _committed_schema(self) -> pa.Schema | None:
        """The schema of the first part, in input order or not yet; None if there is no part."""
        assert self._folder is not None, "asked for by `encode`"
        for folder in (self._folder, *sorted(self._folder.glob("_headrace/order/*"))):
            parts = [name for name in file_names(folder) if name.startswith("part-") and name.endswith(self.suffix)]
            if parts:
                return self._footer(folder / min(parts))[0]
        return None

    def _as_texts(self, values: list[object], encoder: StrictJson) -> pa.Array:
        return self._pa.array([encoder.text(value) for value in values], self._pa.string())


class _RowTaker:
    """Record batches from which any number of rows can be taken."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._left: pa.RecordBatch | None = None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        """The next `rows` rows, or all remaining ones."""
        while rows > 0:
            batch = self._left if self._left is not None else next(self._batches, None)
            if batch is None:
                return
            self._left = batch.slice(rows) if batch.num_rows > rows else None
            taken = batch.slice(0, rows)
            rows -= taken.num_rows
            yield taken
