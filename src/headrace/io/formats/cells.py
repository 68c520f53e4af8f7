"""Values of Arrow tables: as Python objects for the job, and exactly, with their types, for columns that are copied."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from headrace.columns import Column
from headrace.errors import HeadraceError, line_of, tried
from headrace.extras import lazy
from headrace.records import TableRow, Unreadable

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    ArrowColumns: TypeAlias = Mapping[str, pa.Array | None]
    """Columns by name; None for one without a type of Arrow."""
else:
    pa, pc = lazy("pyarrow"), lazy("pyarrow.compute")


class Cell:
    """A value of a table, with its type."""

    __slots__ = ("column", "place", "reason")

    def __init__(self, column: pa.Array, place: int, reason: str = "") -> None:
        self.column = column
        self.place = place
        self.reason = reason
        """Why Python cannot hold it, if so."""

    def exact(self) -> pa.Scalar:
        """The value as pyarrow has it."""
        return self.column[self.place]

    def python(self) -> object:
        """The value as a Python object; times in nanoseconds as text if Python's types would cut them.

        Raises:
            HeadraceError: Python cannot hold it; the words are those of a noun.
        """
        found = tried(lambda: _python(self.exact()))
        if isinstance(found, Exception):
            raise HeadraceError(
                f"a value of type {self.column.type} that cannot be written as text: {self.reason or _words(found)}"
            ) from found
        return found

    def inner(self, keys: Sequence[str]) -> Cell:
        return Cell(pc.struct_field(self.column.slice(self.place, 1), list(keys)), 0)

    def __reduce__(self) -> tuple[type[Cell], tuple[pa.Array, int, str]]:
        """Support pickling, without the rest of the column."""
        one = self.column.slice(self.place, 1)
        try:
            one = one.take(pa.array([0]))
        except pa.ArrowException:  # a type that cannot be copied so, such as a string view
            pass
        return Cell, (one, 0, self.reason)


class _RowCells(Mapping[str, object]):
    """The cells of one row of a table that many rows share."""

    __slots__ = ("_columns", "_place")

    def __init__(self, columns: ArrowColumns, place: int) -> None:
        self._columns = columns
        self._place = place

    def __getitem__(self, name: str) -> Cell:
        column = self._columns[name]
        if column is None:
            raise KeyError(name)
        return Cell(column, self._place)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._columns if self._columns[name] is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_integers(column: object) -> bool:
    """Whether it is an Arrow array of integers."""
    return is_arrow(column) and bool(pa.types.is_integer(column.type))


def row_of_nulls(columns: Mapping[str, object]) -> TableRow:
    """A row of a table with these columns, which are Arrow arrays if they have a type, and without a value."""
    nulls = {name: pa.nulls(1, column.type) if is_arrow(column) else None for name, column in columns.items()}
    return TableRow(dict.fromkeys(columns), _RowCells(nulls, 0))


class LazyColumns(Mapping[str, object]):
    """The columns of some rows as Arrow arrays, each made when it is first asked for; None for one without a type.

    Args:
        make: the array of a column by its name.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], pa.Array | None]) -> None:
        self._names = frozenset(names)
        self._make = make
        self._made: dict[str, pa.Array | None] = {}

    def __getitem__(self, name: str) -> pa.Array | None:
        if name not in self._made:
            if name not in self._names:
                raise KeyError(name)
            self._made[name] = self._make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def rows_of(batch: pa.RecordBatch, table: str, first: int) -> list[dict[str, object]]:
    """The rows of a record batch. A value that Python cannot hold becomes an `Unreadable`.

    Args:
        table: what they are from, for messages.
        first: the number of the first row there.
    """
    names, columns = batch.schema.names, batch.columns
    numbers = range(first, first + batch.num_rows)
    values = [objects_of(column, table, numbers) for column in columns]
    rows: Iterable[Iterable[object]] = zip(*values, strict=True) if values else [()] * batch.num_rows
    return rows_with([zip(names, row, strict=True) for row in rows], dict(zip(names, columns, strict=True)))


def rows_with(
    rows: Sequence[Iterable[tuple[str, object]]], columns: Mapping[str, pa.Array | None]
) -> list[dict[str, object]]:
    """Rows of names and Python objects, with the columns that hold these exactly."""
    return [TableRow(row, _RowCells(columns, place)) for place, row in enumerate(rows)]


def runs_of(values: Sequence[Any]) -> list[pa.Array | list[object]]:
    """Cells as slices of their columns, with lists of the other values between them."""
    runs: list[tuple[pa.Array | None, int, int]] = []
    for number, value in enumerate(values):
        column, place = (value.column, value.place) if type(value) is Cell else (None, number)
        if runs and runs[-1][0] is column and runs[-1][2] == place:
            runs[-1] = (column, runs[-1][1], place + 1)
        else:
            runs.append((column, place, place + 1))
    return [
        list(values[start:end]) if column is None else column.slice(start, end - start) for column, start, end in runs
    ]


def exact_values(column: Column) -> Sequence[object]:
    """The values of a column as Python objects. Raises Exception: Python cannot hold one of them as it is."""
    values: Sequence[object] = objects_exactly(column) if is_arrow(column) else column
    return values


def kept_values(column: Column, *, typed: bool) -> Sequence[object]:
    """The values of a kept column as a row has them: cells if it is a table's, but for types that Python has too.

    Args:
        typed: see `headrace.columns.FinishedRows.typed`.

    Raises:
        Exception: Python cannot hold one of them as it is.
    """
    if typed and is_arrow(column) and not is_of_python(column.type):
        return [Cell(column, place) for place in range(len(column))]
    return exact_values(column)


