"""Reads CSV and TSV by column, a whole block at once, as long as its quotes are those of RFC 4180.

From the first row on where they are not, all rows are read one by one. Single rows with too many or too few fields, or
with bytes that are not UTF-8, fail and leave the others where they are.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.extras import lazy
from headrace.io.base import Chunk
from headrace.io.formats.text_tables import LineRows, TextLines, places_of
from headrace.io.storage.files import InputFile
from headrace.io.storage.row_tables import TABLE_BYTES, TABLE_ROWS, SourceTable
from headrace.io.storage.rows import MAX_LINE_BYTES, NOT_UTF_8, changed, positions_todo, share, text_blocks
from headrace.records import Failed, Record

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa

    from headrace.columns import RowNumbers
else:
    numpy, pa = lazy("numpy"), lazy("pyarrow")

ByRows: TypeAlias = Callable[[InputFile, int, Callable[[int], int]], Generator[Chunk, None, int]]
_QUOTE, _NEWLINE, _RETURN = map(ord, '"\n\r')
_MARK = b"\xef\xbb\xbf"
LONGEST_ROW = 1_000_000
"""Bytes of a row; in longer ones a quote is probably not closed."""


class _CsvFields(LineRows):
    def __init__(self, lines: TextLines, header: Sequence[str], delimiter: str) -> None:
        super().__init__(lines)
        self._header = header
        self._delimiter = delimiter

    def lacks(self, name: str, column: pa.Array | None) -> bool:  # noqa: ARG002 - others need it
        return name not in self._header

    def row(self, line: bytes) -> dict[str, str]:
        return dict(zip(self._header, fields(line, self._delimiter), strict=True))


def fields(text: bytes, delimiter: str) -> list[str]:
    """The fields of a row. Raises csv.Error: its quotes are wrong."""
    lines = [f"{line}\n" for line in text.decode(errors="surrogateescape").split("\n")]
    return next(csv.reader(lines, delimiter=delimiter, strict=True))


def row_of(header: Sequence[str], row: list[str], position: int) -> Record | Failed:
    """The record of a row; a `Failed` if it has too many or too few fields, or is not UTF-8."""
    if len(row) != len(header):
        return Failed(Record(position, position, row), "ValueError", wrong_width(row, len(header)))
    if not "".join(row).isascii():
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            return Failed(Record(position, position, row), "UnicodeDecodeError", f"the row is {NOT_UTF_8}")
    return Record(position, position, dict(zip(header, row, strict=True)))


def wrong_width(row: list[str], width: int) -> str:
    return f"the row has {len(row)} fields, the header {width}"


class _CsvRows(NamedTuple):
    lines: TextLines
    """Those that are whole and not blank, up to the first that is not as RFC 4180 has it."""
    widths: RowNumbers
    """How many fields each has."""
    rest: bytes
    """What follows them."""
    ends: bool
    """Whether the next row is not as RFC 4180 has it."""


class CsvTables:
    """Reads one file.

    Args:
        names: of the columns that are needed.
        by_rows: reads a file row by row.
    """

    def __init__(self, names: Sequence[str], delimiter: str, by_rows: ByRows) -> None:
        self._names = names
        self._delimiter = delimiter
        self._by_rows = by_rows
        self._header: list[str] = []
        self._told = 0
        """Bytes of the chunks so far."""

    def chunks(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """The rows of a file that are not done: see `headrace.io.storage.rows.FileFormat.read`."""
        csv.field_size_limit(MAX_LINE_BYTES)
        position, is_whole = yield from self._in_columns(file, base, next_todo)
        if is_whole:
            return position - base
        rows = self._by_rows(file, base, lambda place: next_todo(max(place, position)))
        return (yield from changed(rows, self._untold))

    def _untold(self, chunk: Chunk) -> Chunk:
        """The chunk without the bytes that were told before, because they are read again."""
        again = min(self._told, chunk.bytes)
        self._told -= again
        return replace(chunk, bytes=chunk.bytes - again)

    def _in_columns(
        self, file: InputFile, base: int, next_todo: Callable[[int], int]
    ) -> Generator[Chunk, None, tuple[int, bool]]:
        """Rows by column, as far as possible. Returns the position of the next row, and whether there is none."""
        held = b""
        for text, size in text_blocks(file, TABLE_BYTES):
            rows = _rows_of(held + text if text.endswith(b"\n") else held + text + b"\n", ord(self._delimiter))
            held, lines, widths = rows.rest, rows.lines, rows.widths
            if not self._header and len(lines):
                self._header = _header(lines[0], self._delimiter)
                if not self._header:
                    return base, False
                lines, widths = lines.at(numpy.arange(1, len(lines))), widths[1:]
            whole = self._whole(lines, widths)
            yield from self._tables(lines.at(numpy.arange(whole)), widths[:whole], base, next_todo, size)
            self._told += size
            base += whole
            if whole < len(lines) or rows.ends or len(held) > LONGEST_ROW:
                return base, False
        return base, bool(self._header) and not held

    def _whole(self, lines: TextLines, widths: RowNumbers) -> int:
        """How many rows there are before one that may hide others, or is very long."""
        lengths = lines.ends - lines.starts
        for line in numpy.flatnonzero((widths != len(self._header)) | (lengths > LONGEST_ROW)).tolist():
            if lengths[line] > LONGEST_ROW or b"\n" in lines[line]:
                return int(line)
        return len(lines)

    def _tables(
        self, lines: TextLines, widths: RowNumbers, base: int, next_todo: Callable[[int], int], size: int
    ) -> Iterator[Chunk]:
        """The rows of some lines; the first has position `base`."""
        pieces = max(1, math.ceil(len(lines) / TABLE_ROWS))
        for piece in range(pieces):
            start, stop = len(lines) * piece // pieces, len(lines) * (piece + 1) // pieces
            positions = positions_todo(base + start, base + stop, next_todo)
            mine = lines.at(positions - base)
            bad = (widths[positions - base] != len(self._header)) | mine.are_broken()
            rows = (self._row(mine[line], int(positions[line])) for line in numpy.flatnonzero(bad).tolist())
            failures = Chunk.of(rows, 0).failures
            good = numpy.flatnonzero(~bad)
            kept, places = mine.at(good), positions[good]
            columns = self._columns(kept)
            bytes_read = share(size, start, stop, len(lines))
            if columns is None or not len(kept):
                found = [self._row(kept[line], int(places[line])) for line in range(len(kept))]
                yield Chunk([row for row in found if isinstance(row, Record)], failures, bytes_read)
                continue
            maker = _CsvFields(kept, self._header, self._delimiter)
            table = SourceTable(places, numpy.arange(len(kept)), maker, columns, typed=False)
            yield Chunk(table, failures, bytes_read, table=table)

    def _row(self, line: bytes, position: int) -> Record | Failed:
        return row_of(self._header, fields(line, self._delimiter), position)

    def _columns(self, lines: TextLines) -> dict[str, pa.Array] | None:
        """The columns that are needed; None if Arrow reads other rows."""
        from pyarrow import csv as reader

        names = [name for name in self._names if name in self._header]
        if not names or not len(lines):
            return {}
        start, end = int(lines.starts[0]), int(lines.ends[-1]) + 1
        if lines.text.startswith(_MARK, start):  # Arrow takes it as the mark of a file
            return None
        read = reader.ReadOptions(use_threads=False, block_size=end - start + 1, column_names=self._header)
        parse = reader.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        texts = dict.fromkeys(names, pa.string())
        convert = reader.ConvertOptions(column_types=texts, include_columns=names, strings_can_be_null=False)
        source = pa.BufferReader(pa.py_buffer(lines.text).slice(start, end - start))
        try:
            table = reader.read_csv(source, read, parse, convert)
        except pa.ArrowException:
            return None
        if table.num_rows != len(lines):
            return None
        return {name: table.column(name).combine_chunks() for name in names}


def _header(line: bytes, delimiter: str) -> list[str]:
    """The names in a header; none if something is wrong with it, which reading by rows says."""
    names = fields(line, delimiter)
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return []
    return names if len(set(names)) == len(names) else []


def _rows_of(text: bytes, delimiter: int) -> _CsvRows:
    """The rows of a text that ends with a newline.

    Each second quote closes a field. If each that opens one comes after the end of a field, and each that closes one
    comes before the next, or they are doubled, then the quotes are those of RFC 4180.
    """
    codes = numpy.frombuffer(text, numpy.uint8)
    quotes = places_of(codes, _QUOTE)

    def outside(places: RowNumbers) -> RowNumbers:
        """Those that are in no quoted field."""
        found: RowNumbers = places[numpy.searchsorted(quotes, places) % 2 == 0] if len(quotes) else places
        return found

    opening, closing = quotes[::2], quotes[1::2]
    returns = outside(places_of(codes, _RETURN))
    wrong = numpy.concatenate(
        [
            opening[~numpy.isin(codes[opening - 1], [delimiter, _NEWLINE, _QUOTE])],  # -1 is the last newline
            closing[~numpy.isin(codes[closing + 1], [delimiter, _NEWLINE, _RETURN, _QUOTE])],
            returns[codes[returns + 1] != _NEWLINE],
            [place for place in (text.find(b"\0"),) if place >= 0],
        ]
    ).astype(numpy.intp)
    newlines = outside(places_of(codes, _NEWLINE))
    ends = newlines[newlines < wrong.min()] if len(wrong) else newlines
    starts = numpy.concatenate(([0], ends + 1))
    after, starts = int(starts[-1]), starts[:-1]
    delimiters = outside(places_of(codes, delimiter))
    widths = numpy.searchsorted(delimiters, ends) - numpy.searchsorted(delimiters, starts) + 1
    full = (ends > starts) & ~((ends - starts == 1) & (codes[starts] == _RETURN))
    return _CsvRows(TextLines(text, starts[full], ends[full]), widths[full], text[after:], bool(len(wrong)))
