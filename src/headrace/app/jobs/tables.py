"""Jobs whose result is a table of pandas, polars or Arrow, an array, or a list of rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headrace.errors import ConfigError, JobError, nearest
from headrace.extras import require
from headrace.io.base import class_names
from headrace.io.sinks.callback_sink import Rows
from headrace.io.sinks.targets import find_target
from headrace.io.storage.atomic import remove_throwaway, throwaway_folder
from headrace.jobs.settings import JobSettings, check_values

if TYPE_CHECKING:
    import numpy
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

logger = logging.getLogger("headrace")

AnyTable: TypeAlias = Any
"""A table of one of these libraries."""
ListedRow: TypeAlias = dict[str, Any]
"""An id, the columns that are kept and the output; or an id and `error`, with its `reason` and `message`."""
TableKind: TypeAlias = Literal["pandas", "polars", "arrow", "numpy"]
_KEPT = "finished records are kept"
"""What errors say of jobs that can be resumed."""
_POLARS_DIGITS = 38
"""The most digits of a decimal in polars."""
_MODULES = {"pandas": "pandas", "polars": "polars", "arrow": "pyarrow", "numpy": "numpy"}
_KINDS = (*_MODULES, "list")


def is_table_kind(sink: object) -> bool:
    """Whether a sink is the name of a kind of table, or of a list of rows."""
    return isinstance(sink, str) and sink in _KINDS


def refuse_unknown_kind(settings: JobSettings) -> None:
    """Check a sink that may be a misspelt kind of table, as it has nothing of a file's name.

    Raises:
        ConfigError: it is no output; the message lists files and kinds of tables.
    """
    sink = settings.sink
    if isinstance(sink, str) and sink.isidentifier() and not is_table_kind(sink):
        try:
            find_target(sink, settings.output_format)
        except ConfigError as error:
            kinds = ", ".join(_KINDS)
            raise ConfigError(f"{error}; for a table, the sink is one of {kinds}{nearest(sink, _KINDS)}") from None


def run_to_table(settings: JobSettings, execute: Callable[[JobSettings], object]) -> object:
    """Run a job and return its rows, in input order, as the table or list that its sink names.

    Each record has a row. In a table, a failed record has nulls, and its error in the column `error`, which is present
    only if some record failed. An array has the outputs alone. The result for a whole pandas DataFrame or Series has
    its index. The rows of a list are those that a function gets as a sink.

    Raises:
        ConfigError: the library is not installed, or a setting needs an output that stays.
        JobError: see `execute`.
    """
    check_values(settings)
    kind = str(settings.sink)
    if settings.retry or settings.output_format:
        raise ConfigError(
            f"sink={kind!r} returns its rows and keeps no files: leave out ``retry`` and ``output_format``"
        )
    if kind == "numpy" and settings.flatten:
        raise ConfigError("sink='numpy' returns one column, the outputs: leave out ``flatten``, or take sink='arrow'")
    if kind == "list":
        rows = Rows()
        _execute(replace(settings, sink=rows), kind, execute)
        return rows.in_order()
    require("pyarrow.parquet", "io", f"sink={kind!r}")
    library = require(_MODULES[kind], "io", f"sink={kind!r}", f" {_MODULES[kind]}")
    if "error" in settings.keep_columns:
        raise ConfigError("cannot keep column 'error': the result has the errors of failed records in it; rename it")
    folder = throwaway_folder()
    try:
        output = folder / "table.parquet"
        _execute(replace(settings, sink=output), kind, execute)
        table = _read(output)
        errors = output.with_name("table.errors.jsonl")
        if errors.exists():
            table = _with_failures(table, errors)
    finally:
        remove_throwaway(folder)
    if kind == "arrow":
        return table
    if kind == "numpy":
        return _array(table)
    if kind == "polars":
        return library.from_arrow(_for_polars(table))
    frame = _frame(table)
    index = _index_of(settings)
    return frame if index is None else frame.set_axis(index)


def _execute(settings: JobSettings, kind: str, execute: Callable[[JobSettings], object]) -> None:
    try:
        execute(settings)
    except JobError as error:
        said, kept, _ = str(error).partition(_KEPT)  # what follows says how to continue
        error.args = (said + (kept and f"sink={kind!r} keeps nothing; a file would keep finished records"),)
        raise


def _array(table: pa.Table) -> NDArray[numpy.generic]:
    """The outputs: vectors of one length as rows, numbers as they are, all others as Python objects.

    Failed records are NaN, which makes floats of integers, or None.
    """
    import numpy
    import pyarrow as pa

    types = pa.types
    [output] = [name for name in table.column_names if name != "error"][-1:]
    column = table[output].combine_chunks()
    kind = column.type
    if types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        there = column.is_valid().to_numpy(zero_copy_only=False)
        values: NDArray[numpy.generic] = (
            column.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)
        )
        if there.all():
            return values
        found = numpy.full((len(column), kind.list_size), numpy.nan, numpy.result_type(values, numpy.float16))
        found[there] = values
        return found
    if _is_number(kind):
        numbers: NDArray[numpy.generic] = column.to_numpy(zero_copy_only=False)
        return numbers
    objects = numpy.empty(len(column), object)
    objects[:] = column.to_pylist()
    return objects


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _frame(table: pa.Table) -> pd.DataFrame:
    """The table as a DataFrame. Null rows of objects do not turn the integers in other rows into floats."""
    import pyarrow as pa

    try:
        frame = table.to_pandas(split_blocks=True)
    except (pa.ArrowException, LookupError):  # a column of a type that pandas does not have
        frame = _by_columns(table)
    for place, column in enumerate(table.columns):
        if pa.types.is_struct(column.type) and column.null_count:
            found = iter(column.drop_null().to_pandas())
            frame.isetitem(place, [next(found) if there else None for there in column.is_valid().to_pylist()])
    return frame


def _for_polars(table: pa.Table) -> pa.Table:
    """The table with other types for columns that polars has no type for, which it says."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        kind, other = field.type, None
        if pa.types.is_decimal(kind) and kind.precision > _POLARS_DIGITS:
            other = pa.string()
        elif pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
            other = pa.large_list(kind.value_field)
        elif pa.types.is_timestamp(kind) and (kind.tz or "").startswith(("+", "-")):
            other = pa.timestamp(kind.unit, "UTC")
        if other is not None:
            logger.warning("headrace: polars has no type for column %r, %s: it is %s", field.name, kind, other)
            table = table.set_column(place, field.name, table[field.name].cast(other))
    return table