@functools.lru_cache(maxsize=256)
def is_of_python(kind: pa.DataType) -> bool:
    """Whether `Cell.python` gives values of a type as any other conversion does."""
    types = pa.types
    return any(is_one(kind) for is_one in (types.is_string, types.is_boolean, types.is_integer, types.is_null)) or (
        kind in (pa.float32(), pa.float64())
    )


def is_arrow(column: object) -> TypeGuard[pa.Array]:
    return hasattr(column, "null_count")


def texts_of(column: Iterable[pa.Scalar]) -> list[object]:
    """The values of a column that becomes text, as Python objects; as number and type where Python cannot hold them."""
    found = [(value, tried(_python, value)) for value in column]
    return [f"{getattr(one, 'value', one)} {one.type}" if isinstance(text, Exception) else text for one, text in found]


def objects_exactly(values: Any) -> Any:
    """The Python objects of an Arrow array or scalar. Raises Exception: Python cannot hold one of them as it is."""
    narrow = _in_microseconds(values.type)
    if narrow is not None:
        values.cast(narrow)  # raises where `as_py` would cut
    return values.as_py() if hasattr(values, "as_py") else values.to_pylist()


def objects_of(column: pa.Array, table: str, rows: Sequence[int]) -> list[object]:
    """The values of a column as Python objects, with `Unreadable` for those that Python cannot hold.

    Args:
        table: what they are from, for messages.
        rows: the number of each value's row there.
    """
    found: list[object] | Exception = tried(objects_exactly, column)
    if not isinstance(found, Exception):
        return found
    return [_object(column, place, table, row) for place, row in enumerate(rows)]


def _object(column: pa.Array, place: int, table: str, row: int) -> object:
    found = tried(objects_exactly, column.slice(place, 1))
    if not isinstance(found, Exception):
        return found[0]
    reason = f"{_words(found)} ({table}, row {row:,} counted from 0, type {column.type})"
    return Unreadable(reason, is_exact=not _holds_text(column.type))


def _words(error: Exception) -> str:
    words = line_of(error)
    if "zoneinfo" in words:  # pyarrow's words, whatever is wrong with the zone
        return "its time zone is not known here; install tzdata if it exists, or write the column in UTC"
    return words


@functools.lru_cache(maxsize=256)
def _in_microseconds(kind: pa.DataType) -> pa.DataType | None:
    """The type with times of day in microseconds, as Python has them; None if it has none in nanoseconds."""
    if kind == pa.time64("ns"):
        return pa.time64("us")
    if pa.types.is_struct(kind):
        inner = [_in_microseconds(field.type) for field in kind]
        return (
            pa.struct([f.with_type(found or f.type) for f, found in zip(kind, inner, strict=True)])
            if any(inner)
            else None
        )
    if pa.types.is_map(kind):
        key, item = _in_microseconds(kind.key_type), _in_microseconds(kind.item_type)
        return pa.map_(key or kind.key_type, item or kind.item_type) if key or item else None
    make = _lists().get(kind.id)
    if make is None or (found := _in_microseconds(kind.value_type)) is None:
        return None
    return make(kind, kind.value_field.with_type(found))


@functools.lru_cache(maxsize=256)
def _holds_text(kind: pa.DataType) -> bool:
    """Whether a type has text in it, which may not be valid."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _holds_text(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_text(kind.storage_type)
    if kind.num_fields:
        return any(_holds_text(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _python(scalar: pa.Scalar) -> object:
    """A value as Python objects, with times in nanoseconds as text where Python would cut them."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ExtensionScalar):
        if kind.extension_name in ("pandas.period", "pandas.interval"):  # "2024-01", not months since 1970
            stored = pa.ExtensionArray.from_storage(kind, pa.array([scalar.value], kind.storage_type))
            return str(kind.to_pandas_dtype().__from_arrow__(stored)[0])
        return scalar.as_py()
    if isinstance(scalar, pa.DictionaryScalar):
        return _python(scalar.value)
    if pa.types.is_struct(kind):
        return {name: _python(inner) for name, inner in scalar.items()}
    if pa.types.is_map(kind):
        return [[_python(pair["key"]), _python(pair["value"])] for pair in scalar.values]
    if kind.id in _lists():
        return [_python(inner) for inner in scalar.values]
    if (pa.types.is_timestamp(kind) or kind == pa.time64("ns")) and kind.unit == "ns":
        return _nanoseconds(scalar)
    return scalar.as_py()


def _nanoseconds(scalar: pa.Scalar) -> object:
    """A timestamp or time of day in nanoseconds: text in ISO 8601 with nine digits where Python would cut it."""
    whole, rest = divmod(scalar.value, 1000)
    is_time = pa.types.is_time(scalar.type)
    kind = pa.time64("us") if is_time else pa.timestamp("us", scalar.type.tz)
    moment: datetime.datetime | datetime.time = pa.scalar(whole, kind).as_py()
    if not rest:
        return moment
    text = moment.isoformat(timespec="microseconds")
    end = text.index(".") + 7  # what follows is the time zone
    return f"{text[:end]}{rest:03d}{text[end:]}"


@functools.cache
def _lists() -> Mapping[int, Callable[[pa.DataType, pa.Field], pa.DataType]]:
    """How to make a type of lists like another, with other values, by the id of the type."""
    return {
        pa.list_(pa.null()).id: lambda _, inner: pa.list_(inner),
        pa.large_list(pa.null()).id: lambda _, inner: pa.large_list(inner),
        pa.list_(pa.null(), 1).id: lambda kind, inner: pa.list_(inner, kind.list_size),
        pa.list_view(pa.null()).id: lambda _, inner: pa.list_view(inner),
        pa.large_list_view(pa.null()).id: lambda _, inner: pa.large_list_view(inner),
    }
