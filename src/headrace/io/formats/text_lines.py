"""Plain text: a record for each line."""

from __future__ import annotations

from collections.abc import Callable, Generator

from headrace.io.base import Chunk
from headrace.io.formats.known import Format
from headrace.io.storage.files import InputFile
from headrace.io.storage.rows import (
    CHUNK_ROWS,
    MAX_LINE_BYTES,
    FileFormat,
    failed_line,
    full_lines,
    line_blocks,
    share,
    todo,
)
from headrace.records import Failed, Record


class TextLinesFormat(FileFormat):
    """The lines of a file, each a record with the column `text`. Blank lines are skipped and take no position.

    A line that is not UTF-8, or longer than 64 MiB, is a `Failed` at its position.
    """

    name = "txt"
    is_text = True

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 rows per chunk, from one block of 256 KiB (or one longer line)."""
        begin = base
        for block, size in line_blocks(file):
            lines = full_lines(block)
            for start in range(0, len(lines) or 1, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, len(lines))
                records: list[Record] = []
                failures: list[Failed] = []
                for position in todo(base + start, base + stop, next_todo):
                    line = lines[position - base]
                    try:
                        records.append(Record(position, position, {"text": _text(line)}))
                    except ValueError as error:
                        failures.append(failed_line(position, line, error))
                yield Chunk(records, failures, share(size, start, stop, len(lines)) if lines else size)
            base += len(lines)
        return base - begin


def _text(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    return line.decode().removesuffix("\r")


TXT = Format(name="txt", reader=TextLinesFormat, compressible=True, common=True)
