"""The lines of Headrace's own files, in order or in turns."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from headrace.io.storage import compression

T = TypeVar("T")

_WRITTEN_BLOCK = 1024 * 1024
_CLOSED_BLOCK = 32 * 1024
"""Bytes in memory of each of the files whose lines are rearranged: there may be hundreds."""


def interleaved(
    base: Callable[[int], Iterable[T]], more: Callable[[int], Iterable[T]], turns: Iterable[tuple[int, int]]
) -> Iterator[T]:
    """Rows of two files, each of which gives its next rows, by turns: see `PartWriter.interleave`."""
    for of_base, of_more in turns:
        yield from base(of_base)
        rows = more(abs(of_more))
        if of_more < 0:
            collections.deque(rows, maxlen=0)
        else:
            yield from rows
    yield from base(sys.maxsize)


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
