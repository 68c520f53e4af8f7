"""Checks the columns that a job reads against the first rows of its input."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.errors import ConfigError, nearest
from headrace.io.base import Chunk, Source, typed_columns
from headrace.io.formats.tables import check_names
from headrace.io.sources.in_memory import ARRAY
from headrace.jobs.pipeline.inputs import WHOLE, Columns
from headrace.jobs.pipeline.user_code import UserCode
from headrace.records import Record, has_value, outer

_LOOK_S = 3.0
"""Maximum seconds to look for a column to keep that the first rows lack."""
_SEPARATORS = {
    ";": "take ``input_delimiter=;``",
    "\t": "take ``input_format=tsv``",
    "|": "take ``input_delimiter=|``",
    ",": "take ``input_format=csv``",
}
"""Marks that separate columns in other files than the format says, and the way out."""
_HEAD = 64
"""Records that user code prepares before the job starts, to find the columns that it makes."""


def resolve(source: Source, wanted: Columns, user: UserCode | None = None) -> Columns:
    """Check the columns against the first rows of the input, finished or not.

    If no id column is given, a column named "id" is used if the first rows have one, else positions. ""
    means positions.

    Raises:
        ConfigError: no record among the first rows has a column (one to copy may come later), the template is invalid,
            or a column to copy has the name of the id.
    """
    head = next(_prepared(source, user), [])
    known = _names(head) or list(typed_columns(source))
    if head and wanted.text not in known:
        if wanted.else_array and ARRAY in known:
            wanted = replace(wanted, text=ARRAY)
        elif wanted.else_row and "," in wanted.text:
            wanted = replace(wanted, text=WHOLE, row=tuple(name.strip() for name in wanted.text.split(",")))
        elif (
            wanted.else_row
            and wanted.text != WHOLE
            and not (user is None and _header_hint(source) and _is_no_header(known))
        ):
            wanted = replace(wanted, text=WHOLE)
    chosen_by = wanted.choice.column if wanted.choice is not None else None
    for column in filter(None, (*wanted.inputs(), wanted.id, chosen_by)):
        if head and not _may_have(head, column):
            raise _missing(column, len(head), known, _way_out(column, wanted, known) + _header_hint(source))
    if "*" in wanted.keep:
        check_names([*dict.fromkeys(name for record in head for name in record.data)], "a row")
        others = [name for name in wanted.keep if name != "*"]
        its_id = "id" if wanted.id is None else wanted.id
        wanted = replace(wanted, keep=tuple(dict.fromkeys((*others, *(name for name in known if name != its_id)))))
    if head and not all(_may_have(head, name) for name in wanted.keep):
        _look_further(source, wanted.keep, user)
    read = known if head or user is None else _names(next(_prepared(source, None), []))  # if the function refused all
    identity = "id" if wanted.id is None and "id" in read else wanted.id or None
    if "id" in wanted.keep and identity != "id":
        raise ConfigError('cannot keep column "id": the output\'s own id is named so; name it with ``id_column``')
    return replace(wanted, id=identity, keep=tuple(name for name in wanted.keep if name != "id"))


def _may_have(records: Sequence[Record], name: str) -> bool:
    """Whether a record has a value of this name, or all have null where it would be: later ones may have one."""
    if any(has_value(record.data, name) for record in records):
        return True
    found = [record.data[outer(name)] for record in records if outer(name) in record.data] if "." in name else []
    return bool(found) and all(value is None for value in found)


def _look_further(source: Source, keep: tuple[str, ...], user: UserCode | None) -> None:
    """Check that each of these columns occurs somewhere: rows of JSON may have different columns."""
    known: dict[str, None] = {}
    missing = dict.fromkeys(keep)
    seen = 0
    ends = time.monotonic() + _LOOK_S
    for records in _prepared(source, user, whole=True):
        seen += len(records)
        known.update(dict.fromkeys(_names(records)))
        for name in [name for name in missing if _may_have(records, name)]:
            del missing[name]
        if not missing:
            return
        if time.monotonic() > ends:
            break
    raise _missing(next(iter(missing)), seen, list(known), "; name yours with ``keep_columns``")


def _missing(column: str, among: int, known: Sequence[str], way_out: str) -> ConfigError:
    shown = [name.encode(errors="replace").decode() for name in known[:20]]  # keys of JSON may have lone surrogates
    they_have = f"they have {', '.join(shown)}" if known else "they have no columns"
    separator = next((mark for mark in _SEPARATORS if len(known) == 1 and mark in known[0]), None)
    if separator is not None:
        way_out = f"; the file looks separated by {separator!r}: {_SEPARATORS[separator]}"
    return ConfigError(
        f"no record among the first {among:,} has a column {column!r}; {they_have}{way_out}{nearest(column, known)}"
    )


def _way_out(column: str, wanted: Columns, known: Sequence[str]) -> str:
    """What to do about a missing column: the setting that names another."""
    if column == wanted.text == "text" and "image" in known:
        return "; for images take ``task=image-embed`` or ``task=image-classify``"
    if wanted.choice is not None and column == wanted.choice.column:
        setting = "model_column"
    elif column == wanted.id:
        setting = "id_column"
    elif wanted.template is not None:
        setting = "prompt_template"
    elif column == wanted.pair:
        setting = "text_pair_column"
    elif column == wanted.documents:
        setting = "documents_column"
    else:
        setting = "image_column" if column == "image" else "text_column"
    return f"; name yours with ``{setting}``"


def _header_hint(source: Source) -> str:
    """What the columns of a CSV file are, which may have no header."""
    if not {"csv", "tsv"} & {getattr(one, "name", "") for one in getattr(source, "formats", ())}:
        return ""
    return "; the first line of a file names its columns: add one if it holds data"


def _is_no_header(names: Sequence[str]) -> bool:
    """Whether the first line of a CSV file looks like one column, by a wrong separator, or like data: has numbers."""
    numbers = [name for name in names if re.fullmatch(r"\s*[-+]?\d*\.?\d+(e[-+]?\d+)?\s*", name, re.IGNORECASE)]
    return len(names) == 1 or numbers != [str(place) for place in range(len(numbers))]  # which pandas writes as names


def _names(records: Iterable[Record]) -> list[str]:
    """The columns with a name that is text: rows of Python may have others, which cannot be meant."""
    return list(dict.fromkeys(column for record in records for column in record.data if isinstance(column, str)))


def first_rows(source: Source) -> Sequence[Record]:
    """The records of the first chunk that has some; of what can be read once, those of the first chunk."""
    return next((chunk.records for chunk in _first_chunks(source, None) if chunk.records), ())


def _first_chunks(source: Source, count: int | None) -> Iterator[Chunk]:
    """The first `count` chunks, or all. What can be read once is not read further than it was read ahead."""
    return itertools.islice(
        source.chunks(lambda position: position), 1 if getattr(source, "reads_once", False) else count
    )


def _prepared(source: Source, user: UserCode | None, *, whole: bool = False) -> Iterator[list[Record]]:
    """The records of the first chunks, or of the whole input, after user code."""
    for chunk in _first_chunks(source, None if whole else 8):
        if not chunk.records:
            continue
        if user is None:
            yield list(chunk.records)
            continue
        rows = chunk.records if whole else chunk.records[:_HEAD]
        yield [record for _, record in user.prepared(rows) if isinstance(record, Record)]
