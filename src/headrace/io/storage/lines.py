"""The lines of Headrace's own files, in order, in turns or in another order."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.io.base import Take
from headrace.io.storage import compression

T = TypeVar("T")

_WRITTEN_BLOCK = 1024 * 1024
_CLOSED_BLOCK = 32 * 1024
"""Bytes in memory of each of the files whose lines are rearranged: there may be hundreds."""


def interleaved(
    base: Callable[[int], Iterable[T]], more: Callable[[int], Iterable[T]], turns: Iterable[tuple[int, int]]
) -> Iterator[T]:
    """Rows of two files by turns, then the rest of the first: see `PartWriter.interleave`.

    Args:
        base: takes the next rows of the first file.
        more: takes the next rows of the second file.
        turns: the numbers of rows.
    """
    for of_base, of_more in turns:
        yield from base(of_base)
        rows = more(abs(of_more))
        if of_more < 0:
            collections.deque(rows, maxlen=0)
        else:
            yield from rows
    yield from base(sys.maxsize)


def taker(rows: Iterator[T]) -> Callable[[int], Iterable[T]]:
    return lambda count: itertools.islice(rows, count)


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
