"""The columns of a row that hold its id and its input."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.engines.requests.templates import FilledTemplate, filled, template_fields
from headrace.errors import ConfigError, RecordError, nearest
from headrace.io.base import Source
from headrace.jobs.pipeline.user_code import UserCode
from headrace.records import Record, kind_of, text_refusal

_LOOK_S = 3.0
"""Maximum seconds to look for a column to keep that the first rows lack."""
_HEAD = 64
"""Records that user code prepares before the job starts, to find the columns that it makes."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which records a step computes, where each names its model in a column."""

    column: str
    model: str
    """The name of the step's own model."""
    models: tuple[str, ...]
    """The names of all models of the job."""

    def takes(self, record: Record) -> bool:
        """Whether the step computes the record.

        Raises:
            RecordError: the record names no model of the job.
        """
        value = _value(record, self.column)
        if value not in self.models:
            raise RecordError(
                f"column {self.column!r} is {value!r:.100}, which is no model of this job: {', '.join(self.models)}"
            )
        return value == self.model


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
    template: str | None = None
    """Makes the text from several columns, such as "Q: {question}"; None to use `text`."""
    keep: tuple[str, ...] = ()
    """Columns to copy to the output."""
    choice: ModelChoice | None = None
    """Which records the step computes; None for all."""
    splits: bool = False
    """Whether a field of the template is split where the prompt is too long."""

    def inputs(self) -> tuple[str, ...]:
        """The names that the input for the engine is made of: columns, or in a template `column.key` too."""
        if self.template is not None:
            return template_fields(self.template)
        return (self.text,) if self.pair is None else (self.text, self.pair)

    def identify(self, record: Record) -> Record:
        """The part of a record that its output needs: position, id and the columns to copy.

        Raises:
            RecordError: the id is missing, or neither text nor an integer.
        """
        if self.id is None:
            return Record(record.position, record.id, self.kept(record))
        value = _value(record, self.id)
        if type(value) is not int:
            _check_id(value, self.id)
        return Record(record.position, value, self.kept(record))

    def input_of(self, record: Record) -> object:
        """The input for the engine.

        Raises:
            RecordError: a column is missing; or with `text_only` null, not text, or not valid Unicode.
        """
        if self.template is not None:
            make = FilledTemplate if self.splits else filled
            return make(self.template, self.fields_of(record))
        value = _value(record, self.text)
        if self.text_only:
            _check_text(value, self.text)
        if self.pair is None:
            return value
        second = _value(record, self.pair)
        if self.text_only:
            _check_text(second, self.pair)
        return value, second

    def fields_of(self, record: Record) -> dict[str, str]:
        """The text of each field of the template.

        Raises:
            RecordError: see `input_of`.
        """
        names = template_fields(self.template) if self.template is not None else ()
        return {name: _filled(record, name) for name in names}

    def kept(self, record: Record) -> Mapping[str, object] | None:
        """The columns to copy; null for one that the record lacks."""
        return {name: record.data.get(name) for name in self.keep} if self.keep else None


