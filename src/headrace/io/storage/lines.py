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


def lines_of(path: Path, *, closed: bool = False) -> Iterator[bytes]:
    """The lines of one of Headrace's own files with newlines, of any length; decompressed by suffix.

    Args:
        closed: the file is open only while a small block of it is read.
    """
    suffix = path.suffix
    blocks = ((block, len(block)) for block in (_closed_blocks(path) if closed else _open_blocks(path)))
    plain = compression.decompress_blocks(suffix, blocks, str(path)) if suffix in compression.SUFFIXES else blocks
    held: list[bytes] = []
    for block, _ in plain:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join((*held, line, b"\n"))
            held.clear()
        held.append(rest)


def _open_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_WRITTEN_BLOCK):
            yield block


def _closed_blocks(path: Path) -> Iterator[bytes]:
    place, block = 0, b" "
    while block:
        with path.open("rb") as file:
            file.seek(place)
            block = file.read(_CLOSED_BLOCK)
        place += len(block)
        yield block


def rearranged(runs: Sequence[Iterator[bytes]], takes: Iterable[Take]) -> Iterator[bytes]:
    """Rows of several runs as new texts: see `PartWriter.rearrange`."""
    for counts, orders in takes:
        rows = [row for run, count in zip(runs, counts, strict=True) for row in itertools.islice(run, count)]
        for order in orders:
            yield b"".join([rows[number] for number in order])
