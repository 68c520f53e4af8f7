"""What an output is in every format: a plain value, or the error of its record. docs/formats.md has the table."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias, cast

from headrace.errors import HeadraceError, RecordError, line_of, tried
from headrace.io.base import class_names
from headrace.io.formats.cells import Cell, objects_exactly

LibraryValue: TypeAlias = Any
"""A value of any library, none of which is imported here: it is asked for the attributes that are read of it."""
_PLAIN = frozenset(
    (
        str, int, float, bool, type(None), bytes, datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
        decimal.Decimal,
    )
)  # fmt: skip
_FLOAT = {float}
_MOST_NUMBER_BYTES = 8
"""NumPy's longer numbers are of no format."""
_SIMPLE = frozenset((str, int, float, bool, bytes))
_ZONED = frozenset((datetime.datetime, datetime.time))
_WAY_OUT = "return numbers, texts, or lists and dicts of them"
_WAYS_OUT = {
    "pandas.DataFrame": "return its rows: .to_dict('records')",
    "polars.DataFrame": "return its rows: .to_dicts()",
    "pyarrow.Table": "return its rows: .to_pylist()",
    "builtins.complex": "return its real and imaginary parts",
    "numpy.complexfloating": "return its real and imaginary parts",
    "builtins.set": "return a list",
    "builtins.frozenset": "return a list",
    "pydantic.BaseModel": "return a dict: .model_dump()",
    "enum.Enum": "return its .value",
}
_NUMBERS = re.compile(r"(u?int(8|16|32|64)|float|double)\b.*|float\d+.*")
_MOMENTS = re.compile(r"datetime\(.*time_zone=none\)|timestamp\[\w+\].*|duration.*")
"""Types of columns of pandas and polars, in lower case, that NumPy has too; it has no null among numbers."""


def plain(value: object, name: str = "the output") -> object:
    """A value as all formats take it.

    That is null, a boolean, number or text, bytes, a date, time, duration, Decimal or UUID, a NumPy array of booleans
    or real numbers, or a list or dict of these. Numbers keep their value, and arrays their type; tensors of 16 and
    fewer bits become float32.

    Args:
        name: of the value, for the message.

    Raises:
        RecordError: it has no meaning in a file, such as a function, or cannot be read.
    """
    if type(value) in _PLAIN:
        return value
    try:
        return _plain(value, top=True)
    except HeadraceError as error:
        raise RecordError(f"{name} is or holds {error}") from error
    except RecursionError:
        raise RecordError(f"{name} is nested too deep, or holds itself") from None


