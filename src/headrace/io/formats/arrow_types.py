"""Types of Arrow columns: which Parquet takes, and which hold the values of others."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING

from headrace.errors import tried
from headrace.extras import lazy

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = lazy("pyarrow"), lazy("pyarrow.parquet")

_DECIMAL128_DIGITS = 38
_DECIMAL256_DIGITS = 76


def widest_type(kind: pa.DataType) -> pa.DataType:
    """A type that later values fit too: text for null, decimals with the maximum number of digits."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_decimal(kind):
        small = kind.precision <= _DECIMAL128_DIGITS
        return pa.decimal128(_DECIMAL128_DIGITS, kind.scale) if small else pa.decimal256(_DECIMAL256_DIGITS, kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(widest_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(widest_type(kind.value_type)))
    return kind


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type that holds the values of both as they are; text if no other does."""
    are_vectors = pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other)
    if are_vectors and one.list_size == other.list_size:
        number = common_type(one.value_type, other.value_type)
        if number != pa.string():
            return pa.list_(one.value_field.with_type(number), one.list_size)
    one, other = (pa.list_(k.value_type) if pa.types.is_fixed_size_list(k) else k for k in (one, other))
    try:
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return pa.string()
    return pa.string() if parquet_problem(common) or _changes(one, common) or _changes(other, common) else common


def _changes(kind: pa.DataType, common: pa.DataType) -> bool:
    """Whether pyarrow's common type changes values of a type: text into bytes, or decimals into floats."""
    if pa.types.is_struct(kind) and pa.types.is_struct(common):
        return any(_changes(field.type, common.field(field.name).type) for field in kind)
    if hasattr(kind, "value_type") and hasattr(common, "value_type"):
        return _changes(kind.value_type, common.value_type)
    if pa.types.is_decimal(kind):
        return bool(pa.types.is_floating(common))
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return is_text and ("binary" in str(common))


def held_type(kind: pa.DataType) -> pa.DataType:
    """The type in which Parquet gets a kept column: dictionaries have 32-bit indices, for the values of all parts."""
    if pa.types.is_dictionary(kind):
        wide = kind.index_type in (pa.int32(), pa.int64())
        return kind if wide else pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return kind


def nests_dictionary(kind: pa.DataType) -> bool:
    """Whether a type has a dictionary within it; its values are copied, as those of many parts may be too many."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pa.types.is_dictionary(one) or nests_dictionary(one) for one in inner)


@functools.lru_cache(maxsize=256)
def parquet_problem(kind: pa.DataType) -> str:
    """Why a column of this type cannot be written to Parquet and read; empty if it can."""
    found = read_back(kind)
    return found if isinstance(found, str) else ""


@functools.lru_cache(maxsize=256)
def read_back(kind: pa.DataType) -> pa.DataType | str:
    """The type of such a column after it was written to Parquet and read; or why that cannot be done."""
    buffer = io.BytesIO()

    def written() -> pa.DataType:
        pq.write_table(pa.table([pa.nulls(0, kind)], [""]), buffer)
        return pq.read_schema(io.BytesIO(buffer.getvalue())).field(0).type

    found = tried(written)
    return " ".join(str(found).split()) or type(found).__name__ if isinstance(found, Exception) else found
