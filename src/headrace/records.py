"""Records of a job, their outcomes, and a check for text values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from headrace.errors import ProcessError, RecordError, text_of

Json: TypeAlias = Any
"""A value as JSON has it, of a form that its reader knows."""
JsonObject: TypeAlias = dict[str, object]
"""A JSON object, as `json.loads` returns it."""

Shape: TypeAlias = "str | list[Shape] | dict[str, Shape]"
"""The type of a value of a schema: an object's fields, `[shape]` for a list, or "integer", "number", "boolean",
"string", and "json" for JSON as text."""

MOST_MESSAGE = 4096
"""Maximum characters of an error's message."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the input."""

    position: int
    """0-based position in the whole input; unique and stable between reads."""
    id: object
    """The value of the id column, or the position if there is none."""
    data: Any
    """The row as the source read it (a dict for JSONL)."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of a value of a row that Python cannot hold. It fails its record if the job uses the value."""

    reason: str
    """What is wrong, with the file and the row."""
    is_exact: bool = False
    """Whether it can still be copied to a file that has its type, such as a date after the year 9999."""

    def refusal(self, column: str) -> RecordError:
        """The error for a record whose column is used."""
        return RecordError(f"column {column!r} cannot be read: {self.reason}")

    def __str__(self) -> str:
        return f"(cannot be read: {self.reason})"


class ExactValue(Protocol):
    """A value as its table has it: see `headrace.io.formats.cells`."""

    reason: str
    """Why Python cannot hold it, if so."""

    def inner(self, keys: Sequence[str], /) -> object:
        """The value in this one, a struct, that the keys lead to."""
        ...


class TableRow(dict[str, object]):
    """A row of a table, as Python objects. `exact` holds its values as the table has them, by column."""

    __slots__ = ("exact",)

    def __init__(
        self, values: Mapping[str, object] | Iterable[tuple[str, object]], exact: Mapping[str, object]
    ) -> None:
        super().__init__(values)
        self.exact = exact

    def __reduce__(self) -> tuple[type[TableRow], tuple[dict[str, object], Mapping[str, object]]]:
        return TableRow, (dict(self), self.exact)


def outer(name: str) -> str:
    """The column of a name such as `column.key`, if no column has the whole name."""
    return name.partition(".")[0]


def value_at(row: Mapping[str, object], name: str) -> object:
    """The value of a column of a row, or the one in its mappings that `column.key` names.

    A column with the whole name comes first. Of a list of mappings, it is the list of their values.

    Raises:
        RecordError: there is none, or it cannot be read.
    """
    try:
        return row[name]
    except KeyError:
        pass
    column, *keys = name.split(".")
    try:
        value = row[column]
    except KeyError:
        raise RecordError(f"the record has no column {column!r}") from None
    for key in keys:
        if type(value) is Unreadable:
            raise value.refusal(column)
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and all(isinstance(one, dict) and key in one for one in value):
            value = [one[key] for one in value]
        else:
            raise RecordError(f"the record has no {name!r}: column {column!r} has no key {key!r}")
    return value


def has_value(row: Mapping[str, object], name: str) -> bool:
    """Whether a row has a column, or the value in one that `column.key` names."""
    if name in row or "." not in name:
        return name in row
    try:
        value_at(row, name)
    except RecordError:
        return type(row.get(outer(name))) is Unreadable
    return True


def keep_exact(row: object, names: Sequence[str]) -> None:
    """Drop the exact values of a row, except for these columns."""
    row = row.read if type(row) is JoinedRow else row
    if type(row) is TableRow:
        kept = {*names, *map(outer, names)}
        row.exact = {name: cell for name in kept if (cell := row.exact.get(name)) is not None} if names else {}


def kept_value(row: Mapping[str, object], name: str, *, exact: bool) -> object:
    """The value of a column that is copied to the output; null if the row lacks it.

    Args:
        exact: take the value as the table has it, with its type, where there is a table.

    Raises:
        RecordError: it cannot be read.
    """
    if "." in name and name not in row:
        return _inner_value(row, name, exact=exact)
    value = row.get(name)
    table = row.read if type(row) is JoinedRow and name in row.read and row.read[name] is value else row
    if type(value) is Unreadable and not (exact and value.is_exact):
        raise value.refusal(name)
    if not exact or type(table) is not TableRow:
        return value
    cell = cast("ExactValue | None", table.exact.get(name))
    if cell is not None and type(value) is Unreadable:
        cell.reason = value.reason
    return value if cell is None else cell


