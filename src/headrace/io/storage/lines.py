"""Text files as lines, in bounded memory, and lines as JSON objects."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.io.base import Chunk
from headrace.io.storage import compression
from headrace.io.storage.files import CHUNK_ROWS, InputFile, share, todo
from headrace.records import Failed, Record

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is a failed record: it is most likely a file without newlines, and memory stays bounded."""
RAW_KEPT_BYTES = 4096
_WRITTEN_BLOCK = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_decode = json.JSONDecoder().decode


def line_blocks(file: InputFile) -> Iterator[tuple[list[bytes], int]]:
    """Complete lines without their newline, with the number of the file's bytes they stand for.

    Of a line longer than 64 MiB the rest is dropped: whoever parses it sees its length.
    """
    tail = b""
    held: list[bytes] = []  # the blocks of a long line, joined once, at its end
    held_bytes = pending = 0
    first = True
    for block, size in file.blocks():
        pending += size
        if first and block:
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
        # What is behind the last newline counts with the line it begins, as far as that can be told.
        behind = min(len(tail), pending)
        yield lines, pending - behind
        pending = behind
    last = b"".join(held)
    if pending or last:
        yield [last] if last else [], pending


def interleaved(
    base: Iterator[bytes], more: Iterator[bytes], turns: Iterable[tuple[int, int]]
) -> Iterator[Iterator[bytes]]:
    """Lines of two files in turns, then the rest of the first; a negative number drops lines of the second."""
    for of_base, of_more in turns:
        yield itertools.islice(base, of_base)
        if of_more < 0:
            collections.deque(itertools.islice(more, -of_more), maxlen=0)
        else:
            yield itertools.islice(more, of_more)
    yield base


def lines_of(paths: Sequence[Path]) -> Iterator[bytes]:
    """The lines of files written here, each with its newline, however long; decompressed by the files' names."""
    for path in paths:
        with path.open("rb") as file:
            blocks = ((block, len(block)) for block in iter(lambda: file.read(_WRITTEN_BLOCK), b""))
            suffix = path.suffix
            plain = compression.decompressed(suffix, blocks, str(path)) if suffix in compression.SUFFIXES else blocks
            held: list[bytes] = []
            for block, _ in plain:
                *whole, rest = block.split(b"\n")
                for line in whole:
                    yield b"".join((*held, line, b"\n"))
                    held.clear()
                held.append(rest)


def full_lines(lines: list[bytes]) -> list[bytes]:
    """Without the blank ones."""
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
    record: Callable[[int, dict[str, Any]], Record | Failed],
) -> Generator[Chunk, None, int]:
    """The objects of a file that are to do: at most 512 rows a chunk, out of one block of 256 KiB (or one longer line).

    A line that is no object is a `Failed` at its position, with its first 4,096 bytes as data.

    Args:
        base: the position of the first line that is not blank; their number is returned.
        record: makes a record of a position and its object, or says what is wrong with that.
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
                outcome = record(position, row)
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
