"""CSV and TSV after RFC 4180: a header line, quoted fields that may hold newlines."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from headrace.errors import ConfigError
from headrace.io.base import Chunk
from headrace.io.formats.csv_tables import CsvTables, row_of, wrong_width
from headrace.io.formats.csv_writer import DELIMITERS, CsvWriter
from headrace.io.formats.kept_columns import check_text_column
from headrace.io.formats.known import Format
from headrace.io.formats.tables import check_names
from headrace.io.storage.files import InputFile
from headrace.io.storage.row_tables import has_arrow
from headrace.io.storage.rows import (
    MAX_LINE_BYTES,
    NOT_UTF_8,
    RAW_KEPT_BYTES,
    FileFormat,
    line_blocks,
    row_chunks,
)
from headrace.records import Failed, Record

_LINE_BYTES = 64
"""Approximate overhead of a line held in memory, in bytes; it counts towards a row's limit."""
_SPARE_QUOTES = 64
"""Extra runs of quotes allowed in a row of several lines, beyond two per field."""
_NEVER_CLOSED = "a quoted field is never closed"
_LONE_CR = r"a line ends with a carriage return alone; convert the file first: tr '\r' '\n' < FILE > NEW"
_ODD_QUOTES = re.compile(r'(?<!")"(?:"")*(?!")')


