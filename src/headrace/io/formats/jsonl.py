"""JSON Lines: one JSON object per line, in and out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from headrace.columns import FinishedRows
from headrace.io.base import Chunk
from headrace.io.formats.json_tables import JsonTables
from headrace.io.formats.json_texts import has_columns, lines_of_texts, row_texts
from headrace.io.formats.kept_columns import check_text_column
from headrace.io.formats.known import Format
from headrace.io.formats.openai_batch import recognized
from headrace.io.formats.strict_json import OnNan, StrictJson, json_default
from headrace.io.formats.writer import LineWriter, plain_row
from headrace.io.storage.files import InputFile
from headrace.io.storage.row_tables import has_arrow
from headrace.io.storage.rows import FileFormat, object_chunks
from headrace.records import Ok


class JsonlFormat(FileFormat):
    """The lines of a file. Blank lines are skipped and take no position.

    A line that is not UTF-8, not JSON or not a JSON object is a `Failed` at its position, with the raw line (its first
    4,096 bytes, undecodable bytes replaced) as data.
    """

    name = "jsonl"
    is_text = True

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 rows per chunk, from one block of 256 KiB (or one longer line)."""
        return object_chunks(file, base, next_todo)

    def in_columns(self, names: Sequence[str]) -> FileFormat:
        """The lines as tables; as they are if Arrow or NumPy is not installed, or no column is needed."""
        return _JsonlColumns(names) if names and has_arrow() else self


class _JsonlColumns(JsonlFormat):
    """The lines of a file as tables of some columns."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 32,768 rows per chunk, from one block of 4 MiB (or one longer line)."""
        return JsonTables(self._names).chunks(file, base, next_todo)


class JsonlWriter(LineWriter):
    """One object per line: the record's id, its kept columns, and its output in `column`.

    NumPy arrays become lists; dates and times become text.

    Args:
        column: the name of the output.
        compression: a suffix, ".gz" or ".zst": each part is one compressed stream, and so is their concatenation.
        on_nan: what NaN and infinities become.
    """

    def __init__(self, column: str, compression: str = "", on_nan: OnNan = "null") -> None:
        super().__init__(StrictJson(json_default, on_nan), compression)
        self._column = column
        self.suffix = f".jsonl{compression}"

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        encode, column = self._json.encode, self._column
        try:
            lines = [f"{encode(plain_row(ok, column))}\n" for ok in outcomes]
        except ValueError:  # most likely for NaN
            lines = [f"{self._json.dump(plain_row(ok, column))}\n" for ok in outcomes]
        content = "".join(lines).encode()
        return self._packed(content) if content else content

    def encode_columns(self, pieces: Sequence[FinishedRows]) -> bytes | None:
        """The lines of one part, given in columns: the same; None without orjson.

        Raises:
            Exception: a row cannot be written.
        """
        if not has_columns():
            return None
        texts = [row_texts(self._json, piece, self._column) for piece in pieces if len(piece)]
        content = b"".join([lines_of_texts(one, b"\n") for one in texts])
        return self._packed(content) if content else content


JSONL = Format(
    name="jsonl",
    reader=JsonlFormat,
    recognized=recognized,
    writer=lambda layout, compression, _: JsonlWriter(layout.column, compression, layout.on_nan),
    check_column=check_text_column,
    compressible=True,
)
