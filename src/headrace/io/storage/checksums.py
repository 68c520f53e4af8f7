"""Seals: a part's rows, bytes and digest, stored in the name of its dead-letter file.

`part-<start>-<end>.r<rows>-b<bytes>-e<bytes of the dead letters>-<digest>.errors` is written before its part, empty if
nothing failed. So a single listing describes every part, in a folder or an object store, and a kill leaves no part
without a seal. Parts of the first version have no seal, and `part-<start>-<end>.errors.jsonl` only if records failed.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

from headrace.errors import JobError
from headrace.io.storage.lines import lines_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    Digest: TypeAlias = hashlib.blake2b | hashlib._Hash

_NAME = re.compile(r"part-(\d{12,})-(\d{12,})\.r(\d+)-b(\d+)-e(\d+)-([0-9a-f]{16}|[0-9a-f]{24})\.errors")
_BLOCK_BYTES = 1024 * 1024
_DIGITS = 24
"""Hexadecimal digits of a digest. Those of earlier versions have 16, of BLAKE2b."""


class Interval(NamedTuple):
    """Positions start..end-1."""

    start: int
    end: int

    @property
    def stem(self) -> str:
        """The prefix of its file names."""
        return f"part-{self.start:012d}-{self.end:012d}"


@dataclass(frozen=True, slots=True)
class Seal:
    """The expected sizes and digest of a part and its dead letters."""

    interval: Interval
    rows: int
    size: int
    """The size of the part, in bytes."""
    error_size: int
    """The size of its dead letters, in bytes."""
    digest: str
    """The digest of the part and then of its dead letters, by `hex_of`."""

    @classmethod
    def parse(cls, name: str) -> Seal | None:
        """The seal in a file name, or None."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        start, end, rows, size, errors = map(int, match.groups()[:5])
        return cls(Interval(start, end), rows, size, errors, match[6])

    @property
    def name(self) -> str:
        """The name of the dead-letter file."""
        return f"{self.interval.stem}.r{self.rows}-b{self.size}-e{self.error_size}-{self.digest}.errors"

    @property
    def failed(self) -> int:
        """How many dead letters there are."""
        return self.interval.end - self.interval.start - self.rows


@dataclass(frozen=True, slots=True)
class Damage:
    """A part that differs from what was committed."""

    path: Path
    interval: Interval
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def listed(damaged: Sequence[Damage]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
    return f"{damaged[0]}{more}"


class DigestWriter(io.BufferedIOBase):
    """Writes to a file and computes the digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = new_digest()
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        self._file.write(data)
        self._digest.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size

    def tell(self) -> int:
        return self._bytes

    def digest(self, more: bytes = b"") -> str:
        """The digest of the bytes written so far, and of `more` after them."""
        digest = self._digest.copy()
        digest.update(more)
        return hex_of(digest)


def new_digest(like: str = "") -> Digest:
    """An empty digest of the kind used in seals, or of the kind of another."""
    return hashlib.blake2b(digest_size=8) if 0 < len(like) < _DIGITS else hashlib.sha256()


def hex_of(digest: Digest) -> str:
    """The digits of a digest: the first 12 bytes of SHA-256, for which most processors have instructions."""
    return digest.hexdigest()[:_DIGITS]


def digest_of(*paths: Path, like: str = "") -> str:
    """The digest of one or more concatenated files, of the kind of another digest if there is one."""
    digest = new_digest(like)
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return hex_of(digest)


def rows_in(path: Path) -> int | None:
    """The rows of a part in any format; None if it cannot be read."""
    try:
        if path.suffix != ".parquet":
            return sum(1 for _ in lines_of(path))
        from pyarrow.parquet import ParquetFile

        with path.open("rb") as stream, ParquetFile(stream) as file:
            return int(file.metadata.num_rows)
    except (JobError, ValueError, OSError):  # it is missing or damaged
        return None