class DelimitedFormat(FileFormat):
    """The rows below the header, each a dict of strings. Blank lines are skipped.

    A row with more or fewer fields than the header, with bytes that are not UTF-8, or with a broken quote is a `Failed`
    at its position. Where a quote is not closed, the lines up to the next whole row are one `Failed`.
    """

    is_text = True

    def __init__(self, name: str, delimiter: str, names: Sequence[str] = ()) -> None:
        self.name = name
        self._delimiter = delimiter
        self._names = names
        """The columns that are needed, to read the rows as tables of these."""

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """A chunk is at most 512 rows and about 4 MiB; of a table 32,768 rows, from one block of 4 MiB."""
        if self._names:
            return CsvTables(self._names, self._delimiter, self._by_rows).chunks(file, base, next_todo)
        return self._by_rows(file, base, next_todo)

    def _by_rows(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        csv.field_size_limit(MAX_LINE_BYTES)  # the module has one limit for all readers; its default is 128 KiB
        lines = _LineReader(file)
        rows = _RowParser(lines, self._delimiter)
        header = _header(rows, file)

        def row(position: int, found: list[str] | _BrokenLines) -> Record | Failed:
            return found.failed(position, file) if isinstance(found, _BrokenLines) else row_of(header, found, position)

        return row_chunks(rows.below(len(header)), row, base, next_todo, lambda: lines.read_bytes)

    def delimited(self, delimiter: str) -> FileFormat:
        """The same with another mark between fields.

        Raises:
            ConfigError: it is not one character of ASCII, or has another meaning.
        """
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0':
            raise ConfigError(
                f"``input_delimiter`` is {delimiter!r}; it must be one ASCII character other than a quote or a newline"
            )
        return DelimitedFormat(self.name, delimiter)

    def in_columns(self, names: Sequence[str]) -> FileFormat:
        """The rows as tables; as they are if Arrow or NumPy is not installed, or no column is needed."""
        return DelimitedFormat(self.name, self._delimiter, names) if names and has_arrow() else self


class _LineReader:
    """The lines of a file as text; lines of the current row can be returned and read again."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._lines = self._decoded()
        self._back: deque[str] = deque()
        self._back_bytes = self._offset = self._number = 0
        self.row: list[str] = []
        """The lines of the row being read."""
        self.most_quotes = _SPARE_QUOTES
        self._held = self._quotes = 0
        self.read_bytes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next line. Raises csv.Error: the row is too long, so a quote is probably not closed."""
        line = self._again() if self._back else next(self._lines)
        self.row.append(line)
        if len(self.row) > 1:
            self._hold(line)
        return line

    def begin_row(self) -> None:
        self.row = []
        self._held = self._quotes = 0

    def give_back(self, lines: list[str]) -> None:
        """Return the lines read last, to be read again."""
        self._back.extendleft(reversed(lines))
        self._back_bytes += sum(map(_size, lines))

    def drop(self, count: int) -> None:
        for _ in range(count):
            self._again()

    @property
    def place(self) -> tuple[int, int]:
        """Bytes and lines before the next line."""
        return self._offset - self._back_bytes, self._number - len(self._back)

    def _again(self) -> str:
        line = self._back.popleft()
        self._back_bytes -= _size(line)
        return line

    def _hold(self, line: str) -> None:
        # A row with the header's width has no more quotes than that. The bound keeps the search for the next whole row
        # linear in the file's length, even with many unclosed quotes.
        self._held += len(line) + _LINE_BYTES
        if '"' in line:
            self._quotes += sum(1 for _ in _ODD_QUOTES.finditer(line))
        if self._held > MAX_LINE_BYTES:
            raise csv.Error(f"a quoted field is longer than {MAX_LINE_BYTES} bytes")
        if self._quotes > self.most_quotes:
            raise csv.Error("a quoted field holds quotes that are not doubled")

    def _decoded(self) -> Iterator[str]:
        is_plain = self._file.path.suffix.lower() not in (".gz", ".zst")
        for lines, size in line_blocks(self._file):
            if is_plain:  # what precedes the lines is a byte order mark, or a line too long to be held
                self._offset = max(self.read_bytes, self.read_bytes + size - sum(map(len, lines)) - len(lines))
            self.read_bytes += size
            for line in lines:
                self._offset += len(line) + 1
                self._number += 1
                # Invalid UTF-8 becomes surrogates, which fail their row.
                yield line.decode(errors="surrogateescape") + "\n"


class _BrokenLines:
    """Lines that do not form a row.

    Args:
        line: the first of them, with its newline.
        end: bytes and lines of the content up to its end.
    """

    def __init__(self, line: str, end: tuple[int, int], message: str) -> None:
        self._start = end[0] - _size(line), end[1] - 1
        self._message = message
        self._text = ""
        self.add(line, end)

    def add(self, line: str, end: tuple[int, int]) -> None:
        self._text += line[: RAW_KEPT_BYTES - len(self._text)]
        self._end = end

    def failed(self, position: int, file: InputFile) -> Failed:
        """The dead letter: where the lines are, and how they begin."""
        (start, before), (end, last) = self._start, self._end
        lost = f"line {last}" if last - before == 1 else f"{last - before:,} lines, from {before + 1} on,"
        data = {"file": str(file.path), "bytes": [start, end], "lines": [before + 1, last], "text": self._text}
        return Failed(Record(position, position, data), "ValueError", f"{self._message}; {lost} cannot be read")


class _RowParser:
    """Parses lines as rows; after an unclosed quote, continues at the next line that begins a whole row.

    Rows depend only on the content, so that positions are the same at every read.
    """

    def __init__(self, lines: _LineReader, delimiter: str) -> None:
        self._lines = lines
        self._reader = csv.reader(lines, delimiter=delimiter, strict=True)
        field = rf'(?:"[^"]*+(?:""[^"]*+)*+"|[^"{delimiter}\r\n]*+)'
        self._well_formed = re.compile(rf"{field}(?:{delimiter}{field})*+\r?\n")

    def header(self) -> list[str]:
        """The first row that is not blank. Raises csv.Error: it cannot be read."""
        while (row := self._next()) == []:
            pass
        if isinstance(row, csv.Error):
            raise row
        return row or []

    def below(self, width: int) -> Iterator[list[str] | _BrokenLines]:
        """The rows below a header of `width` fields, and the bad lines between them."""
        lines = self._lines
        lines.most_quotes = 2 * width + _SPARE_QUOTES
        bad: _BrokenLines | None = None
        while (row := self._next()) is not None:
            taken = lines.row
            if bad is not None:
                if not self._is_whole(row, width):
                    lines.give_back(taken[1:])
                    bad.add(taken[0], lines.place)
                    continue
                yield bad
                bad = None
            if isinstance(row, csv.Error):
                lines.give_back(taken[1:])
                bad = _BrokenLines(
                    taken[0], lines.place, _NEVER_CLOSED if str(row) == "unexpected end of data" else str(row)
                )
                if len(taken) == 1:
                    yield bad
                    bad = None
            elif len(taken) > 1 and len(row) != width and self._hides_rows(width):
                bad = _BrokenLines(taken[0], lines.place, wrong_width(row, width))
            elif row:
                yield row
        if bad is not None:
            yield bad

    def _next(self) -> list[str] | csv.Error | None:
        """The next row or its error; None at the end."""
        self._lines.begin_row()
        try:
            return next(self._reader, None)
        except csv.Error as error:
            return csv.Error(_LONE_CR) if str(error).startswith("new-line character") else error

    def _is_whole(self, row: list[str] | csv.Error, width: int) -> bool:
        """Whether the lines just read form a well-formed row: quotes only around quoted fields."""
        return (
            isinstance(row, list)
            and len(row) == width
            and self._well_formed.fullmatch("".join(self._lines.row)) is not None
        )

    def _hides_rows(self, width: int) -> bool:
        """Whether the row just read, of several lines and the wrong width, contains whole rows up to its last line.

        If so, all lines except its first are returned.
        """
        lines, inner = self._lines, self._lines.row[1:]
        lines.give_back(inner)
        read: list[str] = []
        whole = False
        while len(read) < len(inner) and (row := self._next()) is not None:
            whole = self._is_whole(row, width)
            if not whole:
                lines.give_back(lines.row[1:])
            read += lines.row if whole else lines.row[:1]
        lines.give_back(read)
        if not whole:
            lines.drop(len(inner))
        return whole


def _size(line: str) -> int:
    return len(line.encode(errors="surrogateescape"))


def _header(rows: _RowParser, file: InputFile) -> list[str]:
    try:
        header = rows.header()
    except csv.Error as error:
        raise ConfigError(f"cannot read the header line of {file.path}: {error}") from error
    try:
        "".join(header).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the header line of {file.path} is {NOT_UTF_8} FILE > NEW") from None
    check_names(header, f"the header line of {file.path}")
    return header


def _declared(name: str) -> Format:
    return Format(
        name=name,
        reader=lambda: DelimitedFormat(name, DELIMITERS[name]),
        writer=lambda layout, compression, _: CsvWriter(layout.column, layout.keep, name, compression, layout.on_nan),
        check_column=check_text_column,
        compressible=True,
    )


CSV = _declared("csv")
TSV = _declared("tsv")
