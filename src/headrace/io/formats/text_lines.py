"""Plain text: a record for each line."""

from __future__ import annotations

from collections.abc import Callable, Generator

from headrace.io.base import Chunk
from headrace.io.formats.known import Format
from headrace.io.storage.files import InputFile
from headrace.io.storage.rows import MAX_LINE_BYTES, FileFormat, failed_line, line_chunks
from headrace.records import Failed, Record


class TextLinesFormat(FileFormat):
    """The lines of a file, each a record with the column `text`. Blank lines are skipped and take no position.

    A line that is not UTF-8, or longer than 64 MiB, is a `Failed` at its position.
    """

    name = "txt"
    is_text = True

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 rows per chunk, from one block of 256 KiB (or one longer line)."""
        return line_chunks(file, base, next_todo, _row)


def _row(position: int, line: bytes) -> Record | Failed:
    try:
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
        return Record(position, position, {"text": line.decode().removesuffix("\r")})
    except ValueError as error:
        return failed_line(position, line, error)


TXT = Format(name="txt", reader=TextLinesFormat, compressible=True, common=True)