def _filled(record: Record, name: str) -> str:
    """A column's value as text, for a template.

    Raises:
        RecordError: it is missing, null, not valid Unicode, or a list or dict that JSON cannot hold.
    """
    value = _inner(record, name)
    if isinstance(value, (int, float, list, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"column {name!r} cannot be written into a text: {error}") from None
    _check_text(value, name)
    return str(value)


def _inner(record: Record, name: str) -> object:
    """The value of a column, or the value in a mapping that `column.key` names.

    Raises:
        RecordError: it is missing.
    """
    column, dot, keys = name.partition(".")
    if not dot or name in record.data:
        return _value(record, name)
    value = _value(record, column)
    for key in keys.split("."):
        if not isinstance(value, dict) or key not in value:
            raise RecordError(f"the record has no {name!r}: column {column!r} has no key {key!r}")
        value = value[key]
    return value


def _value(record: Record, column: str) -> object:
    try:
        return record.data[column]
    except KeyError:
        raise RecordError(f"the record has no column {column!r}") from None


def _check_text(value: object, column: str) -> None:
    try:  # the common case first
        if type(value) is str and (value.isascii() or value.encode()):
            return
    except UnicodeEncodeError:
        pass
    if refusal := text_refusal(value, f"column {column!r}"):
        raise refusal


def _check_id(value: object, column: str) -> None:
    if isinstance(value, str):
        return _check_text(value, column)
    shown = "null" if value is None else f"{value!r:.100}, {kind_of(value)}"
    hint = "; pandas makes floats of integers if some are missing" if isinstance(value, float) else ""
    raise RecordError(
        f"column {column!r} is {shown}; an id is an integer or text: convert the column, or name another with "
        f'--id-column ("" for positions){hint}'
    )


def resolve(source: Source, wanted: Columns, user: UserCode | None = None) -> Columns:
    """Check the columns against the first rows of the input, finished or not.

    If no id column is given, a column named "id" is used if the first rows have one, else positions. ""
    means positions.

    Raises:
        ConfigError: no record among the first rows has a column (one to copy may come later), the template is invalid,
            or a column to copy has the name of the id.
    """
    head = next(_prepared(source, user), [])
    known = _names(head)
    inputs = [name if name in known else column_of(name, wanted) for name in wanted.inputs()]
    chosen_by = wanted.choice.column if wanted.choice is not None else None
    for column in filter(None, (*inputs, wanted.id, chosen_by)):
        if head and column not in known:
            raise _missing(column, len(head), known, _way_out(column, wanted, known))
    if head and not set(wanted.keep) <= set(known):
        _look_further(source, wanted.keep, user)
    identity = "id" if wanted.id is None and "id" in known else wanted.id or None
    if "id" in wanted.keep and identity != "id":
        raise ConfigError('cannot keep column "id": the output\'s own id is named so; name it with --id-column')
    return replace(wanted, id=identity, keep=tuple(name for name in wanted.keep if name != "id"))


def column_of(name: str, columns: Columns) -> str:
    """The column of a name from `inputs`: without the keys in a template."""
    return name if columns.template is None else name.partition(".")[0]


def _look_further(source: Source, keep: tuple[str, ...], user: UserCode | None) -> None:
    """Check that each of these columns occurs somewhere: rows of JSON may have different columns.

    Raises:
        ConfigError: no record read within some seconds has one of them.
    """
    known: dict[str, None] = {}
    missing = dict.fromkeys(keep)
    seen = 0
    ends = time.monotonic() + _LOOK_S
    for records in _prepared(source, user, whole=True):
        seen += len(records)
        for name in _names(records):
            known[name] = None
            missing.pop(name, None)
        if not missing:
            return
        if time.monotonic() > ends or getattr(source, "reads_once", False):
            break
    raise _missing(next(iter(missing)), seen, list(known), "; name yours with --keep-columns")


def _missing(column: str, among: int, known: Sequence[str], way_out: str) -> ConfigError:
    they_have = f"they have {', '.join(known[:20])}" if known else "they have no columns"
    return ConfigError(
        f"no record among the first {among:,} has a column {column!r}; {they_have}{way_out}{nearest(column, known)}"
    )


def _way_out(column: str, wanted: Columns, known: Sequence[str]) -> str:
    """What to do about a missing column: the flag that names another."""
    if column == wanted.text == "text" and "image" in known:
        return "; for images take --task image-embed or image-classify"
    if wanted.choice is not None and column == wanted.choice.column:
        flag = "--model-column"
    elif column == wanted.id:
        flag = "--id-column"
    elif wanted.template is not None:
        flag = "--prompt-template"
    elif column == wanted.pair:
        flag = "--text-pair-column"
    else:
        flag = "--image-column" if column == "image" else "--text-column"
    return f"; name yours with {flag}"


def _names(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record.data))


def _prepared(source: Source, user: UserCode | None, *, whole: bool = False) -> Iterator[list[Record]]:
    """The records of the first chunks, or of the whole input, after user code."""
    for chunk in itertools.islice(source.chunks(lambda position: position), None if whole else 8):
        if not chunk.records:
            continue
        if user is None:
            yield list(chunk.records)
            continue
        rows = chunk.records if whole else chunk.records[:_HEAD]
        yield [record for _, record in user.prepared(rows) if isinstance(record, Record)]
