"""Types of Arrow columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_DECIMAL128_DIGITS = 38
_DECIMAL256_DIGITS = 76


def widest_type(kind: pa.DataType) -> pa.DataType:
    """A type that later values fit too: text for null, decimals with the maximum number of digits."""
    import pyarrow as pa

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