def _inner_value(row: Mapping[str, object], name: str, *, exact: bool) -> object:
    """The value that `column.key` names, as `kept_value` has that of a column."""
    if not has_value(row, name):
        return None
    value, column = value_at(row, name), outer(name)
    table = row.read if type(row) is JoinedRow and row.read.get(column) is row[column] else row
    cell = cast("ExactValue | None", table.exact.get(column) if exact and type(table) is TableRow else None)
    return value if cell is None or isinstance(row[column], list) else cell.inner(name.split(".")[1:])


class JoinedRow(dict[str, object]):
    """A row of the input with the outputs of earlier steps as columns."""

    __slots__ = ("answer", "read")

    def __init__(self, read: Mapping[str, object], outputs: Mapping[str, object], answer: object = None) -> None:
        super().__init__(read)
        self.update(outputs)
        self.read = read
        """The row as the source read it, for a dead letter."""
        self.answer = answer
        """The output of the steps before, if the record names another model than this step's."""

    def __reduce__(self) -> tuple[type[JoinedRow], tuple[object, ...]]:
        return JoinedRow, (self.read, dict(self), self.answer)


@dataclass(frozen=True, slots=True)
class Ok:
    """A processed record."""

    record: Record
    """`data` is a dict of the kept columns, written beside the id, or None."""
    output: Any
    cost: int = 0
    """Cost of the record in the engine's unit: tokens for text."""
    row: object = None
    """The row as the source read it, for a dead letter if a later stage fails."""

    @property
    def as_read(self) -> Record:
        """The record as it was read, for its dead letter."""
        return Record(self.record.position, self.record.id, self.row)


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed record, and why it failed."""

    record: Record
    """`data` is what could be read of it: the raw line if it is not JSON."""
    reason: str
    """A short stable key for grouping, usually the error's class name, such as `RecordError`."""
    message: str
    """One line for a person."""
    attempts: int = 1
    code: str | None = None
    """OpenAI's error code if the record itself is invalid."""
    param: str | None = None
    """The invalid field of a request body."""
    has_id: bool = False
    """Whether a row that could not be read has its own id; else its id is its place in the input."""
    answers: Sequence[Mapping[str, str]] = ()
    """All answers that do not have the form that the job gives them, with what is wrong."""

    @classmethod
    def of(cls, record: Record, error: Exception, attempts: int) -> Failed:
        """A record that failed with this error."""
        words = " ".join(text_of(error)[:MOST_MESSAGE].split())
        raised = (error.__cause__ or error) if type(error) is ProcessError else error  # it stands for its cause
        if isinstance(error, RecordError):
            return cls(record, type(raised).__name__, words, attempts, error.code, error.param)
        return cls(record, type(raised).__name__, words, attempts)

    def as_row(self) -> dict[str, object]:
        """What a function that takes rows gets for it; with its position if its id cannot be read."""
        place = {"position": self.record.position} if self.record.id is None else {}
        return {"id": self.record.id, **place, "error": {"reason": self.reason, "message": self.message}}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Names in an input that are not read, all for one reason."""

    reason: str
    """For example "a folder"."""
    count: int
    names: tuple[str, ...]
    """The first of them, relative to the input."""

    def more(self, other: LeftOut) -> LeftOut:
        """Add others with the same reason."""
        return LeftOut(self.reason, self.count + other.count, self.names)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.names):,} more" if self.count > len(self.names) else ""
        return f"{self.reason}: {', '.join(self.names)}{more}"


Outcome: TypeAlias = Ok | Failed


def text_refusal(value: object, name: str = "the input") -> RecordError | None:
    """The error for a value that is not valid text; None for valid text."""
    if not isinstance(value, str):
        return RecordError(f"{name} is {kind_of(value)}, not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON allows lone surrogates; tokenizers and files do not
            return RecordError(f"{name} is not valid Unicode: {error.reason} at character {error.start}")
    return None


def kind_of(value: object) -> str:
    """The type of a value for a message: "null", or "of type int"."""
    return "null" if value is None else f"of type {type(value).__name__}"
