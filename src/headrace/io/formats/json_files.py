"""JSON files: one array of objects, or objects one after the other."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Generator, Iterator

from headrace.errors import JobError
from headrace.io.base import Chunk
from headrace.io.formats.jsonl import JsonlFormat
from headrace.io.formats.known import Format
from headrace.io.storage.files import InputFile
from headrace.io.storage.rows import (
    BOM,
    MAX_LINE_BYTES,
    NOT_UTF_8,
    RAW_KEPT_BYTES,
    FileFormat,
    blocks,
    check_is_text,
    parse_object,
    row_chunks,
)
from headrace.records import Failed, Record, text_refusal

_DECODER = json.JSONDecoder()
_BLANK = " \t\r\n"


class JsonFormat(FileFormat):
    """The objects of an array, or of a file that holds them one after the other, as JSON Lines do.

    An element that is no object, or not UTF-8, is a `Failed` at its position. The file is read piece by piece; one that
    is damaged gives the objects before the damage, and ends the job there.
    """

    name = "json"
    is_text = True

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """A chunk is at most 512 rows and about 4 MiB."""
        text = _Text(file)
        return row_chunks(_elements(text, file), _row, base, next_todo, lambda: text.read_bytes)


class _Text:
    """The text of a file from a place on, of which no more is held than one element needs."""

    def __init__(self, file: InputFile) -> None:
        self._blocks = blocks(file)
        self._file = file
        # Invalid UTF-8 becomes surrogates, which fail their row.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.held = ""
        self.place = 0
        """Where to go on in `held`."""
        self.read_bytes = self._dropped = 0

    @property
    def offset(self) -> int:
        """Characters of the file before the place."""
        return self._dropped + self.place

    def more(self) -> bool:
        """Hold at least twice as much as is left; false at the end of the file."""
        pieces, left = [self.held[self.place :]], len(self.held) - self.place
        self._dropped += self.place
        wanted, found = 2 * left, False
        while left <= wanted:
            block, size = next(self._blocks, (None, 0))
            if block is None:
                break
            if not self.read_bytes:
                check_is_text(block, self._file)
                block = block.removeprefix(BOM)
            self.read_bytes += size
            pieces.append(self._decoder.decode(block))
            left += len(pieces[-1])
            found = True
        self.held, self.place = "".join(pieces), 0
        return found

    def peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            while self.place < len(self.held) and self.held[self.place] in _BLANK:
                self.place += 1
            if self.place < len(self.held):
                return self.held[self.place]
            if not self.more():
                return ""

    def value(self) -> tuple[object, str]:
        """The next value, and its text. Raises ValueError, RecursionError: there is none."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.held, self.place)
            except ValueError:
                if len(self.held) - self.place > MAX_LINE_BYTES or not self.more():
                    raise
                continue
            if end == len(self.held) and self.more():  # a number may go on
                continue
            raw, self.place = self.held[self.place : end], end
            return value, raw


def _elements(text: _Text, file: InputFile) -> Iterator[tuple[object, str]]:
    """The elements of the array, or the values of the file, each with its text.

    Raises:
        JobError: the file is damaged.
    """
    is_array = text.peek() == "["
    text.place += is_array
    try:
        while (mark := text.peek()) and not (is_array and mark == "]"):
            yield text.value()
            if is_array and text.peek() not in (",", "]"):
                raise ValueError("a comma or the end of the array is missing")
            text.place += is_array and text.peek() == ","
        if is_array and not mark:
            raise ValueError("the array is not closed")
        text.place += is_array
        if rest := text.peek():
            raise ValueError(f"{rest!r} follows the end of the array")
    except (ValueError, RecursionError) as error:
        words = getattr(error, "msg", str(error))
        raise JobError(f"{file.path} is damaged at character {text.offset:,}: {words}") from error


def _row(position: int, found: tuple[object, str]) -> Record | Failed:
    element, raw = found
    if not raw.isascii() and text_refusal(raw) is not None:
        shown = raw[:RAW_KEPT_BYTES].encode(errors="surrogateescape").decode(errors="replace")
        row = Record(position, position, shown)
        return Failed(row, "UnicodeDecodeError", f"the element is not text: {NOT_UTF_8}", code="invalid_json_line")
    if type(element) is dict:
        return Record(position, position, element)
    message = f"the element is a JSON {type(element).__name__}, not an object"
    return Failed(Record(position, position, raw[:RAW_KEPT_BYTES]), "TypeError", message, code="invalid_json_line")


def _lines(file: InputFile) -> FileFormat | None:
    """What reads JSON Lines under this suffix, where a bad line costs no more than itself."""
    block = next(blocks(file), (b"", 0))[0].removeprefix(BOM)
    line, newline, _ = block.partition(b"\n")
    try:
        return JsonlFormat() if newline and parse_object(line) is not None else None
    except (ValueError, TypeError, RecursionError):
        return None


JSON = Format(name="json", reader=JsonFormat, recognized=_lines, compressible=True, common=True)