def as_python(value: LibraryValue) -> LibraryValue:
    """A plain value without NumPy's types, for stores that take Python objects.

    Raises:
        RecordError: a time has nanoseconds, which Python's types would cut.
    """
    if isinstance(value, dict):
        return {name: as_python(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return value if _PLAIN.issuperset(map(type, value)) else [as_python(inner) for inner in value]
    if type(value) in _PLAIN or not hasattr(value, "dtype"):
        return value
    if value.dtype.kind not in "mM":
        return value.tolist()
    found = value.astype(f"{value.dtype.kind}8[us]")
    if found != value or type(found.item()) is int:
        raise RecordError(f"the time {value} has no exact value in microseconds, which tables hold; make it a text")
    return found.item()


def rows_of_array(values: LibraryValue) -> LibraryValue:
    """The array of NumPy that values are in, or lists of floats could be in: of numbers in one or two dimensions, else
    None.

    Its rows are plain values: numbers, or vectors.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and _are_vectors(values):
        return numpy.array(values)
    if numpy is None or type(values) is not numpy.ndarray or values.ndim not in (1, 2):
        return None
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > _MOST_NUMBER_BYTES:
        return None
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _are_vectors(values: LibraryValue) -> bool:
    """Whether it is a list of lists of floats, all of one length."""
    if type(values) is not list or not values or type(values[0]) is not list or not values[0]:
        return False
    if set(map(type, values)) != {list} or len(set(map(len, values))) > 1:
        return False
    return all(set(map(type, value)) == _FLOAT for value in values)


def are_plain(values: Sequence[object]) -> bool:
    """Whether `plain` would return each of the values at once."""
    return _PLAIN.issuperset(map(type, values))


def of_one_simple_type(values: Sequence[object]) -> bool:
    """Whether all values are texts, all are booleans, and so on; some may be null."""
    types = set(map(type, values)) - {type(None)}
    return len(types) == 1 and types <= _SIMPLE


def by_key(dicts: Sequence[object]) -> dict[str, tuple[object, ...]] | None:
    """The values of dicts with the same texts as keys, in one order, by key; None if they are others."""
    if set(map(type, dicts)) != {dict}:
        return None
    keys = set(map(tuple, cast("Sequence[dict[object, object]]", dicts)))
    names = keys.pop()
    if keys or not names or set(map(type, names)) != {str}:
        return None
    values = zip(*map(dict.values, cast("Sequence[dict[object, object]]", dicts)), strict=True)
    return dict(zip(cast("tuple[str, ...]", names), values, strict=True))


class _SeenShape:
    """The types that plain values have at one place: at the top, under one key of a dict, or in a list."""

    __slots__ = ("items", "keys", "types")

    def __init__(self) -> None:
        self.types: set[object] = set()
        self.keys: dict[str, _SeenShape] = {}
        self.items: _SeenShape | None = None

    def look(self, value: LibraryValue) -> None:
        """Note the types in a value. Those of arrays are their numbers' types."""
        kind = type(value)
        if kind is dict:
            for name, inner in value.items():
                self.keys.setdefault(name, _SeenShape()).look(inner)
        elif kind is list or getattr(value, "ndim", None):
            self.items = self.items or _SeenShape()
            if kind is not list:
                self.items.types.add(str(value.dtype))
            elif (types := set(map(type, value))) <= _PLAIN and not types & _ZONED:
                self.items.types |= types
            else:
                for inner in value:
                    self.items.look(inner)
        else:
            self.types.add((kind, value.tzinfo is None) if kind in _ZONED else kind)

    def holds(self) -> bool:
        """Whether one column holds all values as they are: whole numbers may become floats, which pyarrow checks."""
        types = self.types - {type(None)}
        if (datetime.time, False) in types:  # Arrow has no time of day with a zone
            return False
        numbers = {one for one in types if one in (int, float) or (isinstance(one, str) and one != "bool")}
        if len(types) > 1 and types not in (numbers, {int, decimal.Decimal}, {bool, "bool"}):
            return False
        return all(inner.holds() for inner in self._inner())

    def mixes_arrays(self) -> bool:
        """Whether there are arrays of several types of numbers at one place."""
        several = sum(isinstance(one, str) for one in self.types) > 1
        return several or any(inner.mixes_arrays() for inner in self._inner())

    def _inner(self) -> Sequence[_SeenShape]:
        return (*self.keys.values(), *([] if self.items is None else [self.items]))


def for_arrow(values: list[LibraryValue]) -> list[LibraryValue]:
    """Plain values for pyarrow to find their type.

    Raises:
        TypeError: they have several types, of which pyarrow would change one without a word.
    """
    if of_one_simple_type(values):
        return values
    shape = _SeenShape()
    for value in values:
        shape.look(value)
    if not shape.holds():
        raise TypeError("the values are of several types")
    # pyarrow takes one type of arrays, of one dimension; of several, its result depends on the order.
    several = shape.mixes_arrays() or any(getattr(value, "ndim", 0) > 1 for value in values)
    return [_with_lists(value) for value in values] if several else values


def _with_lists(value: LibraryValue) -> object:
    if isinstance(value, dict):
        return {name: _with_lists(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_lists(inner) for inner in value]
    return value.tolist() if getattr(value, "ndim", 0) else value


def _plain(value: LibraryValue, *, top: bool = False) -> object:
    """The plain value, without the name for messages. One frame per level: values may be nested deep.

    Raises:
        HeadraceError: as a phrase: what it is, and the way out.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            return value if kind is list else list(value)
        items = []
        for inner in value:
            items.append(inner if type(inner) in _PLAIN else _plain(inner))  # noqa: PERF401 - see above
        return items
    numpy = None if kind is dict else sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:  # the usual one, for which the next line is slow
        return _array(value, top=top)
    if kind is dict or isinstance(value, Mapping):
        row: dict[str, object] = {}
        for key, inner in value.items():
            row[key if type(key) is str else _key(key)] = inner if type(inner) in _PLAIN else _plain(inner)
        if len(row) < len(value):
            raise HeadraceError("a dict with keys that are the same as text; return other keys")
        return row
    return _other(value, top=top)


def _key(key: object) -> str:
    """A key of a dict as text, as JSON has it."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return repr(int(key) if isinstance(key, int) else float(key))
    if hasattr(key, "item") and getattr(key, "ndim", 1) == 0:
        return _key(key.item())
    raise HeadraceError(f"a dict with a key of type {type(key).__name__}; return texts as keys")


def _other(value: LibraryValue, *, top: bool) -> object:
    """A value of a type that is not Python's own."""
    if type(value) is Cell:
        return _plain(value.python(), top=top)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return _scalar(value)
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _array(value, top=top)
    if torch is not None and isinstance(value, torch.Tensor):
        return _array(_tensor(value, torch), top=top)
    return _standard(value, top=top)


def _standard(value: LibraryValue, *, top: bool) -> object:
    """A value of a subclass of Python's own types, or of its standard library."""
    if isinstance(value, datetime.datetime):
        return _moment(value)
    if isinstance(value, datetime.timedelta):  # of pandas
        return value.to_timedelta64() if hasattr(value, "to_timedelta64") else value
    if isinstance(value, (str, int, float, bytes)):
        return _base(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, uuid.UUID):
        return value if top else str(value)  # pyarrow finds the type at the top only
    if isinstance(value, (datetime.date, datetime.time, decimal.Decimal)):
        return value
    return _of_library(value, top=top)


def _base(value: str | int | float | bytes) -> object:
    """The plain value of an enum's member or another subclass."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    return int(value) if isinstance(value, int) else float(value)


def _of_library(value: LibraryValue, *, top: bool) -> object:
    """The values of an array or column of another library."""
    names = list(class_names(value))
    if names[0] in ("pandas.NAType", "pandas.NaTType"):
        return None
    if names[0] in ("pandas.Period", "pandas.Interval"):
        return str(value)
    refusal = next((_WAYS_OUT[name] for name in names if name in _WAYS_OUT), None)
    if refusal is None and not isinstance(value, type):
        read = _reader(value, names)
        if read is not None:
            return _plain(_called(read), top=top)
    if refusal is None and hasattr(value, "__dataclass_fields__"):
        refusal = "return a dict: dataclasses.asdict"
    raise _refusal(value, refusal or _WAY_OUT)


def _reader(value: LibraryValue, names: Sequence[str]) -> Callable[[], object] | None:
    """What reads an array or column as an array of NumPy or a list; None if it is neither."""
    if any(name.startswith("pyarrow.") for name in names) and hasattr(value, "type"):
        return lambda: objects_exactly(value)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        import numpy

        if _is_of_objects(value):
            return lambda: _objects(value)
        if (found := _called(lambda: numpy.asarray(value))).dtype.kind != "V":
            return lambda: found
    return getattr(value, "tolist", None) or getattr(value, "to_list", None)


def _is_of_objects(column: LibraryValue) -> bool:
    """Whether NumPy cannot hold a column of pandas or polars: it lacks its type, or null."""
    import numpy

    kind = column.dtype
    nulls = getattr(column, "null_count", None) or getattr(column, "isna", None)
    if isinstance(kind, numpy.dtype) or nulls is None or _MOMENTS.fullmatch(str(kind).lower()):
        return False
    return not _NUMBERS.fullmatch(str(kind).lower()) or bool(numpy.any(nulls()))


def _objects(column: LibraryValue) -> object:
    """The values of a column of pandas or polars as Python objects, by way of Arrow if it has its type."""
    kind = str(column.dtype)
    if kind.endswith("[pyarrow]"):
        import pyarrow as pa

        return objects_exactly(pa.array(column))
    if hasattr(column, "to_arrow") and kind not in ("Object", "Int128", "UInt128"):
        with contextlib.suppress(ImportError):  # polars needs no pyarrow
            return objects_exactly(column.to_arrow())
    missing = getattr(column.dtype, "na_value", None)
    values = column.tolist() if hasattr(column, "tolist") else column.to_list()
    return [None if value is missing else value for value in values]


def _called(method: Callable[[], LibraryValue]) -> LibraryValue:
    found = tried(method)
    if isinstance(found, Exception):
        words = f"{type(found).__name__}: {line_of(found)}"
        raise HeadraceError(f"a value that cannot be read: {words}; {_WAY_OUT}") from found
    return found


def _refusal(value: object, way_out: str) -> HeadraceError:
    if isinstance(value, type):
        return HeadraceError(f"the class {value.__name__}, which no format can hold; {way_out}")
    return HeadraceError(f"a value of type {type(value).__name__}, which no format can hold; {way_out}")


def _scalar(value: LibraryValue) -> object:
    """A scalar of NumPy as a number of Python; moments finer than Python's stay."""
    kind = value.dtype.kind
    if kind in "mM":
        if str(value) == "NaT":
            return None
        found = value.item()
        return value if type(found) is int else found
    if kind == "c":
        raise _refusal(value, _WAYS_OUT["builtins.complex"])
    if kind == "V" or (kind == "f" and value.dtype.itemsize > 8):
        raise _refusal(value, _WAY_OUT)
    return value.item()


def _moment(value: LibraryValue) -> object:
    """A datetime; one of pandas keeps its nanoseconds."""
    if type(value).__name__ == "NaTType":
        return None
    if not hasattr(value, "to_datetime64"):
        return value
    if value.tzinfo is None:
        return value.to_datetime64()
    if value.nanosecond:
        raise HeadraceError(
            "a Timestamp with a time zone and nanoseconds; return it in UTC without a time zone: .tz_convert(None)"
        )
    return value.to_pydatetime()


def _tensor(value: LibraryValue, torch: ModuleType) -> LibraryValue:
    """A tensor as a NumPy array, on the CPU."""
    for wrong, way_out in (
        (value.layout != torch.strided, "return .to_dense()"),
        (value.is_nested, "return a list of tensors: .unbind()"),
        (value.is_quantized, "return .dequantize()"),
        (value.is_complex(), "return its real and imaginary parts: torch.view_as_real"),
        (value.is_meta, "return a tensor that holds numbers"),
    ):
        if wrong:
            kind = f"{value.dtype}, {value.layout}".replace("torch.", "")
            raise HeadraceError(f"a tensor of {kind}, which no format can hold; {way_out}")
    value = value.detach().resolve_neg().cpu()
    if value.is_floating_point() and value.element_size() < 4:
        value = value.float()
    return _called(value.numpy)


def _array(value: LibraryValue, *, top: bool) -> object:
    """A NumPy array of numbers as it is, or in rows within another value; one of others as a list."""
    kind = value.dtype.kind
    if not value.ndim:
        found = value[()]
        return _plain(found) if found is not value else None
    if kind in "OUSTmM" or hasattr(value, "mask"):
        return _plain(value.tolist() if kind not in "mM" else list(value))
    if kind == "c":
        raise HeadraceError("an array of complex numbers, which no format can hold; return real and imaginary parts")
    if kind not in "fiub" or value.dtype.itemsize > _MOST_NUMBER_BYTES:
        raise HeadraceError(f"an array of {value.dtype}, which no format can hold; {_WAY_OUT}")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return value if top or value.ndim == 1 else [_array(row, top=False) for row in value]
