"""What a job reads of a row: its id, the input for the engine, and the columns to copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headrace.columns import RowTable
from headrace.engines.choosing.served import ServedModel
from headrace.engines.requests.templates import field_text, prompt_of, template_fields
from headrace.errors import RecordError
from headrace.io.formats.arrow_memory import of_numbers
from headrace.jobs.pipeline import arrow
from headrace.jobs.pipeline.candidates import QueryDocuments, documents_of
from headrace.jobs.settings import ModelChoice, OnEmpty
from headrace.records import Record, Unreadable, kept_value, kind_of, text_refusal, value_at
from headrace.wording import shown

if TYPE_CHECKING:
    import pyarrow as pa

WHOLE = "*"
"""In the place of a column: the whole row."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns a job reads."""

    text: str
    id: str | None
    """None to use positions as ids."""
    text_only: bool = True
    """Whether the input must be text; otherwise the engine checks it."""
    pair: str | None = None
    """Column of the second text of a pair."""
    documents: str | None = None
    """Column of the documents that are ranked for the text."""
    template: str | None = None
    """Makes the text or the chat from several columns, such as "Q: {question}"; None to use `text`."""
    keep: tuple[str, ...] = ()
    """Columns to copy to the output."""
    choice: ModelChoice | None = None
    """Which records the step computes; None for all."""
    splits: bool = False
    """Whether a field of the template is split where the prompt is too long."""
    on_empty: OnEmpty = "keep"
    exact: bool = False
    """Whether the output takes the columns to copy as a table has them, not only as Python objects."""
    else_row: bool = False
    """Whether the input is the whole row where there is no column `text`."""
    row: tuple[str, ...] = ()
    """The columns of the row that is the input; empty for all."""
    else_array: bool = False
    """Whether the input is the column of arrays where there is no column `text`."""
    arrays: bool = False
    """Whether the engine takes columns of numbers, and of lists of numbers, as they are."""
    served: ServedModel | None = None
    """The model and its adapters; None where it has none, and a request chooses nothing by its model."""

    def inputs(self) -> tuple[str, ...]:
        """The names that the input for the engine is made of: columns, or `column.key` of mappings in them."""
        if self.template is not None:
            return template_fields(self.template)
        if self.is_row:
            return self.row
        return tuple(name for name in (self.text, self.pair, self.documents) if name is not None)

    @property
    def are_plain(self) -> bool:
        """Whether the input is made of whole columns, and of every row."""
        return self.template is None and self.choice is None and not self.is_row

    @property
    def is_row(self) -> bool:
        return self.else_row and self.text == WHOLE

    def used(self) -> tuple[str, ...]:
        """The names of all columns that are looked at; none if these are all."""
        if "*" in self.keep or (self.is_row and not self.row):
            return ()
        others = (self.id, None if self.choice is None else self.choice.column)
        return tuple(dict.fromkeys((*self.inputs(), *(name for name in others if name is not None), *self.keep)))

    def takes(self, record: Record) -> bool:
        """Whether the step computes the record.

        Raises:
            RecordError: its column of models names none of the job.
        """
        if self.choice is None:
            return True
        value = _value(record, self.choice.column)
        if value not in self.choice.models:
            raise RecordError(
                f"column {self.choice.column!r} is {shown(value)}, which is no model of this job: "
                f"{', '.join(self.choice.models)}"
            )
        return value == self.choice.model

    def identify(self, record: Record) -> Record:
        """The part of a record that its output needs: position, id and the columns to copy.

        Raises:
            RecordError: the id is missing, or neither text nor an integer.
        """
        return Record(record.position, self.id_of(record), self.kept(record))

    def id_of(self, record: Record) -> object:
        """The id of a record. Raises RecordError: it is missing, or neither text nor an integer."""
        if self.id is None:
            return record.id
        value = _value(record, self.id)
        if id_text(value) is None:
            raise _id_refusal(value, self.id)
        return value

    def input_of(self, record: Record) -> object:
        """The input for the engine.

        Rows that `table_columns` takes in columns do not come here: it must not take what is refused here.

        Raises:
            RecordError: a column is missing; with `text_only` the value is null, no text or not valid Unicode; it is
                empty, and `on_empty` refuses that; or it is a request for another model.
        """
        value = self._input_of(record)
        if self.served is not None and (refusal := self.served.refusal(value)):
            raise refusal
        if self.on_empty == "error" and is_empty(value):
            raise RecordError(f"the text of {' and '.join(map(repr, self.inputs()))} is empty (``on_empty=error``)")
        return value

    def _input_of(self, record: Record) -> object:
        if self.template is not None:
            return prompt_of(self.template, self.fields_of(record), splits=self.splits)
        if self.is_row:
            return {name: _value(record, name) for name in self.row or record.data}
        value = _value(record, self.text)
        if self.text_only:
            _check_text(value, self.text)
        if self.documents is not None:
            return QueryDocuments(value, documents_of(_value(record, self.documents), self.documents))
        if self.pair is None:
            return value
        second = _value(record, self.pair)
        if self.text_only:
            _check_text(second, self.pair)
        return value, second

    def fields_of(self, record: Record) -> dict[str, str]:
        """The text of each field of the template. Raises RecordError: see `input_of`."""
        names = template_fields(self.template) if self.template is not None else ()
        return {name: field_text(record.data, name) for name in names}

    def kept(self, record: Record) -> Mapping[str, object] | None:
        """The columns to copy; null for one that the record lacks. Raises RecordError: one cannot be read."""
        return {name: kept_value(record.data, name, exact=self.exact) for name in self.keep} if self.keep else None


