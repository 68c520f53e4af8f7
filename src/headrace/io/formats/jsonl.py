"""JSON Lines: one JSON object per line, in and out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import BinaryIO

from headrace.io.base import Chunk, Take
from headrace.io.formats.dead_letters import encode_failures
from headrace.io.formats.strict_json import OnNan, StrictJson
from headrace.io.storage.compression import compress
from headrace.io.storage.files import InputFile
from headrace.io.storage.lines import interleaved, lines_of, object_chunks, rearranged
from headrace.records import Failed, Ok

_WRITTEN_BYTES = 4 * 1024 * 1024


class JsonlFormat:
    """The lines of a file. Blank lines are skipped and take no position.

    A line that is not UTF-8, not JSON or not a JSON object is a `Failed` at its position, with the raw line (its first
    4,096 bytes, undecodable bytes replaced) as data.
    """

    name = "jsonl"

    def count(self, file: InputFile) -> int | None:  # noqa: ARG002 - required by the interface
        """Unknown without reading the whole file."""
        return None

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 rows per chunk, from one block of 256 KiB (or one longer line)."""
        return object_chunks(file, base, next_todo)


class JsonlWriter:
    """One object per line: the record's id, its kept columns, and its output in `column`.

    NumPy arrays become lists; dates and times become text.

    Args:
        column: the name of the output.
        compression: a suffix, ".gz" or ".zst": each part is one compressed stream, and so is their concatenation.
        on_nan: what NaN and infinities become.
    """

    def __init__(self, column: str, compression: str = "", on_nan: OnNan = "null") -> None:
        self._column = column
        self._compression = compression
        self.suffix = f".jsonl{compression}"
        self._json = StrictJson(plain, on_nan)

    @property
    def nulled(self) -> int:
        """Numbers written as null so far."""
        return self._json.nulled

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The lines of one part.

        Raises:
            Exception: a row cannot be written.
        """
        encode, row = self._json.encode, self._row
        try:
            lines = [f"{encode(row(ok))}\n" for ok in outcomes]
        except ValueError:  # most likely for NaN
            lines = [f"{self._json.dump(row(ok))}\n" for ok in outcomes]
        content = "".join(lines).encode()
        return compress(self._compression, content) if self._compression and content else content

    def _row(self, ok: Ok) -> dict[str, object]:
        kept: Mapping[str, object] = ok.record.data or {}
        return {"id": ok.record.id, **kept, self._column: ok.output}

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Dead letters are JSON lines for every format."""
        return encode_failures(failures)

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """Concatenate the parts; if compressed, each stays one stream."""
        empty = True
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, target, 1024 * 1024)
                empty = empty and not file.tell()
        if empty and self._compression:
            target.write(compress(self._compression, b""))

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """Alternate lines of both; if compressed, one stream per 4 MiB."""
        held: list[bytes] = []
        size = 0
        for lines in interleaved(lines_of([base]), lines_of(more), turns):
            for line in lines:
                held.append(line)
                size += len(line)
                if size >= _WRITTEN_BYTES:
                    self._write(held, target)
                    held, size = [], 0
        self._write(held, target)

    def rearrange(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[bytes]:
        """Lines in another order."""
        for content in rearranged(runs, takes):
            yield compress(self._compression, content) if self._compression and content else content

    def _write(self, lines: list[bytes], target: BinaryIO) -> None:
        content = b"".join(lines)
        target.write(compress(self._compression, content) if self._compression else content)


def plain(value: object) -> object:
    """A value that JSON takes, of one that it does not.

    Raises:
        TypeError: there is none.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"an output of type {type(value).__name__} cannot be written as JSON")
