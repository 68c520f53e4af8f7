"""Parquet output: the record's id, the columns kept of it, and its output; a vector as a fixed-size list of float32."""

from __future__ import annotations

import collections
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import JobError, MissingExtraError
from headrace.io.letters import encode_failures
from headrace.records import Failed, Ok

ROW_GROUP_BYTES = 16 * 1024 * 1024
MOST_ROWS = 1 << 19
"""Of a group, however small they are."""
_TYPICAL_VALUE_BYTES = 1024
"""What a value without a fixed size is reckoned as: how many rows a group has may not depend on where parts end."""
_INT64 = range(-(2**63), 2**63)


class ParquetWriter:
    """The columns `id`, those kept, and `column`.

    A column's type is found from its values, part by part, and settled when the parts are merged: numbers widen, and
    where nothing else holds all of them (ids that are integers here and text there) values become text, an integer in
    its decimal form and anything else as JSON.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    suffix = ".parquet"

    def __init__(self, column: str) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError(
                'Parquet output needs pyarrow: pip install "headrace[io]", or write to a .jsonl file'
            ) from error
        self._pa: Any = pyarrow
        self._pq: Any = pyarrow.parquet
        self._column = column
        self._schema = pyarrow.schema([("id", pyarrow.int64()), (column, pyarrow.list_(pyarrow.float32()))])
        """Of the last part that had rows: a part without any is written with it."""

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The rows of one part as a small Parquet file.

        Raises:
            JobError: a vector is not as long as its neighbours.
        """
        buffer = io.BytesIO()
        if outcomes:
            names = list(dict.fromkeys(name for ok in outcomes for name in ok.record.data or ()))
            columns = {"id": self._array([ok.record.id for ok in outcomes])}
            columns |= {name: self._array([(ok.record.data or {}).get(name) for ok in outcomes]) for name in names}
            table = self._pa.table(columns | {self._column: self._outputs(outcomes)})
            self._schema = table.schema
        else:
            table = self._schema.empty_table()
        # A part most often lives until the merge: no time is spent on compressing or indexing it.
        self._pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
        return buffer.getvalue()

    def _outputs(self, outcomes: Sequence[Ok]) -> Any:
        """Vectors where the first output is one."""
        pa = self._pa
        if not _is_vector(outcomes[0].output):
            return self._array([ok.output for ok in outcomes])
        flat = []
        for ok in outcomes:
            try:
                flat.append(pa.array(ok.output, pa.float32()))
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise JobError(
                    f"the engine gave vectors, and for record {ok.record.position} a {type(ok.output).__name__}; "
                    "write to a .jsonl file instead"
                ) from error
        lengths = {len(vector) for vector in flat}
        if len(lengths) > 1:
            raise JobError(f"the engine gave vectors of different lengths in one part: {sorted(lengths)}")
        return pa.FixedSizeListArray.from_arrays(pa.concat_arrays(flat), lengths.pop())

    def _array(self, values: list[Any]) -> Any:
        """By the values' own type, or as text where they have none in common."""
        pa = self._pa
        if all(type(value) is int for value in values):
            fits = all(value in _INT64 for value in values)
            return pa.array(values, pa.int64()) if fits else pa.array([str(value) for value in values])
        try:
            return pa.array([value.tolist() if hasattr(value, "tolist") else value for value in values])
        except (pa.ArrowException, OverflowError):
            return pa.array([_text(value) for value in values], pa.string())

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Dead letters are JSON lines beside any format."""
        return encode_failures(failures)

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """One file with row groups of about 16 MiB; a group, and so the memory, is the same wherever parts end.

        Raises:
            JobError: a part is damaged, or parts do not fit together.
        """
        schema = self._merged_schema(parts)
        self._write(self._batches(parts, schema), schema, target)

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """The rows of both in turns.

        Raises:
            JobError: a file is damaged, or they do not fit together.
        """
        schema = self._merged_schema([base, *more])
        old, new = _Rows(self._batches([base], schema)), _Rows(self._batches(more, schema))

        def batches() -> Iterator[Any]:
            for of_base, of_more in turns:
                yield from old.take(of_base)
                if of_more < 0:
                    collections.deque(new.take(-of_more), maxlen=0)
                else:
                    yield from new.take(of_more)
            yield from old.take(sys.maxsize)

        self._write(batches(), schema, target)

    def _write(self, batches: Iterable[Any], schema: Any, target: BinaryIO) -> None:
        pa, pq = self._pa, self._pq
        row_bytes = sum(4 * getattr(kind, "list_size", 0) or _value_bytes(pa, kind) for kind in schema.types)
        group_rows = min(max(1, ROW_GROUP_BYTES // row_bytes), MOST_ROWS)
        with pq.ParquetWriter(target, schema, compression="zstd", use_dictionary=False) as writer:
            held: list[Any] = []
            held_rows = 0
            for batch in batches:
                while held_rows + batch.num_rows >= group_rows:
                    take = group_rows - held_rows
                    writer.write_table(pa.Table.from_batches([*held, batch.slice(0, take)], schema).combine_chunks())
                    batch, held, held_rows = batch.slice(take), [], 0
                    pa.default_memory_pool().release_unused()  # else each group adds to what the allocator keeps
                held.append(batch)
                held_rows += batch.num_rows
            if held_rows:
                writer.write_table(pa.Table.from_batches(held, schema).combine_chunks())

    def _merged_schema(self, parts: Sequence[Path]) -> Any:
        """The schema all parts' rows fit, from their footers: the output last, whatever a later part brings."""
        pa = self._pa
        found: dict[str, Any] = {}
        for part in parts:
            schema, rows = self._footer(part)
            for field in schema if rows else ():
                known = found.get(field.name, field.type)
                fixed = [kind for kind in (known, field.type) if pa.types.is_fixed_size_list(kind)]
                if known != field.type and fixed:
                    raise JobError(f"{part} holds {field.type} where earlier parts hold {known}; begin anew")
                found[field.name] = self._common(known, field.type)
        if not found:
            return self._schema
        if self._column in found:
            found[self._column] = found.pop(self._column)
        return pa.schema(list(found.items()))

    def _common(self, one: Any, other: Any) -> Any:
        pa = self._pa
        try:
            schemas = [pa.schema([("", kind)]) for kind in (one, other)]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pa.ArrowException:
            return pa.string()

    def _footer(self, part: Path) -> tuple[Any, int]:
        try:
            with part.open("rb") as stream, self._pq.ParquetFile(stream) as file:
                return file.schema_arrow, file.metadata.num_rows
        except (self._pa.ArrowException, OSError) as error:
            raise JobError(f"part {part} is damaged ({error}); remove it and run again to make it anew") from error

    def _batches(self, parts: Sequence[Path], schema: Any) -> Iterator[Any]:
        """The rows of all parts, a bounded number at a time, in the merged schema."""
        for part in parts:
            with part.open("rb") as stream, self._pq.ParquetFile(stream) as file:
                for batch in file.iter_batches(batch_size=4096) if file.metadata.num_rows else ():
                    columns = [self._fitted(batch, field) for field in schema]
                    yield self._pa.RecordBatch.from_arrays(columns, schema=schema)

    def _fitted(self, batch: Any, field: Any) -> Any:
        """A column in the merged type; nulls where this part has no such column."""
        pa = self._pa
        if field.name not in batch.schema.names:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(field.name)
        if column.type == field.type:
            return column
        if pa.types.is_string(field.type):
            return pa.array([_text(value) for value in column.to_pylist()], pa.string())
        return column.cast(field.type)


class _Rows:
    """Batches, any number of whose rows can be taken."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._left: Any = None

    def take(self, rows: int) -> Iterator[Any]:
        """The next so many rows, or all there are."""
        while rows > 0:
            batch = self._left if self._left is not None else next(self._batches, None)
            if batch is None:
                return
            self._left = batch.slice(rows) if batch.num_rows > rows else None
            taken = batch.slice(0, rows)
            rows -= taken.num_rows
            yield taken


def _value_bytes(pa: Any, kind: Any) -> int:
    return 8 if pa.types.is_primitive(kind) else _TYPICAL_VALUE_BYTES


def _is_vector(output: Any) -> bool:
    return hasattr(output, "dtype") or (isinstance(output, (list, tuple)) and bool(output) and type(output[0]) is float)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
