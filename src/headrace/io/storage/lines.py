"""Reads text files as lines and JSON objects, in bounded memory."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.io.base import Chunk, Take
from headrace.io.storage import compression
from headrace.io.storage.files import CHUNK_ROWS, InputFile, share, todo
from headrace.records import Failed, Record

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longer lines fail: the file probably has no newlines, and memory must stay bounded."""
RAW_KEPT_BYTES = 4096
_WRITTEN_BLOCK = 1024 * 1024
_CLOSED_BLOCK = 32 * 1024
"""Bytes in memory of each of the files whose lines are rearranged: there may be hundreds."""
_BOM = b"\xef\xbb\xbf"
_BINARY = {
    b"PAR1\x15": "a Parquet file",
    b"ARROW1\0\0": "an Arrow file",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "Zstandard data",
    b"\xfd7zXZ\0": "xz data",
    b"PK\x03\x04": "a zip archive or spreadsheet",
    b"SQLite format 3\0": "a SQLite database",
} | {b"BZh%d1AY&SY" % level: "bzip2 data" for level in range(1, 10)}
"""The first bytes of formats that users mistake for text, by name or with a wrong input format."""
_WAYS_OUT = {
    "a Parquet file": "name it .parquet, or take --input-format parquet",
    "an Arrow file": "name it .arrow, or take --input-format arrow",
    "gzip data": "add .gz to its name",
    "Zstandard data": "add .zst to its name",
    "a SQLite database": "name it sqlite:///FILE, with --sql",
}
_decode = json.JSONDecoder().decode


def line_blocks(file: InputFile) -> Iterator[tuple[list[bytes], int]]:
    """Lists of complete lines without newlines, each with its number of file bytes.

    The rest of a line longer than 64 MiB is dropped; the parser refuses it by its length.

    Raises:
        ConfigError: the file is of a binary format.
    """
    tail = b""
    held: list[bytes] = []  # the blocks of a long line, joined once, at its end
    held_bytes = pending = 0
    first = True
    for block, size in file.blocks():
        pending += size
        if first and block:
            _check_is_text(block, file)
            block, first = block.removeprefix(_BOM), False
        newline = block.find(b"\n")
        if newline < 0:
            if held_bytes <= MAX_LINE_BYTES:
                held.append(block)
                held_bytes += len(block)
            continue
        if held_bytes > MAX_LINE_BYTES:
            block = block[newline:]
        lines = b"".join([*held, block]).split(b"\n")
        tail = lines.pop()
        held, held_bytes = [tail], len(tail)
        # Bytes after the last newline count with the next line, as far as known.
        behind = min(len(tail), pending)
        yield lines, pending - behind
        pending = behind
    last = b"".join(held)
    if pending or last:
        yield [last] if last else [], pending


def _check_is_text(start: bytes, file: InputFile) -> None:
    found = next((known for magic, known in _BINARY.items() if start.startswith(magic)), None)
    if found is not None:
        raise ConfigError(f"{file.path} is {found}, not text; {_WAYS_OUT.get(found, 'decompress or convert it first')}")


def interleaved(
    base: Iterator[bytes], more: Iterator[bytes], turns: Iterable[tuple[int, int]]
) -> Iterator[Iterator[bytes]]:
    """Alternate lines of two files, then the rest of the first; a negative number drops lines of the second."""
    for of_base, of_more in turns:
        yield itertools.islice(base, of_base)
        if of_more < 0:
            collections.deque(itertools.islice(more, -of_more), maxlen=0)
        else:
            yield itertools.islice(more, of_more)
    yield base


def lines_of(paths: Sequence[Path]) -> Iterator[bytes]:
    """The lines of Headrace's own files with newlines, of any length; decompressed by suffix."""
    for path in paths:
        with path.open("rb") as file:
            yield from _split(path, ((block, len(block)) for block in iter(lambda: file.read(_WRITTEN_BLOCK), b"")))


def _split(path: Path, blocks: Iterator[tuple[bytes, int]]) -> Iterator[bytes]:
    """The lines of a file that is read in these blocks."""
    suffix = path.suffix
    plain = compression.decompress_blocks(suffix, blocks, str(path)) if suffix in compression.SUFFIXES else blocks
    held: list[bytes] = []
    for block, _ in plain:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join((*held, line, b"\n"))
            held.clear()
        held.append(rest)


def rearranged(
    runs: Sequence[Sequence[Path]],
    takes: Iterable[Take],
    rows_of: Callable[[Sequence[Path]], Iterable[bytes]] | None = None,
) -> Iterator[bytes]:
    """Lines, or other rows, of several runs of files as new texts: see `PartWriter.rearrange`."""

    def rows(path: Path) -> Iterable[bytes]:  # closes the file: there may be more runs than a process may open files
        return _split(path, _closed_blocks(path)) if rows_of is None else list(rows_of([path]))

    readers = [itertools.chain.from_iterable(map(rows, paths)) for paths in runs]
    for counts, orders in takes:
        lines = [line for run, count in zip(readers, counts, strict=True) for line in itertools.islice(run, count)]
        for order in orders:
            yield b"".join([lines[number] for number in order])


def _closed_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """A file in small blocks. It is open only while one is read."""
    place = 0
    while True:
        with path.open("rb") as file:
            file.seek(place)
            block = file.read(_CLOSED_BLOCK)
        if not block:
            return
        place += len(block)
        yield block, len(block)


def full_lines(lines: list[bytes]) -> list[bytes]:
    """The lines that are not blank."""
    return [line for line in lines if line and not line.isspace()]


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object on a line.

    Raises:
        ValueError, TypeError, RecursionError: it is longer than 64 MiB, not UTF-8, not JSON, or not an object.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    data = _decode(line.decode())
    if type(data) is not dict:
        raise TypeError(f"the line is a JSON {type(data).__name__}, not an object")
    return data


def object_chunks(
    file: InputFile,
    base: int,
    next_todo: Callable[[int], int],
    record: Callable[[int, dict[str, object]], Record | Failed] | None = None,
) -> Generator[Chunk, None, int]:
    """The objects of a file that are not done; at most 512 rows per chunk, from one 256 KiB block or longer line.

    A line that is not an object is a `Failed` at its position, with its first 4,096 bytes as data.

    Args:
        base: the position of the first non-blank line; the number of such lines is returned.
        record: makes a record from a position and an object, or a `Failed`; None to take the object as it is.
    """
    begin = base
    for block, size in line_blocks(file):
        lines = full_lines(block)
        rows = len(lines)
        for start in range(0, rows, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, rows)
            records: list[Record] = []
            failures: list[Failed] = []
            for position in todo(base + start, base + stop, next_todo):
                line = lines[position - base]
                try:
                    row = parse_object(line)
                except (ValueError, TypeError, RecursionError) as error:
                    failures.append(_failed_line(position, line, error))
                    continue
                outcome = Record(position, position, row) if record is None else record(position, row)
                if isinstance(outcome, Record):
                    records.append(outcome)
                else:
                    failures.append(outcome)
            yield Chunk(records, failures, share(size, start, stop, rows))
        if not rows:
            yield Chunk((), (), size)
        base += rows
    return base - begin


def _failed_line(position: int, line: bytes, error: Exception) -> Failed:
    raw = line[:RAW_KEPT_BYTES].decode(errors="replace")
    return Failed(Record(position, position, raw), type(error).__name__, str(error), code="invalid_json_line")
