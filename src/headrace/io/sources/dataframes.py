"""Rows of other libraries' tables: pandas, polars, Arrow, DuckDB, and any library with Arrow's stream interface.

Types are recognized by name, so that none of these libraries needs to be installed or imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace.errors import line_of, tried
from headrace.extras import require
from headrace.io.base import Source, SourcePlugin, class_names
from headrace.io.formats.arrow_tables import HeldArrow, HeldTable, as_one
from headrace.io.formats.cells import LazyColumns, is_of_python, rows_with
from headrace.io.formats.tables import check_names
from headrace.io.sources.held_tables import StreamSource, TableSource
from headrace.io.sources.in_memory import record_of
from headrace.records import Failed, Record, Unreadable

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow as pa
    import pyarrow.dataset

_BATCH_ROWS = 8192
"""Rows per batch of a stream."""
_UNTYPED = ("object", "str")
"""Types of columns of pandas that are no types of Arrow."""


def _open(table: object, _query: str | None) -> Source:
    """The source for a table or column. Raises ConfigError: its column names are not valid."""
    make = next((_KINDS[name] for name in class_names(table) if name in _KINDS), None)
    return _stream(lambda: _exported(table)) if make is None else make(table)


class _Pandas(HeldTable):
    """The rows of a DataFrame. A named index is a column; missing values (NaN, NaT, NA) are null."""

    def __init__(self, frame: pandas.DataFrame) -> None:
        self._levels = [name for name in frame.index.names if name is not None]
        self.names: Sequence[str] = [*self._levels, *frame.columns]
        check_names(self.names, "the pandas DataFrame")
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def rows(self, start: int, stop: int) -> list[dict[str, object]]:
        columns = {name: self._column(name, start, stop) for name in self.names}
        values = [_objects(column, start) for column in columns.values()]
        rows = zip(*values, strict=True) if columns else ((),) * len(self._frame.iloc[start:stop])
        exact = LazyColumns(self.names, lambda name: _exact(columns[name]))
        return rows_with([zip(self.names, row, strict=True) for row in rows], exact)

    def columns(self, names: Sequence[str], start: int, stop: int) -> dict[str, pa.Array | None]:
        return {name: _as_rows_have(self._column(name, start, stop), start) for name in names}

    def _column(self, name: str, start: int, stop: int) -> pandas.Series:
        if name in self._levels:
            return self._frame.index[start:stop].get_level_values(name).to_series()
        return self._frame.iloc[start:stop, self.names.index(name) - len(self._levels)]


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
    return None if str(column.dtype) in _UNTYPED else _array(column)


def _array(values: pandas.Series | list[object], kind: str | None = None) -> pa.Array | None:
    """Values as an Arrow array; None for a type of pandas or of others that Arrow does not have, or without pyarrow."""
    found = tried(lambda: importlib.import_module("pyarrow").array(values, kind, from_pandas=True))
    return None if isinstance(found, Exception) else as_one(found)


def _as_rows_have(column: pandas.Series, start: int) -> pa.Array | None:
    """A pandas column, whose first row has the number `start`; None if `_objects` has other values than Arrow."""
    kind, found = str(column.dtype), _exact(column)
    if kind == "object":
        values = _objects(column, start)
        return _array(values) if {*map(type, values)} - {type(None)} in ({str}, {int}) else None
    if kind == "str":
        found = _array(column, "string")
        return None if found is None or found.null_count == len(found) else found  # of objects, nulls have no type
    is_sure = found is None or not hasattr(column.dtype, "pyarrow_dtype") or is_of_python(found.type)
    return found if is_sure or Unreadable not in map(type, _objects(column, start)) else None


class _Polars(HeldTable):
    """The rows of a DataFrame of polars, which is `number` rows into what it belongs to."""

    def __init__(self, frame: polars.DataFrame, number: int = 0) -> None:
        check_names(frame.columns, "the polars DataFrame")
        self.names: Sequence[str] = frame.columns
        self._frame = frame
        self._number = number
        self._objects = {name for name, kind in frame.schema.items() if str(kind) == "Object"}
        """Columns of Python objects, in whose place polars gives Arrow their addresses."""
        self._goes_to_arrow = not isinstance(tried(frame.clear().to_arrow), Exception)

    def __len__(self) -> int:
        return int(self._frame.height)

    def rows(self, start: int, stop: int) -> list[dict[str, object]]:
        frame = self._frame.slice(start, stop - start)
        table = None if self._objects else tried(frame.to_arrow)
        if table is None or isinstance(table, Exception):  # a type that Arrow does not have, or no pyarrow
            rows: list[dict[str, object]] = frame.to_dicts()
            return rows
        return HeldArrow(table, self._number + start).rows(0, stop - start)

    def columns(self, names: Sequence[str], start: int, stop: int) -> Mapping[str, pa.Array | None]:
        sound = [name for name in names if name not in self._objects]
        found = tried(self._frame.slice(start, stop - start).select(sound).to_arrow) if self._goes_to_arrow else None
        if found is None or isinstance(found, Exception):
            return dict.fromkeys(names)
        return {**dict.fromkeys(names), **HeldArrow(found).columns(sound, 0, stop - start)}


class _Series(HeldTable):
    """The values of one column, which are rows.

    Args:
        table: has the column `text` alone.
        read: returns the values start..stop-1, if they are others than in the table.
    """

    names: Sequence[str] = ("text",)
    typed = False

    def __init__(self, table: HeldTable, read: Callable[[int, int], Sequence[object]] | None = None) -> None:
        self._table = table
        self._read = read

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, start: int, stop: int) -> Sequence[object]:
        if self._read is not None:
            return self._read(start, stop)
        return [row["text"] for row in cast("Sequence[Mapping[str, object]]", self._table.rows(start, stop))]

    def record(self, position: int, row: object) -> Record | Failed:
        return record_of(position, row)

    def columns(self, names: Sequence[str], start: int, stop: int) -> dict[str, pa.Array | None]:
        """The texts, if all values are some."""
        found = self._table.columns(["text"], start, stop)["text"]
        is_text = found is not None and str(found.type) in ("string", "large_string") and not found.null_count
        return dict.fromkeys(names, found if is_text else None)


def _arrow(table: pa.Table | pa.RecordBatch) -> Source:
    check_names(table.schema.names, "the Arrow table")
    return TableSource("arrow", HeldArrow(table))


def _arrow_column(column: pa.Array | pa.ChunkedArray) -> Source:
    table = importlib.import_module("pyarrow").table({"text": column})
    return TableSource("arrow", _Series(HeldArrow(table, shown="the Arrow array")))


def _pandas_column(column: pandas.Series) -> Source:
    return TableSource("pandas", _Series(_Pandas(column.to_frame("text").reset_index(drop=True))))


def _polars_column(column: polars.Series) -> Source:
    return TableSource("polars", _Series(_Polars(column.to_frame("text")), lambda a, b: column[a:b].to_list()))


def _arrow_stream(reader: pa.RecordBatchReader) -> Source:
    check_names(reader.schema.names, "the Arrow reader")
    return StreamSource(_batches(reader))


def _arrow_dataset(dataset: pa.dataset.Dataset) -> Source:
    check_names(dataset.schema.names, "the Arrow dataset")
    # Read-ahead causes most of a dataset's memory use.
    return _stream(lambda: dataset.to_batches(batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1))


def _lazy(frame: polars.LazyFrame) -> Source:
    if not hasattr(frame, "collect_batches"):  # polars before 1.34
        return _polars(frame.collect())

    def batches() -> Iterator[_Polars]:
        start = 0
        for batch in frame.collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True):
            yield _Polars(batch, start)
            start += batch.height

    return StreamSource(batches)


def _polars(frame: polars.DataFrame) -> Source:
    return TableSource("polars", _Polars(frame))


def _relation(relation: duckdb.DuckDBPyRelation) -> Source:
    check_names(relation.columns, "the DuckDB relation")
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    return _stream(lambda: read(_BATCH_ROWS))


def _stream(make: Callable[[], Iterable[pa.RecordBatch]]) -> Source:
    """A source of record batches that can be created again."""
    return StreamSource(lambda: _batches(make()))


def _batches(batches: Iterable[pa.RecordBatch]) -> Iterator[HeldArrow]:
    start = 0
    for batch in batches:
        yield HeldArrow(batch, start)
        start += batch.num_rows


def _exported(table: object) -> pa.RecordBatchReader:
    pyarrow = require("pyarrow", "io", "a table of this type")
    reader = pyarrow.RecordBatchReader.from_stream(table)
    check_names(reader.schema.names, f"the {type(table).__name__}")
    return reader


_KINDS: Mapping[str, Callable[[Any], Source]] = {
    "pandas.DataFrame": lambda frame: TableSource("pandas", _Pandas(frame)),
    "pandas.Series": _pandas_column,
    "polars.DataFrame": _polars,
    "polars.LazyFrame": _lazy,
    "polars.Series": _polars_column,
    "pyarrow.Table": _arrow,
    "pyarrow.RecordBatch": _arrow,
    "pyarrow.RecordBatchReader": _arrow_stream,
    "pyarrow.Dataset": _arrow_dataset,
    "pyarrow.Array": _arrow_column,
    "pyarrow.ChunkedArray": _arrow_column,
    "duckdb.DuckDBPyRelation": _relation,
}

TABLES = SourcePlugin(open=_open, extra="io")