def is_empty(value: object) -> bool:
    """Whether an input is an empty text, or a pair with one."""
    return "" in value if type(value) is tuple else type(value) is str and not value


def _value(record: Record, column: str) -> object:
    value = value_at(record.data, column)
    if type(value) is Unreadable:
        raise value.refusal(column)
    return value


def id_text(value: object) -> str | None:
    """The text that an id is compared by: 1 and "1" are the same id. None if the value is no id."""
    if type(value) is str and value.isascii():  # the common case first
        return value
    if type(value) is int:
        try:
            return str(value)
        except ValueError:  # Python writes no integer of more than 4,300 digits
            return None
    return value if isinstance(value, str) and text_refusal(value) is None else None


def _check_text(value: object, column: str) -> None:
    if type(value) is str and value.isascii():  # the common case first
        return
    if refusal := text_refusal(value, f"column {column!r}"):
        raise refusal


def _id_refusal(value: object, column: str) -> RecordError:
    if isinstance(value, str) and (refusal := text_refusal(value, f"column {column!r}")):
        return refusal
    if type(value) is int:
        return RecordError(f"column {column!r} is an integer of {value.bit_length():,} bits, too long to be written")
    given = "null" if value is None else f"{shown(value)}, {kind_of(value)}"
    hint = "; pandas makes floats of integers if some are missing" if isinstance(value, float) else ""
    return RecordError(
        f"column {column!r} is {given}; an id is an integer or text: convert the column, or name another with "
        f'``id_column`` ("" for positions){hint}'
    )


class TableColumns(NamedTuple):
    """What a job takes of a table by column."""

    texts: Sequence[pa.Array]
    ids: pa.Array
    kept: Mapping[str, pa.Array]


def table_columns(columns: Columns, table: RowTable | None) -> TableColumns | None:
    """What a job takes of a table by column; None if its rows must be read."""
    if table is None or not columns.are_plain:
        return None
    names = columns.inputs()
    found = [text for name in names if (text := arrow.plain(arrow.column_at(table, name))) is not None]
    texts = [text for text in found if arrow.is_text(text) or (columns.arrays and arrow.is_numeric(text))]
    if len(texts) < len(names) or (columns.on_empty == "error" and any(map(arrow.count_empty, texts))):
        return None
    if not columns.text_only and any(text.null_count for text in texts):  # the engine decides
        return None
    ids = of_numbers(table.positions) if columns.id is None else arrow.plain(arrow.column_at(table, columns.id))
    if ids is None or ids.null_count or not arrow.holds_ids(ids):
        return None
    kept = {name: arrow.column_at(table, name) for name in columns.keep}
    if not all(arrow.can_be_kept(one, columns.exact, table.typed) for one in kept.values()):
        return None
    return TableColumns(texts, ids, kept)
