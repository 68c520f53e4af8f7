"""Rows of other libraries' tables: pandas, polars, Arrow, DuckDB, and any library with Arrow's stream interface.

Types are recognized by name, so that none of these libraries needs to be installed or imported.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import line_of, tried
from headrace.extras import require
from headrace.io.base import Source, SourcePlugin, class_names
from headrace.io.formats.cells import LazyColumns, objects_of, rows_of, rows_with
from headrace.io.formats.tables import check_names
from headrace.io.sources.in_memory import IterableSource, RowSource, digest_of
from headrace.io.storage.rows import CHUNK_ROWS
from headrace.records import Unreadable

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow as pa
    import pyarrow.dataset

_DIGESTED_RUNS = 64
_RUN_ROWS = 16
_BATCH_ROWS = 8192
"""Rows per batch of a stream."""


class TableSource(RowSource):
    """A table in memory, converted to rows by chunks. It is identified by its length and 1,024 of its rows.

    Args:
        kind: the library's name.
        read: returns rows start..stop-1, each a dict or text.
    """

    def __init__(self, kind: str, length: int, read: Callable[[int, int], Sequence[object]]) -> None:
        super().__init__(length)
        self._kind = kind
        self._read = read

    def describe(self) -> Mapping[str, object]:
        total = self._length
        runs = min(_DIGESTED_RUNS, -(-total // _RUN_ROWS))
        starts = sorted({number * max(0, total - _RUN_ROWS) // max(1, runs - 1) for number in range(runs)})
        rows = (row for start in starts for row in self._read(start, min(start + _RUN_ROWS, total)))
        return {"format": self._kind, "records": total, "blake2b": digest_of(rows)}

    def rows_at(self, positions: Sequence[int]) -> list[object]:
        rows = self._read(positions[0], positions[-1] + 1)
        return [rows[position - positions[0]] for position in positions]


def _open(table: object, _query: str | None) -> Source:
    """The source for a table or column. Raises ConfigError: its column names are not valid."""
    make = next((_KINDS[name] for name in class_names(table) if name in _KINDS), None)
    return _stream(lambda: _exported(table)) if make is None else make(table)


def _pandas(frame: pandas.DataFrame) -> Source:
    """A named index is a column; missing values (NaN, NaT, NA) are null."""
    levels = [name for name in frame.index.names if name is not None]
    names = [*levels, *frame.columns]
    check_names(names, "the pandas DataFrame")

    def read(start: int, stop: int) -> list[dict[str, object]]:
        part = frame.iloc[start:stop]
        columns = [part.index.get_level_values(level).to_series() for level in levels]
        columns += [part.iloc[:, place] for place in range(part.shape[1])]
        values = [_objects(column, start) for column in columns]
        rows = zip(*values, strict=True) if columns else ((),) * len(part)
        by_name = dict(zip(names, columns, strict=True))
        return rows_with(
            [zip(names, row, strict=True) for row in rows], LazyColumns(names, lambda name: _exact(by_name[name]))
        )

    return TableSource("pandas", len(frame), read)


def _objects(column: pandas.Series, start: int) -> list[object]:
    """The values of a pandas column whose first row has the number `start`."""
    values: list[object] | Exception = tried(
        lambda: column.astype(object).where(column.notna().to_numpy(), None).tolist()
    )
    if not isinstance(values, Exception):
        return values
    if len(column) == 1:
        return [Unreadable(f"{line_of(values)} (the DataFrame, row {start:,} counted from 0)")]
    return [value for at in range(len(column)) for value in _objects(column.iloc[at : at + 1], start + at)]


def _exact(column: pandas.Series) -> pa.Array | None:
    """A pandas column as an Arrow array; None for one of Python objects or text, whose types are their own."""
    if str(column.dtype) in ("object", "str"):
        return None
    found = tried(lambda: importlib.import_module("pyarrow").array(column, from_pandas=True))
    if isinstance(found, Exception):  # a type of pandas or of others that Arrow does not have, or no pyarrow
        return None
    return found.combine_chunks() if hasattr(found, "chunks") else found


def _arrow(table: pa.Table | pa.RecordBatch) -> Source:
    check_names(table.schema.names, "the Arrow table")

    def read(start: int, stop: int) -> list[dict[str, object]]:
        part = table.slice(start, stop - start)
        return list(_rows(part.to_batches() if hasattr(part, "to_batches") else [part], start))

    return TableSource("arrow", table.num_rows, read)


def _arrow_column(column: pa.Array | pa.ChunkedArray) -> Source:
    def read(start: int, stop: int) -> list[object]:
        part = column.slice(start, stop - start)
        numbers, found = iter(range(start, stop)), list[object]()
        for chunk in getattr(part, "chunks", [part]):
            found += objects_of(chunk, "the Arrow array", list(itertools.islice(numbers, len(chunk))))
        return found

    return TableSource("arrow", len(column), read)


def _arrow_stream(reader: pa.RecordBatchReader) -> Source:
    check_names(reader.schema.names, "the Arrow reader")
    return IterableSource(_rows(reader))


def _arrow_dataset(dataset: pa.dataset.Dataset) -> Source:
    check_names(dataset.schema.names, "the Arrow dataset")
    # Read-ahead causes most of a dataset's memory use.
    return _stream(lambda: dataset.to_batches(batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1))


def _lazy(frame: polars.LazyFrame) -> Source:
    if not hasattr(frame, "collect_batches"):  # polars before 1.34
        return _polars(frame.collect())

    def rows() -> Iterator[Mapping[str, object]]:
        start = 0
        for batch in frame.collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True):
            yield from _polars_rows(batch, start)
            start += batch.height

    return IterableSource(rows)


def _polars(frame: polars.DataFrame) -> Source:
    check_names(frame.columns, "the polars DataFrame")
    return TableSource(
        "polars", frame.height, lambda start, stop: _polars_rows(frame.slice(start, stop - start), start)
    )


def _polars_rows(frame: polars.DataFrame, start: int) -> list[dict[str, object]]:
    """The rows of a part of a frame, whose first row has the number `start`."""
    batches = tried(lambda: frame.to_arrow().to_batches())
    if isinstance(batches, Exception):  # a type that Arrow does not have, or no pyarrow
        rows: list[dict[str, object]] = frame.to_dicts()
        return rows
    return list(_rows(batches, start))


def _relation(relation: duckdb.DuckDBPyRelation) -> Source:
    check_names(relation.columns, "the DuckDB relation")
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    return _stream(lambda: read(_BATCH_ROWS))


def _stream(make: Callable[[], Iterable[pa.RecordBatch]]) -> Source:
    """A source of record batches that can be created again."""
    return IterableSource(lambda: _rows(make()))


def _rows(batches: Iterable[pa.RecordBatch], start: int = 0) -> Iterator[dict[str, object]]:
    for batch in batches:
        for first in range(0, batch.num_rows, CHUNK_ROWS):
            yield from rows_of(batch.slice(first, CHUNK_ROWS), "the table", start + first)
        start += batch.num_rows


def _exported(table: object) -> pa.RecordBatchReader:
    pyarrow = require("pyarrow", "io", "a table of this type")
    reader = pyarrow.RecordBatchReader.from_stream(table)
    check_names(reader.schema.names, f"the {type(table).__name__}")
    return reader


_KINDS: Mapping[str, Callable[[Any], Source]] = {
    "pandas.DataFrame": _pandas,
    "pandas.Series": lambda column: TableSource("pandas", len(column), lambda a, b: _objects(column.iloc[a:b], a)),
    "polars.DataFrame": _polars,
    "polars.LazyFrame": _lazy,
    "polars.Series": lambda column: TableSource("polars", len(column), lambda a, b: column.slice(a, b - a).to_list()),
    "pyarrow.Table": _arrow,
    "pyarrow.RecordBatch": _arrow,
    "pyarrow.RecordBatchReader": _arrow_stream,
    "pyarrow.Dataset": _arrow_dataset,
    "pyarrow.Array": _arrow_column,
    "pyarrow.ChunkedArray": _arrow_column,
    "duckdb.DuckDBPyRelation": _relation,
}

TABLES = SourcePlugin(open=_open, extra="io")
