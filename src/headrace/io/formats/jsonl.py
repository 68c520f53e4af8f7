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
from headrace.io.storage.rows import FileFormat, line_chunks, object_of
from headrace.records import Ok


class JsonlFormat(FileFormat):
    """The lines of a file. Blank lines are skipped and take no position.

    A line that is not UTF-8, not JSON or not a JSON object is a `Failed` at its position, with the raw line (its first
    4,096 bytes, undecodable bytes replaced) as data.
    """

    name = "jsonl"
    is_text = True

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        """The columns that are needed, to read the lines as tables of these."""

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 rows per chunk, from one block of 256 KiB (or one longer line); of a table 32,768, from 4 MiB."""
        if self._names:
            return JsonTables(self._names).chunks(file, base, next_todo)
        return line_chunks(file, base, next_todo, object_of)

    def in_columns(self, names: Sequence[str]) -> FileFormat:
        """The lines as tables; as they are if Arrow or NumPy is not installed, or no column is needed."""
        return JsonlFormat(names) if names and has_arrow() else self


class JsonlWriter(LineWriter):
    """One object per line: the record's id, its kept columns, and its output in `column`.

    NumPy arrays become lists; dates and times become text.

    Args:
        column: the name of the output.
        compression: a suffix, ".gz" or ".zst": each part is one compressed stream, and so is their concatenation.
        on_nan: what NaN and infinities become.
    """

    merges_early = True

    def __init__(self, column: str, compression: str = "", on_nan: OnNan = "null") -> None:
        super().__init__(StrictJson(json_default, on_nan), compression)
        self._column = column
        self.suffix = f".jsonl{compression}"

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        dump, column = self._json.dump, self._column
        content = "".join([f"{dump(plain_row(ok, column))}\n" for ok in outcomes]).encode()
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
