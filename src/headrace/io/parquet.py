"""Parquet output: the record's id, and a vector as a fixed-size list of float32."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import JobError, MissingExtraError
from headrace.records import Ok

ROW_GROUP_BYTES = 32 * 1024 * 1024
_INT64 = range(-(2**63), 2**63)


class ParquetWriter:
    """Two columns: `id` and `column`.

    `id` is int64 where every id of the whole output is an integer that fits, else text (integers in their decimal
    form); that is settled when the parts are merged, so a part may hold either.

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

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The rows of one part as a small Parquet file.

        Raises:
            JobError: an output is not a vector, or not as long as its neighbours.
        """
        pa = self._pa
        ids = [ok.record.id for ok in outcomes]
        whole = all(type(i) is int and i in _INT64 for i in ids)
        id_array = pa.array(ids, pa.int64()) if whole else pa.array([str(i) for i in ids], pa.string())
        table = pa.table({"id": id_array, self._column: self._vectors(outcomes)})
        buffer = io.BytesIO()
        # A part lives until the merge: no time is spent on compressing or indexing it.
        self._pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
        return buffer.getvalue()

    def _vectors(self, outcomes: Sequence[Ok]) -> Any:
        pa = self._pa
        if not outcomes:
            return pa.array([], pa.list_(pa.float32()))
        lengths = set()
        flat = []
        for ok in outcomes:
            try:
                vector = pa.array(ok.output, pa.float32())
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise JobError(
                    f"Parquet output takes vectors, and the output of record {ok.record.position} is a "
                    f"{type(ok.output).__name__}; write to a .jsonl file instead"
                ) from error
            lengths.add(len(vector))
            flat.append(vector)
        if len(lengths) > 1:
            raise JobError(f"the engine gave vectors of different lengths in one part: {sorted(lengths)}")
        return pa.FixedSizeListArray.from_arrays(pa.concat_arrays(flat), lengths.pop())

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """One file with row groups of about 32 MiB; a group, and so the memory, is the same wherever parts end.

        Raises:
            JobError: a part is damaged, or parts do not fit together.
        """
        pa, pq = self._pa, self._pq
        schema = self._merged_schema(parts)
        row_bytes = 16 + 4 * getattr(schema.field(self._column).type, "list_size", 0)
        group_rows = max(1, ROW_GROUP_BYTES // row_bytes)
        with pq.ParquetWriter(target, schema, compression="zstd", use_dictionary=False) as writer:
            held: list[Any] = []
            held_rows = 0
            for batch in self._batches(parts, schema):
                while held_rows + batch.num_rows >= group_rows:
                    take = group_rows - held_rows
                    writer.write_table(pa.Table.from_batches([*held, batch.slice(0, take)], schema).combine_chunks())
                    batch, held, held_rows = batch.slice(take), [], 0
                held.append(batch)
                held_rows += batch.num_rows
            if held_rows:
                writer.write_table(pa.Table.from_batches(held, schema).combine_chunks())

    def _merged_schema(self, parts: Sequence[Path]) -> Any:
        """The schema all parts' rows fit, from their footers."""
        pa = self._pa
        id_type, vector_type = pa.int64(), None
        for part in parts:
            schema, rows = self._footer(part)
            if not rows:
                continue
            if schema.field("id").type != pa.int64():
                id_type = pa.string()
            found = schema.field(self._column).type
            if vector_type is not None and found != vector_type:
                raise JobError(f"{part} holds {found} where earlier parts hold {vector_type}; begin anew")
            vector_type = found
        return pa.schema([("id", id_type), (self._column, vector_type or pa.list_(pa.float32()))])

    def _footer(self, part: Path) -> tuple[Any, int]:
        try:
            file = self._pq.ParquetFile(part)
        except (self._pa.ArrowException, OSError) as error:
            raise JobError(f"part {part} is damaged ({error}); remove it and run again to make it anew") from error
        with file:
            return file.schema_arrow, file.metadata.num_rows

    def _batches(self, parts: Sequence[Path], schema: Any) -> Iterator[Any]:
        """The rows of all parts, a bounded number at a time, in the merged schema."""
        for part in parts:
            with self._pq.ParquetFile(part) as file:
                if file.metadata.num_rows:
                    for batch in file.iter_batches(batch_size=4096):
                        yield batch.cast(schema)
