"""Which columns of a row hold its id and its text."""

from __future__ import annotations

import itertools
import json
import string
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError, RecordError
from headrace.io.base import Source
from headrace.jobs.pipeline.user_code import UserCode
from headrace.records import Record, text_refusal

_LOOK_S = 3.0
"""How long an input is read to find a column that is to be kept and that its first rows lack."""
_HEAD = 64
"""Records that user code prepares before the job starts, to see what columns it makes."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns a job reads."""

    text: str
    id: str | None
    """None: a record's position is its id."""
    text_only: bool = True
    """Whether anything but a text fails its record here; otherwise the engine judges what it is given."""
    pair: str | None = None
    """The second text of a pair."""
    template: str | None = None
    """Makes the text of several columns, such as "Q: {question}"; None takes `text` as it is."""
    keep: tuple[str, ...] = ()
    """Columns that go to the output as they are."""

    def identify(self, record: Record) -> Record:
        """What is kept of the record once it is done: position, id and the columns that go to the output.

        Raises:
            RecordError: the id is missing, or neither text nor an integer.
        """
        if self.id is None:
            return Record(record.position, record.id, self.kept(record))
        value = _value(record, self.id)
        if type(value) is not int:
            _check_text(value, self.id)
        return Record(record.position, value, self.kept(record))

    def input_of(self, record: Record) -> object:
        """What to process.

        Raises:
            RecordError: a column is missing; or with `text_only` null, not text, or not valid Unicode.
        """
        if self.template is not None:
            return "".join(
                literal if name is None else literal + _filled(record, name)
                for literal, name, _, _ in string.Formatter().parse(self.template)
            )
        value = _value(record, self.text)
        if self.text_only:
            _check_text(value, self.text)
        if self.pair is None:
            return value
        second = _value(record, self.pair)
        if self.text_only:
            _check_text(second, self.pair)
        return value, second

    def kept(self, record: Record) -> Mapping[str, object] | None:
        """The columns that go to the output; null where a record lacks one."""
        return {name: record.data.get(name) for name in self.keep} if self.keep else None


def _filled(record: Record, name: str) -> str:
    """A column's value as it stands in a text.

    Raises:
        RecordError: it is missing, null, no valid Unicode, or a list or dict that is no JSON.
    """
    value = _value(record, name)
    if isinstance(value, (int, float, list, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"column {name!r} cannot be written into a text: {error}") from None
    _check_text(value, name)
    return str(value)


def _value(record: Record, column: str) -> object:
    try:
        return record.data[column]
    except KeyError:
        raise RecordError(f"the record has no column {column!r}") from None


def _check_text(value: object, column: str) -> None:
    if type(value) is str and value.isascii():  # most are: no message is made for them
        return
    if refusal := text_refusal(value, f"column {column!r}"):
        raise refusal


def resolve(source: Source, wanted: Columns, user: UserCode | None = None) -> Columns:
    """Check the columns against the first rows of the input, whatever is done of it.

    Without an id column a column named "id" is the id where the first rows have one, else the position is; "" asks for
    the position.

    Raises:
        ConfigError: no record among the first rows has a column (one to be kept may come later), a template is none, or
            a kept column hides the id.
    """
    head = next(_prepared(source, user), [])
    known = _names(head)
    texts = (wanted.text, wanted.pair) if wanted.template is None else _template_columns(wanted.template)
    for column in filter(None, (*texts, wanted.id)):
        if head and column not in known:
            images = column == wanted.text == "text" and "image" in known
            raise _missing(
                column, len(head), known, "; for images take --task image-embed or image-classify" if images else ""
            )
    if head and not set(wanted.keep) <= set(known):
        _look_further(source, wanted.keep, user)
    identity = "id" if wanted.id is None and "id" in known else wanted.id or None
    if "id" in wanted.keep and identity != "id":
        raise ConfigError('cannot keep column "id": the output\'s own id is named so; name it with --id-column')
    return replace(wanted, id=identity, keep=tuple(name for name in wanted.keep if name != "id"))


def _look_further(source: Source, keep: tuple[str, ...], user: UserCode | None) -> None:
    """See that each of these columns occurs somewhere: rows of JSON need not all have the same.

    Raises:
        ConfigError: none of the records that can be read within some seconds has one of them.
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
    raise _missing(next(iter(missing)), seen, list(known))


def _missing(column: str, among: int, known: Sequence[str], hint: str = "") -> ConfigError:
    return ConfigError(
        f"no record among the first {among:,} has a column {column!r}; they have {', '.join(known[:20])}{hint}"
    )


def _names(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record.data))


def _prepared(source: Source, user: UserCode | None, *, whole: bool = False) -> Iterator[list[Record]]:
    """The records of the first chunks, or of the whole input, as user code leaves them."""
    for chunk in itertools.islice(source.chunks(lambda position: position), None if whole else 8):
        if not chunk.records:
            continue
        if user is None:
            yield list(chunk.records)
            continue
        rows = chunk.records if whole else chunk.records[:_HEAD]
        yield [record for _, record in user.prepared(rows) if isinstance(record, Record)]


def _template_columns(template: str) -> tuple[str, ...]:
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)]
    except ValueError as error:
        raise ConfigError(f"prompt template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for name, spec, conversion in fields:
        if name == "" or spec or conversion:
            raise ConfigError(f"prompt template {template!r}: write column names alone in braces, as in {{question}}")
    names = tuple(name for name, _, _ in fields if name is not None)
    if not names:
        raise ConfigError(f"prompt template {template!r} names no column: every text would be the same")
    return names
