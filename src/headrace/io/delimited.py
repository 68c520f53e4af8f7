"""CSV and TSV after RFC 4180: a header line, quoted fields that may hold newlines."""

from __future__ import annotations

import csv
from collections.abc import Callable, Generator, Iterator
from typing import Any

from headrace.errors import ConfigError
from headrace.io.base import Chunk
from headrace.io.files import CHUNK_BYTES, CHUNK_ROWS, InputFile
from headrace.io.lines import MAX_LINE_BYTES, line_blocks
from headrace.records import Failed, Record


class DelimitedFormat:
    """The rows below the header, each a dict of texts. A blank line is no record.

    A row with more or fewer fields than the header, with bytes that are not UTF-8, or with a broken quote is a `Failed`
    at its position; a quote that is never closed takes what it swallows (at most 64 MiB) with it.
    """

    def __init__(self, name: str, delimiter: str) -> None:
        self.name = name
        self._delimiter = delimiter

    def count(self, file: InputFile) -> int | None:  # noqa: ARG002 - the seam's shape
        """Unknown without reading it all."""
        return None

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """A chunk is at most 512 rows and about 4 MiB."""
        csv.field_size_limit(MAX_LINE_BYTES)  # the module has one limit for all readers; its default is 128 KiB
        lines = _Lines(file)
        rows = csv.reader(lines, delimiter=self._delimiter, strict=True)
        header = _header(rows, file)
        begin = base
        records: list[Record] = []
        failures: list[Failed] = []
        wanted = next_todo(base)
        rows_in_chunk = 0
        for row in _tolerant(rows):
            if row == []:
                continue
            if base == wanted:
                outcome = _row(header, row, base)
                if isinstance(outcome, Failed):
                    failures.append(outcome)
                else:
                    records.append(outcome)
                wanted = next_todo(base + 1)
            base += 1
            rows_in_chunk += 1
            if rows_in_chunk >= CHUNK_ROWS or lines.read_bytes - lines.told >= CHUNK_BYTES:
                yield Chunk(records, failures, lines.take())
                records, failures, rows_in_chunk = [], [], 0
        yield Chunk(records, failures, lines.take())
        return base - begin


class _Lines:
    """The lines of a file as text, and how far in the file they are."""

    def __init__(self, file: InputFile) -> None:
        self._lines = self._decoded(file)
        self.read_bytes = 0
        self.told = 0

    def __iter__(self) -> Iterator[str]:
        return self._lines

    def take(self) -> int:
        """Bytes of the file since the last call."""
        size, self.told = self.read_bytes - self.told, self.read_bytes
        return size

    def _decoded(self, file: InputFile) -> Iterator[str]:
        for lines, size in line_blocks(file):
            self.read_bytes += size
            for line in lines:
                # Bytes that are no UTF-8 pass through as surrogates, and fail their own row.
                yield line.decode(errors="surrogateescape") + "\n"


def _tolerant(rows: Iterator[list[str]]) -> Iterator[list[str] | csv.Error]:
    """The rows, with an error in place of one that cannot be read: the reader goes on with the next line."""
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield error
        else:
            if row is None:
                return
            yield row


def _header(rows: Iterator[list[str]], file: InputFile) -> list[str]:
    try:
        header = next((row for row in rows if row), [])
    except csv.Error as error:
        raise ConfigError(f"cannot read the header line of {file.path}: {error}") from error
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise ConfigError(f"{file.path} has two columns named {min(twice)!r} in its header line; rename one")
    return header


def _row(header: list[str], row: list[str] | csv.Error, position: int) -> Record | Failed:
    if isinstance(row, csv.Error):
        return _failed(position, None, "ValueError", str(row))
    data: dict[str, Any] = dict(zip(header, row, strict=False))
    if len(row) != len(header):
        return _failed(position, row, "ValueError", f"the row has {len(row)} fields, the header {len(header)}")
    if not "".join(row).isascii():
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            return _failed(position, row, "UnicodeDecodeError", "the row is not valid UTF-8")
    return Record(position, position, data)


def _failed(position: int, row: list[str] | None, reason: str, message: str) -> Failed:
    return Failed(Record(position, position, row), reason, message)
