"""CSV and TSV output: a header line, then one row per record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from headrace.columns import FinishedRows, Outputs
from headrace.errors import ConfigError, JobError
from headrace.io.formats.cells import is_arrow
from headrace.io.formats.json_texts import JsonTexts, column_texts, has_columns, lines_of_texts, row_columns
from headrace.io.formats.strict_json import OnNan, StrictJson, json_default
from headrace.io.formats.values import rows_of_array
from headrace.io.formats.writer import LineWriter, plain_row
from headrace.io.storage.lines import lines_of
from headrace.records import Ok

_NUMBERS = frozenset((int, float, bool, type(None)))
DELIMITERS = {"csv": ",", "tsv": "\t"}


class CsvWriter(LineWriter):
    """The columns `id`, those kept, and `column`.

    Numbers and booleans are as in JSON; vectors, lists and dicts are JSON in one cell. A null is an empty cell, and an
    empty text a quoted one. Each part begins with the header line.

    Args:
        column: the name of the output.
        compression: a suffix, ".gz" or ".zst": each part is one compressed stream.
        on_nan: what NaN and infinities become.

    Raises:
        ConfigError: the name of a column is no text.
    """

    def __init__(
        self,
        column: str,
        keep: Sequence[str],
        format: str = "csv",  # noqa: A002 - the flag's own word
        compression: str = "",
        on_nan: OnNan = "null",
    ) -> None:
        super().__init__(StrictJson(json_default, on_nan), compression)
        self._names = tuple(dict.fromkeys(("id", *keep, column)))
        self._delimiter = DELIMITERS[format]
        self._quoted = frozenset('"\r\n' + self._delimiter)
        self.suffix = f".{format}{compression}"
        try:
            self._header = self._line(self._names)
        except UnicodeEncodeError as error:
            raise ConfigError(f"cannot write a column named {error.object[error.start]!r}: {error.reason}") from error

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        return self._packed(b"".join([self._header, *map(self._row, outcomes)]))

    def encode_columns(self, pieces: Sequence[FinishedRows]) -> bytes | None:
        """The header line and the rows of one part, given in columns: the same; None without orjson.

        Raises:
            Exception: a row cannot be written.
        """
        if not has_columns():
            return None
        rows = [self._rows_of_columns(piece) for piece in pieces if len(piece)]
        return self._packed(b"".join([self._header, *rows]))

    def _rows_of_columns(self, piece: FinishedRows) -> memoryview:
        columns = row_columns(piece, self._names[-1])
        nothing = JsonTexts(b"", [b""] * len(piece), b"")
        texts = [self._cells(*columns[name]) if name in columns else nothing for name in self._names]
        between = self._delimiter.encode()
        first, *others = texts
        return lines_of_texts([first, *(one._replace(before=between + one.before) for one in others)], b"\n")

    def _cells(self, values: Outputs, as_plain: Callable[[object], object]) -> JsonTexts:
        array = rows_of_array(values)
        if array is not None and array.ndim == 2:
            (vectors,) = column_texts(self._json, array, as_plain)
            quote = b'"' if self._delimiter == "," and array.shape[1] > 1 else b""
            return JsonTexts(quote + vectors.before, vectors.rows, vectors.after + quote)
        objects = list(values) if array is None else array.tolist()
        if _NUMBERS.issuperset(map(type, objects)):
            (numbers,) = column_texts(self._json, objects, as_plain)
            rows = numbers.rows.to_pylist() if is_arrow(numbers.rows) else numbers.rows
            return numbers._replace(rows=[b"" if row == b"null" else row for row in rows])
        return JsonTexts(b"", [self._cell(as_plain(value)).encode() for value in objects], b"")

    def _row(self, ok: Ok) -> bytes:
        row = plain_row(ok, self._names[-1])
        return self._line(row.get(name) for name in self._names)

    def _line(self, values: Iterable[object]) -> bytes:
        return (self._delimiter.join(map(self._cell, values)) + "\n").encode()

    def _cell(self, value: object) -> str:
        text = self._json.text(value)
        if text is None:
            return ""
        if not text or text[0] == " " or text[-1] == " " or not self._quoted.isdisjoint(text):
            return '"' + text.replace('"', '""') + '"'
        return text

    def merge(self, parts: Iterable[Path], target: BinaryIO) -> None:
        parts = list(parts)
        self._write(itertools.chain([self._header_of(parts)], self._rows(parts)), target)

    def _header_of(self, parts: Sequence[Path]) -> bytes:
        """The header line of the parts. Raises JobError: they have different columns."""
        headers = {next(_whole_rows(lines_of(part)), self._header): part for part in parts}
        if len(headers) > 1:
            first, second = list(headers.values())[:2]
            raise JobError(
                f"{first.name} and {second.name} have different columns, which one file cannot hold: start again with "
                "``overwrite=True``"
            )
        return next(iter(headers), self._header)

    def _rows_of(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        return itertools.islice(_whole_rows(lines), 1, None)


def _whole_rows(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The rows of some lines: a row does not end while a quote is open."""
    held: list[bytes] = []
    quotes = 0
    for line in lines:
        held.append(line)
        quotes += line.count(b'"')
        if quotes % 2 == 0:
            yield held[0] if len(held) == 1 else b"".join(held)
            held, quotes = [], 0
