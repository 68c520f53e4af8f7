"""JSON Lines: one JSON object per line, in and out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ConfigError, JobError
from headrace.io.base import Chunk
from headrace.records import Failed, Ok, Record

BLOCK_BYTES = 256 * 1024
CHUNK_ROWS = 512
MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is a failed record: it is most likely a file without newlines, and memory stays bounded."""
_WHOLE_DIGEST_BYTES = 64 * 1024 * 1024
_SAMPLES = 64
_BOM = b"\xef\xbb\xbf"
RAW_KEPT_BYTES = 4096
_decode = json.JSONDecoder().decode


class JsonlSource:
    """The lines of a file. A blank line is no record and takes no position.

    A line that is not UTF-8, not JSON or not a JSON object is a `Failed` at its position, with the raw line (its first
    4,096 bytes, undecodable bytes replaced) as data. The file is read up to the size it had at construction.

    Raises:
        ConfigError: the file is missing or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot read input file {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path} is not a regular file: a job that can be resumed reads its input twice")
        self._size = facts.st_size
        self.total_bytes: int | None = facts.st_size
        self.total_records: int | None = None

    def describe(self) -> Mapping[str, Any]:
        """Size and a digest: of the whole content up to 64 MiB, beyond that of 64 samples spread evenly over it."""
        digest = hashlib.blake2b(digest_size=16)
        with self._path.open("rb") as file:
            if self._size <= _WHOLE_DIGEST_BYTES:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
            else:
                for sample in range(_SAMPLES):
                    file.seek((self._size - BLOCK_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(BLOCK_BYTES))
        return {"format": "jsonl", "bytes": self._size, "blake2b": digest.hexdigest()}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """At most 512 rows each, out of one block of 256 KiB (or one longer line)."""
        base = 0
        for lines, size in self._line_blocks():
            rows = len(lines)
            for start in range(0, rows, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, rows)
                share = size * stop // rows - size * start // rows
                yield _parse(lines, base, _todo(base + start, base + stop, next_todo), share)
            if not rows:
                yield Chunk((), (), size)
            base += rows

    def _line_blocks(self) -> Iterator[tuple[list[bytes], int]]:
        """Complete non-blank lines, with the number of input bytes they and the blank ones stand for."""
        left, tail = self._size, b""
        with self._path.open("rb") as file:
            while left:
                block = file.read(min(BLOCK_BYTES, left))
                if not block:
                    raise JobError(f"{self._path} became {left} bytes shorter while it was read; begin anew with it")
                left -= len(block)
                size = len(tail) + len(block)
                if size == self._size - left:
                    block = block.removeprefix(_BOM)
                if len(tail) > MAX_LINE_BYTES:  # drop the rest of a line that is refused anyway
                    block = block[newline:] if (newline := block.find(b"\n")) >= 0 else b""
                lines = (tail + block).split(b"\n")
                tail = lines.pop() if left else b""
                yield [line for line in lines if line and not line.isspace()], size - len(tail)


def _todo(start: int, stop: int, next_todo: Callable[[int], int]) -> list[int]:
    """The positions in start..stop-1 that are still to do."""
    positions: list[int] = []
    position = next_todo(start)
    while position < stop:
        positions.append(position)
        position = next_todo(position + 1)
    return positions


def _parse(lines: Sequence[bytes], base: int, positions: Sequence[int], size: int) -> Chunk:
    """Records and failures of the given positions; `lines[0]` is the line of position `base`."""
    records: list[Record] = []
    failures: list[Failed] = []
    for position in positions:
        line = lines[position - base]
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
            data = _decode(line.decode())
            if type(data) is not dict:
                raise TypeError(f"the line is a JSON {type(data).__name__}, not an object")
        except (ValueError, TypeError, RecursionError) as error:
            raw = line[:RAW_KEPT_BYTES].decode(errors="replace")
            failures.append(Failed(Record(position, position, raw), type(error).__name__, str(error)))
        else:
            records.append(Record(position, position, data))
    return Chunk(records, failures, size)


class JsonlWriter:
    """One object per line: the record's id, and its output in `column`; numpy arrays become lists."""

    suffix = ".jsonl"

    def __init__(self, column: str) -> None:
        self._column = column
        self._dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The lines of one part.

        Raises:
            TypeError: an output that is neither JSON nor an array.
        """
        dump, column = self._dump, self._column
        return "".join([f"{dump({'id': ok.record.id, column: ok.output})}\n" for ok in outcomes]).encode()

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """The parts one behind the other."""
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, target, 1024 * 1024)


def encode_failures(failures: Sequence[Failed]) -> bytes:
    """Dead letters, one line each: position, id, reason, message, attempts and the record as it was read."""
    rows = (
        {
            "position": failed.record.position,
            "id": failed.record.id,
            "reason": failed.reason,
            "message": failed.message,
            "attempts": failed.attempts,
            "record": failed.record.data,
        }
        for failed in failures
    )
    # ASCII, so that a lone surrogate, which JSON can spell and UTF-8 cannot, does not fail the failure's own report.
    return "".join([json.dumps(row, default=_plain) + "\n" for row in rows]).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an output of type {type(value).__name__} cannot be written as JSON")
