"""Reads JSON Lines by column, a whole block at once. Lines that `json.loads` reads otherwise are read by it.

Arrow's parser is not as strict as `json.loads` everywhere, and not as lenient. `_suspects` finds the lines that only it
accepts; what only `json.loads` accepts is refused, and read again line by line.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.extras import lazy
from headrace.io.base import Chunk
from headrace.io.formats.arrow_memory import of_numbers, of_pieces
from headrace.io.formats.json_alike import columns_of
from headrace.io.formats.text_tables import LineRows, TextLines, places_of
from headrace.io.storage.files import InputFile
from headrace.io.storage.row_tables import TABLE_BYTES, TABLE_ROWS, SourceTable, fewer_if_long
from headrace.io.storage.rows import MAX_LINE_BYTES, object_of, parse_object, positions_todo, share, text_blocks
from headrace.records import Failed, Json, Record

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa

    from headrace.columns import RowNumbers
    from headrace.io.formats.text_tables import ArraysByName, Codes, Positions
else:
    numpy, pa = lazy("numpy"), lazy("pyarrow")


_MOST_REFUSED = 16
"""Lines of a block that leave the fast parser one by one; if there are more, all lines do."""
_SAMPLED = 16
"""Lines that tell the types of columns."""
_PLACE = re.compile(r" in row (\d+)$")
"""Where Arrow's parser gave up, in its message."""
_OPEN, _CLOSED = ord("{"), ord("}")
_BLANK = list(b" \t\r")
_ENDS = list(b" \t\r\n,]}")
"""What may follow a number."""


class _JsonRows(LineRows):
    """Rows of a JSON Lines file. A column is null also for rows that lack it."""

    def lacks(self, name: str, column: pa.Array | None) -> bool:  # noqa: ARG002 - others need it
        """Whether the column is null everywhere, and no line holds a null."""
        return column is not None and column.null_count == len(column) and b"null" not in self._lines.text

    def row(self, line: bytes) -> dict[str, Json]:
        return parse_object(line)


def _lines_of(text: bytes) -> TextLines:
    """The lines of a text that are not blank."""
    newlines = places_of(numpy.frombuffer(text, numpy.uint8), ord("\n"))
    lines = TextLines(text, numpy.concatenate(([0], newlines + 1)), numpy.concatenate((newlines, [len(text)])))
    full = lines.ends > lines.starts
    places = numpy.minimum(lines.starts, max(0, len(text) - 1))
    for line in numpy.flatnonzero(full & (lines.codes[places] != _OPEN)).tolist() if text else ():
        full[line] = not lines[line].isspace()
    return TextLines(text, lines.starts[full], lines.ends[full])


class _ParsedLines(NamedTuple):
    """The lines start..stop-1, in columns."""

    start: int
    stop: int
    columns: ArraysByName