def _by_columns(table: pa.Table) -> pd.DataFrame:
    """The table as a DataFrame, with Arrow's own types in the columns that pandas has no other type for."""
    import pyarrow as pa

    library = require("pandas", "io", "sink='pandas'", " pandas")

    def series(column: pa.ChunkedArray) -> pd.Series:
        try:
            return column.to_pandas()
        except (pa.ArrowException, LookupError):
            return library.Series(column, dtype=library.ArrowDtype(column.type))

    return library.DataFrame({name: series(table[name]) for name in table.column_names})


def _read(output: Path) -> pa.Table:
    import pyarrow.parquet as pq

    # The file is removed below; a mapping of it would keep its disk space.
    table: pa.Table = pq.read_table(output, memory_map=False)
    return table


def _with_failures(table: pa.Table, errors: Path) -> pa.Table:
    """The rows with a row of nulls at each failed record, and the errors as the last column."""
    import pyarrow as pa

    with errors.open("rb") as lines:
        failed = {letter["position"]: letter for letter in map(json.loads, lines)}
    total = table.num_rows + len(failed)
    logger.warning("headrace: %d of %d records failed: see the column 'error'", len(failed), total)
    found = iter(range(table.num_rows))
    places = pa.array((None if position in failed else next(found) for position in range(total)), pa.int64())
    told = (f"{failed[at]['reason']}: {failed[at]['message']}" if at in failed else None for at in range(total))
    ids = (failed[at]["id"] if at in failed else None for at in range(total))
    rows = table.take(places)
    rows = rows.set_column(0, "id", _filled(rows["id"], list(ids)))
    return rows.append_column("error", pa.array(told, pa.string()))


def _filled(column: pa.ChunkedArray, ids: list[object]) -> pa.ChunkedArray:
    """The ids, those of failed records too; as texts if they have no type in common."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return pc.coalesce(column, pa.array(ids, column.type))
    except (pa.ArrowException, TypeError, OverflowError):
        texts = pa.array([None if one is None else str(one) for one in ids], pa.string())
        return pc.coalesce(column.cast(pa.string()), texts)


def _index_of(settings: JobSettings) -> object:
    """The index of a pandas source, if all of its rows, or the first ones, are in the result."""
    source, chosen = settings.source, settings.selection
    is_pandas = any(name.startswith("pandas.") for name in class_names(source))
    if not is_pandas or not hasattr(source, "index") or chosen.shard is not None or chosen.sample is not None:
        return None
    return source.index[: chosen.limit]
