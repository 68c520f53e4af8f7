"""Lines of JSON that are alike but for their values: read by comparing all of them with the first, not by parsing.

Most files were written by one program: the same keys in the same order, with the same spaces. What is between the
values of the first line must be in each line then. A block of lines with a backslash, or with one line that differs, is
left to the parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import tried
from headrace.extras import lazy
from headrace.io.formats.arrow_memory import content_of, of_numbers
from headrace.io.formats.text_tables import TextLines, places_of
from headrace.io.storage.rows import MAX_LINE_BYTES

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    import pyarrow.compute as pc
    from numpy.typing import NDArray

    from headrace.columns import RowNumbers

    Places = RowNumbers
else:
    numpy, pa, pc = lazy("numpy"), lazy("pyarrow"), lazy("pyarrow.compute")

_FIELD = re.compile(rb'"([^"]*)" *: *(?:"[^"]*"|([-+.\w]+))')
"""A key and its value, which is a text or not."""
_BETWEEN = re.compile(rb" *, *")
_BARE = r"^(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null)$"
"""A value that is no text, as JSON has it."""
_LONGEST = 256
"""Bytes of such a value: Python does not read integers of thousands of digits."""
_WORD = 8
_QUOTE, _ESCAPE = ord('"'), b"\\"
_FIRST_TEXT = 32
"""The first code of a character that a text may hold."""


class _Field(NamedTuple):
    """What the lines have in common at one value."""

    name: str
    before: bytes
    """What is before the value, from the end of the one before or of the line before."""
    is_text: bool


def columns_of(lines: TextLines, types: Mapping[str, pa.DataType]) -> dict[str, pa.Array] | None:
    """The columns of lines that are alike, exactly as `json.loads` reads them; None if they are not, or may not be.

    Args:
        lines: at least one.
        types: of the columns that are needed.
    """
    first, end = int(lines.starts[0]), int(lines.ends[-1])
    fields = _fields(lines[0])
    if fields is None or len(lines.text) < _WORD or lines.text.find(_ESCAPE, first, end) >= 0:
        return None
    is_text = {field.name: field.is_text for field in fields}
    wanted = {True: pa.string(), False: pa.int64()}
    if any(name in is_text and kind != wanted[is_text[name]] for name, kind in types.items()):
        return None
    if numpy.count_nonzero(lines.codes[first:end] < _FIRST_TEXT) != len(lines) - 1 or lines.are_broken().any():
        return None
    bounds = _bounds(lines, fields, _after(lines[0]))
    if bounds is None or (lines.ends - lines.starts).max() > MAX_LINE_BYTES:
        return None
    columns: dict[str, pa.Array] = {}
    for field, (begins, ends) in zip(fields, bounds, strict=True):
        if field.name in types or not field.is_text:
            values = _pieces(lines.codes, begins, ends)
            column = values if field.is_text else _numbers(values, is_needed=field.name in types)
            if column is None:
                return None
            columns[field.name] = column
    return {name: columns[name] if name in columns else pa.nulls(len(lines), kind) for name, kind in types.items()}


def _fields(line: bytes) -> list[_Field] | None:
    """The values of a line that is an object without objects or lists in it; None for another."""
    fields: list[_Field] = []
    place = before = 0
    while True:
        opening = re.match(rb"\{ *", line) if not fields else _BETWEEN.match(line, place)
        found = _FIELD.match(line, opening.end()) if opening else None
        if found is None:
            break
        is_text = found[2] is None
        value = line.rindex(b'"', found.start(), found.end() - 1) + 1 if is_text else found.start(2)
        name = tried(found[1].decode)
        if not isinstance(name, str):
            return None
        fields.append(_Field(name, line[before:value], is_text))
        before = place = found.end() - is_text
        place += is_text
    is_whole = bool(fields) and re.fullmatch(rb" *\}", line[place:]) is not None
    return fields if is_whole and len({field.name for field in fields}) == len(fields) else None


def _after(line: bytes) -> bytes:
    """What is after the last value of a line."""
    end = re.search(rb'"? *\}$', line)
    assert end is not None, "found by `_fields`"
    return end[0]


def _bounds(lines: TextLines, fields: Sequence[_Field], after: bytes) -> list[tuple[Places, Places]] | None:
    """Where each value begins and ends in each line; None if a line differs beside its values."""
    starts, ends = lines.starts, lines.ends
    first = int(starts[0])
    quotes = places_of(lines.codes[first : int(ends[-1])], _QUOTE) + first
    each = sum(field.before.count(b'"') for field in fields) + after.count(b'"')
    if len(quotes) != each * len(starts):
        return None
    table = quotes.reshape(len(starts), each)
    if (table[:, 0] < starts).any() or (table[:, -1] >= ends).any():
        return None
    found: list[tuple[Places, Places]] = []
    at, seen = starts, 0
    for field, behind in zip(fields, [*(field.before for field in fields[1:]), after], strict=True):
        if not _follows(lines.text, at, field.before):
            return None
        begins = at + len(field.before)
        seen += field.before.count(b'"')
        # It ends before the first quote behind it, or at the end of the line.
        at = table[:, seen] - behind.index(b'"') if seen < each else ends - len(behind)
        if (at < begins).any():
            return None
        found.append((begins, at))
    return found if _follows(lines.text, at, after) and (at + len(after) == ends).all() else None


def _follows(content: bytes, places: Places, text: bytes) -> bool:
    """Whether a text is at each of these places, in ascending order."""
    words = numpy.ndarray(len(content) - _WORD + 1, numpy.dtype("<u8"), content, strides=(1,))  # one at each byte
    inner = int(numpy.searchsorted(places, len(content) - len(text) - _WORD))
    if any(content[place : place + len(text)] != text for place in places[inner:].tolist()):
        return False
    for start in range(0, len(text), _WORD):
        part = text[start : start + _WORD]
        mask = numpy.uint64((1 << 8 * len(part)) - 1)
        if ((words[places[:inner] + start] & mask) != numpy.uint64(int.from_bytes(part, "little"))).any():
            return False
    return True


def _pieces(codes: NDArray[numpy.uint8], begins: Places, ends: Places) -> pa.Array:
    """Texts that are at these places."""
    bounds = numpy.empty(2 * len(begins), numpy.int32)  # of the texts, and of what is between them
    bounds[::2], bounds[1::2] = begins, ends
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(codes)]
    both = pa.Array.from_buffers(pa.string(), len(bounds) - 1, buffers)
    return both.take(of_numbers(numpy.arange(0, len(bounds), 2)))


def _numbers(values: pa.Array, *, is_needed: bool) -> pa.Array | None:
    """Integers, if they are needed; None if one is no such value."""
    content, bounds = content_of(values.cast(pa.large_string()))
    lengths, codes = numpy.diff(bounds), numpy.frombuffer(content, numpy.uint8)
    if lengths.min() < 1 or lengths.max() > _LONGEST:
        return None
    if not is_needed:
        return values if pc.all(pc.match_substring_regex(values, _BARE)).as_py() else None
    firsts = codes[bounds[:-1]]
    signed = firsts == ord("-")
    heads = numpy.where(signed, codes[numpy.minimum(bounds[:-1] + 1, len(codes) - 1)], firsts)
    digits = codes[bounds[0] : bounds[-1]]
    count = int(numpy.count_nonzero((digits >= ord("0")) & (digits <= ord("9"))))
    if count + int(numpy.count_nonzero(signed)) != len(digits) or ((heads == ord("0")) & (lengths - signed > 1)).any():
        return None
    found = tried(lambda: values.cast(pa.int64()))
    return None if isinstance(found, Exception) else found
