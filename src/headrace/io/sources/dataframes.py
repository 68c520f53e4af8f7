"""Rows of other libraries' tables: pandas, polars, Arrow, DuckDB, and any library with Arrow's stream interface.

Types are recognized by name, so that none of these libraries needs to be installed or imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.extras import require
from headrace.io.base import Chunk, Source, class_names
from headrace.io.formats.tables import check_names
from headrace.io.sources.in_memory import IterableSource, chunk_of, digest_of
from headrace.io.storage.rows import CHUNK_ROWS, todo

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset

_DIGESTED_RUNS = 64
_RUN_ROWS = 16
_BATCH_ROWS = 8192
"""Rows per batch of a stream."""


class TableSource:
    """A table in memory, converted to rows by chunks. It is identified by its length and 1,024 of its rows.

    Args:
        kind: the library's name.
        length: its number of rows.
        read: returns rows start..stop-1, each a dict or text.
    """

    def __init__(self, kind: str, length: int, read: Callable[[int, int], Sequence[object]]) -> None:
        self._kind = kind
        self._read = read
        self.total_bytes: int | None = None
        self.total_records: int | None = length

    def describe(self) -> Mapping[str, object]:
        """Length and digest of sampled runs of rows."""
        total = self.total_records or 0
        runs = min(_DIGESTED_RUNS, -(-total // _RUN_ROWS))
        starts = sorted({number * max(0, total - _RUN_ROWS) // max(1, runs - 1) for number in range(runs)})
        rows = (row for start in starts for row in self._read(start, min(start + _RUN_ROWS, total)))
        return {"format": self._kind, "records": total, "blake2b": digest_of(rows)}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of at most 512 rows."""
        total = self.total_records or 0
        for start in range(0, total, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, total)
            positions = todo(start, stop, next_todo)
            rows = self._read(start, stop) if positions else ()
            yield chunk_of([(position, rows[position - start]) for position in positions])


def table_source(table: object) -> Source | None:
    """The source for a table or column; None for other objects.

    Raises:
        ConfigError: its column names are not valid.
    """
    for name in class_names(table):
        if (make := _KINDS.get(name)) is not None:
            return make(table)
    return _stream(lambda: _exported(table)) if hasattr(type(table), "__arrow_c_stream__") else None


def _pandas(frame: Any) -> Source:
    """A named index is a column; missing values (NaN, NaT, NA) are null."""
    levels = [name for name in frame.index.names if name is not None]
    names = [*levels, *frame.columns]
    check_names(names, "the pandas DataFrame")

    def read(start: int, stop: int) -> list[dict[str, object]]:
        part = frame.iloc[start:stop]
        columns = [_objects(part.index.get_level_values(level).to_series()) for level in levels]
        columns += [_objects(part.iloc[:, place]) for place in range(part.shape[1])]
        rows = zip(*columns, strict=True) if columns else ((),) * len(part)
        return [dict(zip(names, row, strict=True)) for row in rows]

    return TableSource("pandas", len(frame), read)


def _objects(column: Any) -> list[Any]:
    values: list[object] = column.astype(object).where(column.notna().to_numpy(), None).tolist()
    return values


def _arrow(table: pa.Table) -> Source:
    check_names(table.schema.names, "the Arrow table")
    return TableSource("arrow", table.num_rows, lambda start, stop: table.slice(start, stop - start).to_pylist())


def _arrow_stream(reader: pa.RecordBatchReader) -> Source:
    check_names(reader.schema.names, "the Arrow reader")
    return IterableSource(_rows(reader))


def _arrow_dataset(dataset: pa.dataset.Dataset) -> Source:
    check_names(dataset.schema.names, "the Arrow dataset")
    # Read-ahead causes most of a dataset's memory use.
    return _stream(lambda: dataset.to_batches(batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1))


def _lazy(frame: Any) -> Source:
    if not hasattr(frame, "collect_batches"):  # polars before 1.34
        return _polars(frame.collect())
    return IterableSource(
        lambda: (
            row
            for batch in frame.collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True)
            for row in batch.iter_rows(named=True)
        )
    )


def _polars(frame: Any) -> Source:
    check_names(frame.columns, "the polars DataFrame")
    return TableSource("polars", frame.height, lambda start, stop: frame.slice(start, stop - start).to_dicts())


def _relation(relation: Any) -> Source:
    check_names(relation.columns, "the DuckDB relation")
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    return _stream(lambda: read(_BATCH_ROWS))


def _stream(make: Callable[[], Iterable[pa.RecordBatch]]) -> Source:
    """A source of record batches that can be created again."""
    return IterableSource(lambda: _rows(make()))


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, object]]:
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            yield from batch.slice(start, CHUNK_ROWS).to_pylist()


def _exported(table: object) -> pa.RecordBatchReader:
    pyarrow = require("pyarrow", "io", "a table of this type")
    reader = pyarrow.RecordBatchReader.from_stream(table)
    check_names(reader.schema.names, f"the {type(table).__name__}")
    return reader


_KINDS: Mapping[str, Callable[[Any], Source]] = {
    "pandas.DataFrame": _pandas,
    "pandas.Series": lambda column: TableSource("pandas", len(column), lambda a, b: _objects(column.iloc[a:b])),
    "polars.DataFrame": _polars,
    "polars.LazyFrame": _lazy,
    "polars.Series": lambda column: TableSource("polars", len(column), lambda a, b: column.slice(a, b - a).to_list()),
    "pyarrow.Table": _arrow,
    "pyarrow.RecordBatch": _arrow,
    "pyarrow.RecordBatchReader": _arrow_stream,
    "pyarrow.Dataset": _arrow_dataset,
    "pyarrow.Array": lambda column: TableSource("arrow", len(column), lambda a, b: column.slice(a, b - a).to_pylist()),
    "pyarrow.ChunkedArray": lambda column: TableSource(
        "arrow", len(column), lambda a, b: column.slice(a, b - a).to_pylist()
    ),
    "duckdb.DuckDBPyRelation": _relation,
}
