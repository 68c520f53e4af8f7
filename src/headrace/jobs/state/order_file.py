"""The file of a window's positions, in the order of work."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

from headrace.io.storage.atomic import atomic_file

ORDER = "order"
"""The file of a window's positions."""
_MAGIC = b"headrace order 1\n"
_CHECK_BYTES = 8
_READ_POSITIONS = 1024


def write_order(path: Path, positions: array[int]) -> None:
    """Write positions durably, with a checksum."""
    content = positions.tobytes()
    with atomic_file(path) as file:
        file.write(_MAGIC + _checksum(content) + content)


def iter_order(path: Path) -> Iterator[int]:
    """The positions in a file of `write_order`, a few in memory at a time, without a look at the checksum."""
    place, size = len(_MAGIC) + _CHECK_BYTES, 8 * _READ_POSITIONS
    while True:
        with path.open("rb") as file:  # closed meanwhile: there may be many
            file.seek(place)
            block = file.read(size)
        if not block:
            return
        place += len(block)
        positions = array("Q")
        positions.frombytes(block)
        yield from positions


def read_order(path: Path) -> array[int]:
    """The positions in a file of `write_order`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or from another version.
    """
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError("it is damaged, or another version of Headrace has written it")
    start = len(_MAGIC) + _CHECK_BYTES
    body = content[start:]
    if _checksum(body) != content[len(_MAGIC) : start]:
        raise ValueError("its content has changed: another checksum")
    positions = array("Q")
    positions.frombytes(body)
    return positions


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()