class JsonTables:
    """Reads the lines of one file as tables.

    Args:
        names: of the columns that are needed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._types: dict[str, pa.DataType] = {}
        """The types of columns, as far as known."""

    def chunks(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """The rows of a file that are not done: see `headrace.io.storage.rows.FileFormat.read`."""
        begin = base
        for text, size in text_blocks(file, TABLE_BYTES):
            lines = _lines_of(text)
            rows = len(lines)
            pieces = max(1, math.ceil(rows / fewer_if_long(TABLE_ROWS, rows, len(text))))
            for piece in range(pieces):
                start, stop = rows * piece // pieces, rows * (piece + 1) // pieces
                positions = positions_todo(base + start, base + stop, next_todo)
                yield from self._chunks(lines.at(positions - base), positions, share(size, start, stop, rows))
            base += rows
        return base - begin

    def _chunks(self, lines: TextLines, positions: Positions, size: int) -> Iterator[Chunk]:
        """Some lines as chunks. A row that does not go with the others has a chunk of its own, without a table."""
        types = self._types_of(lines)
        pieces, refused = _parsed(lines, types)
        rows, failures = _by_rows(lines, refused, positions)
        if not pieces:
            columns = {name: _column_of([row.get(name) for row in rows.values()]) for name in self._names}
            self._learn(columns)
            yield _chunk(lines, positions, numpy.array(list(rows), numpy.intp), columns, list(failures.values()), size)
            return
        own = {
            line: {name: _column_of([row.get(name)], kind) for name, kind in types.items()}
            for line, row in rows.items()
        }
        apart = [line for line, columns in own.items() if any(column is None for column in columns.values())]
        pieces += [_ParsedLines(line, line + 1, columns) for line, columns in own.items() if line not in apart]
        pieces.sort(key=lambda piece: piece.start)
        begin = 0
        for end in (*apart, len(lines)):
            mine = [piece for piece in pieces if begin <= piece.start < end]
            numbers = numpy.concatenate([numpy.arange(0), *(numpy.arange(start, stop) for start, stop, _ in mine)])
            bad = [failed for line, failed in failures.items() if begin <= line < end]
            columns = _joined(mine, lines, numbers)
            yield _chunk(lines, positions, numbers, columns, bad, size)
            size, begin = 0, end + 1
            self._learn(columns)
            if end in rows:
                position = int(positions[end])
                yield Chunk([Record(position, position, rows[end])], (), 0)

    def _learn(self, columns: ArraysByName) -> None:
        """Remember the types of columns that have values, and forget those that Arrow cannot hold."""
        for name, column in columns.items():
            if column is None:
                self._types.pop(name, None)
            elif column.null_count < len(column):
                self._types[name] = column.type

    def _types_of(self, lines: TextLines) -> Mapping[str, pa.DataType]:
        """The types of the columns that Arrow can hold: those of some rows where they are not known yet."""
        found = dict(self._types)
        if len(found) < len(self._names) and len(lines):
            sample = numpy.unique(numpy.linspace(0, len(lines) - 1, _SAMPLED, dtype=numpy.intp))
            rows, _ = _by_rows(lines, sample.tolist(), numpy.arange(len(lines)))
            for name in self._names:
                kind = self._types.get(name) or _usual_type([row.get(name) for row in rows.values()])
                if kind is not None:
                    found[name] = kind
        return found


def _usual_type(values: Sequence[Json]) -> pa.DataType | None:
    """The type of nearly all values that are not null; None if there is none, or if Arrow does not have it."""
    columns = [_column_of([value]) for value in values if value is not None]
    if not columns:
        return pa.null()
    kinds = [None if column is None else column.type for column in columns]
    usual = max(kinds, key=kinds.count)
    return usual if kinds.count(usual) * 4 >= len(kinds) * 3 else None


def _chunk(
    lines: TextLines,
    positions: Positions,
    numbers: RowNumbers,
    columns: ArraysByName,
    failures: Sequence[Failed],
    size: int,
) -> Chunk:
    if not len(numbers):
        return Chunk((), failures, size)
    table = SourceTable(positions[numbers], numbers, _JsonRows(lines), columns, typed=False)
    return Chunk(table, failures, size, table=table)


def _by_rows(
    lines: TextLines, numbers: Iterable[int], positions: Positions
) -> tuple[dict[int, dict[str, Json]], dict[int, Failed]]:
    """Some lines as `json.loads` reads them, and those that are no objects."""
    rows: dict[int, dict[str, Json]] = {}
    failures: dict[int, Failed] = {}
    for number in numbers:
        found = object_of(int(positions[number]), lines[number])
        if isinstance(found, Failed):
            failures[number] = found
        else:
            rows[number] = found.data
    return rows, failures


def _column_of(values: Sequence[Json], kind: pa.DataType | None = None) -> pa.Array | None:
    """Values as an Arrow array; None if no type of Arrow, or not this one, holds them as they are."""
    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    found = set(map(type, values)) - {type(None)}
    own = pa.null() if not found else kinds.get(next(iter(found))) if len(found) == 1 else None
    if own is None or (found and kind not in (None, own)):
        return None
    try:
        if found == {str} and type(None) not in map(type, values):
            return of_pieces([str(value).encode() for value in values]).cast(kind or own)
        if found == {int} and type(None) not in map(type, values):
            return of_numbers(numpy.array(values, numpy.int64))
        return pa.array(values, kind or own)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # a long integer, or a lone surrogate
        return None


def _joined(pieces: Sequence[_ParsedLines], lines: TextLines, numbers: RowNumbers) -> dict[str, pa.Array | None]:
    """The columns of several pieces."""
    found: dict[str, pa.Array | None] = {}
    for name in pieces[0].columns if pieces else ():
        first, *others = [piece.columns[name] for piece in pieces]
        column = pa.concat_arrays([first, *others]) if others or first is None else first
        found[name] = column if column.type != pa.float64() or _are_floats(name, column, lines, numbers) else None
    return found


def _are_floats(name: str, column: pa.Array, lines: TextLines, numbers: RowNumbers) -> bool:
    """Whether no value of a column of floats is an integer in its line, which Arrow does not tell."""
    values = column.fill_null(0.5).to_numpy()
    whole = numpy.flatnonzero(values == numpy.floor(values))
    return all(type(parse_object(lines[line])[name]) is float for line in numbers[whole].tolist())


def _parsed(lines: TextLines, types: Mapping[str, pa.DataType]) -> tuple[list[_ParsedLines], list[int]]:
    """The lines that Arrow's parser reads as `json.loads` does, and the numbers of the others.

    There are no pieces if it would refuse many lines.
    """
    if types and len(lines) and (columns := columns_of(lines, types)) is not None:
        return [_ParsedLines(0, len(lines), columns)], []
    refused = _suspects(lines) if types else []
    if not types or not len(lines) or len(refused) > _MOST_REFUSED:
        return [], list(range(len(lines)))
    bounds = [-1, *refused, len(lines)]
    left = [(before + 1, after) for before, after in itertools.pairwise(bounds) if before + 1 < after]
    pieces: list[_ParsedLines] = []
    while left:
        start, stop = left.pop()
        found = _parse(lines, start, stop, types)
        if isinstance(found, _ParsedLines):
            pieces.append(found)
            continue
        if len(refused) == _MOST_REFUSED:
            return [], list(range(len(lines)))
        refused.append(start + found)
        left += [(low, high) for low, high in ((start, start + found), (start + found + 1, stop)) if low < high]
    return pieces, sorted(refused)


def _parse(lines: TextLines, start: int, stop: int, types: Mapping[str, pa.DataType]) -> _ParsedLines | int:
    """The lines start..stop-1; or where to divide them, because one is refused: at that line if it is known."""
    from pyarrow import json

    first, end = int(lines.starts[start]), int(lines.ends[stop - 1])
    text = pa.BufferReader(pa.py_buffer(lines.text).slice(first, end - first))
    schema = pa.schema(list(types.items()))
    how = json.ParseOptions(schema, unexpected_field_behavior="ignore")
    try:
        table = json.read_json(text, json.ReadOptions(use_threads=False, block_size=end - first + 1), how)
    except pa.ArrowException as error:
        place = _PLACE.search(str(error))
        return min(int(place[1]) if place else (stop - start) // 2, stop - start - 1)
    if table.num_rows != stop - start:
        return (stop - start) // 2
    return _ParsedLines(start, stop, {name: table.column(name).chunk(0) for name in types})


def _suspects(lines: TextLines) -> list[int]:
    """The lines that Arrow's parser may accept where `json.loads` does not, in ascending order.

    As each line that is left begins with a brace and ends with one, and no text holds a newline, none is read with its
    neighbour if there are as many objects as lines.
    """
    if not len(lines):
        return []
    first, end = int(lines.starts[0]), int(lines.ends[-1])
    codes, starts, ends = lines.codes[first:end], lines.starts - first, lines.ends - first
    lasts = ends - 1
    while (blank := (lasts > starts) & numpy.isin(codes[lasts], _BLANK)).any():
        lasts = lasts - blank
    lengths = ends - starts
    odd = (codes[starts] != _OPEN) | (codes[lasts] != _CLOSED) | (lengths > MAX_LINE_BYTES)
    deepest = sys.getrecursionlimit() // 2
    if (lengths > deepest).any():
        opened = places_of(codes, ord("["), _OPEN)
        odd |= numpy.searchsorted(opened, ends) - numpy.searchsorted(opened, starts) > deepest
    places = numpy.concatenate((_wrong_numbers(codes), _long_numbers(codes)))
    if lines.text.find(b"\0", first, end) >= 0:  # the parser takes it as the end
        places = numpy.concatenate((places, places_of(codes, 0)))
    odd[numpy.searchsorted(starts, places, "right") - 1] = True
    odd |= lines.are_broken()
    found: list[int] = numpy.flatnonzero(odd).tolist()
    return found


def _wrong_numbers(codes: Codes) -> RowNumbers:
    """The places of `Inf` and `-NaN`, which Arrow's parser takes as numbers."""
    places = places_of(codes, ord("I"), ord("N"))
    places = places[(places > 0) & (places + 3 < len(codes))]
    first, second, third, after = (codes[places + step] for step in range(4))
    infinite = (first == ord("I")) & (second == ord("n")) & (third == ord("f")) & (after != ord("i"))
    nan = (first == ord("N")) & (codes[places - 1] == ord("-"))
    wrong: RowNumbers = places[(infinite & numpy.isin(after, _ENDS)) | nan]
    return wrong


def _long_numbers(codes: Codes) -> RowNumbers:
    """Places in all runs of digits that are longer than Python reads, and perhaps in others."""
    step = sys.get_int_max_str_digits() // 4
    if not step:
        return numpy.empty(0, numpy.intp)
    sampled = codes[::step]
    digits = (sampled >= ord("0")) & (sampled <= ord("9"))
    return numpy.flatnonzero(digits[3:] & digits[2:-1] & digits[1:-2] & digits[:-3]) * step
