"""Which columns of a row hold its id and its text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, RecordError
from headrace.io.base import Source
from headrace.records import Record


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns a job reads."""

    text: str
    id: str | None
    """None: a record's position is its id."""
    text_only: bool = True
    """Whether anything but a text fails its record here; otherwise the engine judges what it is given."""

    def identify(self, record: Record) -> Record:
        """The record with its id.

        Raises:
            RecordError: the id is missing, or neither text nor an integer.
        """
        if self.id is None:
            return record
        value = _value(record, self.id)
        if type(value) is not int:
            _check_text(value, self.id)
        return Record(record.position, value, record.data)

    def input_of(self, record: Record) -> Any:
        """What to process.

        Raises:
            RecordError: the column is missing; or with `text_only` null, not text, or not valid Unicode.
        """
        value = _value(record, self.text)
        if self.text_only:
            _check_text(value, self.text)
        return value


def _value(record: Record, column: str) -> Any:
    try:
        return record.data[column]
    except KeyError:
        raise RecordError(f"the record has no column {column!r}") from None


def _check_text(value: Any, column: str) -> None:
    if type(value) is not str:
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise RecordError(f"column {column!r} is {kind}, not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer or file takes it
            raise RecordError(f"column {column!r} is not valid Unicode: {error.reason}") from None


def resolve(source: Source, text: str, id_column: str | None, *, text_only: bool = True) -> Columns:
    """Check the columns against the first rows of the input, whatever is done of it.

    Without `id_column` a column named "id" is the id where the first rows have one, else the position is.

    Raises:
        ConfigError: no record among the first rows has the column.
    """
    head = next(
        (chunk.records for chunk in itertools.islice(source.chunks(lambda position: position), 8) if chunk.records), ()
    )
    known = list(dict.fromkeys(column for record in head for column in record.data))
    for column in filter(None, (text, id_column)):
        if head and column not in known:
            raise ConfigError(
                f"no record among the first {len(head)} has a column {column!r}; they have {', '.join(known[:20])}"
            )
    if id_column is None and "id" in known:
        id_column = "id"
    return Columns(text, id_column, text_only)
