"""What of a table a job can take by column, without a look at its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import tried
from headrace.extras import lazy
from headrace.io.formats.arrow_memory import lengths_of
from headrace.io.storage.row_tables import SourceTable

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from headrace.columns import Column, RowTable
else:
    pa, pc = lazy("pyarrow"), lazy("pyarrow.compute")


def column_at(table: RowTable, name: str) -> pa.Array | None:
    """The values that `records.value_at` finds in the rows of a table, by column; None if its rows must be read."""
    column = table.column(name)
    if "." not in name:
        return column
    if column is not None:  # a row of JSON without it may have an inner value of that name
        return column if table.typed or not column.null_count else None
    if not (table.typed and isinstance(table, SourceTable) and table.lacks(name)):
        return None
    column_name, *keys = name.split(".")
    column = table.column(column_name)
    kind = None if column is None else column.type
    for key in keys:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(key) < 0:
            return None
        kind = kind.field(key).type
    return pc.struct_field(column, keys)


def plain(column: pa.Array | None) -> pa.Array | None:
    """The values of a column, without a dictionary."""
    if column is None or not (pa.types.is_dictionary(column.type) and _holds_texts(column.type.value_type)):
        return column
    return column.dictionary_decode()


def is_text(column: pa.Array) -> bool:
    """Whether each value is a text or null, and some are."""
    return _holds_texts(column.type) and column.null_count < len(column)


def is_numeric(column: pa.Array) -> bool:
    """Whether each value is a number, or a list of numbers or of such lists."""
    return not column.null_count and _holds_numbers(column.type)


def _holds_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _holds_numbers(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def nulls(column: pa.Array) -> list[int]:
    """The rows that have no value."""
    found: list[int] = (
        column.is_null().to_numpy(zero_copy_only=False).nonzero()[0].tolist() if column.null_count else []
    )
    return found


def holds_ids(column: pa.Array) -> bool:
    """Whether each value is an id, a text or an integer, or null."""
    return _holds_texts(column.type) or bool(pa.types.is_integer(column.type))


def can_be_kept(column: pa.Array | None, exact: bool, typed: bool) -> bool:
    """Whether the output takes the values as they are.

    Args:
        column: of the table; None if its rows must be read.
        exact: the output has the types of tables.
        typed: the type is that of a table; else it was found from the values.
    """
    if column is None:
        return False
    types, kind = pa.types, column.type
    if exact:
        return typed or not types.is_nested(kind)
    return bool(_holds_texts(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind))


def count_empty(column: pa.Array) -> int:
    """How many texts are empty; none of other values."""
    if not _holds_texts(column.type):
        return 0
    filled = column.drop_null() if column.null_count else column
    return int((lengths_of(filled) == 0).sum())


def _holds_texts(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def cut_out(column: Column) -> Column:
    """The column without the memory of the one that it is a part of, all of which Arrow would pickle."""
    if isinstance(column, Sequence) or column.get_total_buffer_size() <= 2 * column.nbytes:
        return column
    found = tried(lambda: pa.concat_arrays([column]))
    return column if isinstance(found, Exception) else found
