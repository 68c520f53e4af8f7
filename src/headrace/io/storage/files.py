"""Input files: content fingerprints, detection of changes during a job, and many files as one source."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from headrace.errors import ConfigError, JobError
from headrace.io.base import Chunk
from headrace.io.storage import compression
from headrace.io.storage.locations import facts, is_remote, store, with_retries
from headrace.records import LeftOut

BLOCK_BYTES = 256 * 1024
CHUNK_ROWS = 512
CHUNK_BYTES = 4 * 1024 * 1024
"""Maximum size of a chunk's rows, in bytes."""
WHOLE_DIGEST_BYTES = 64 * 1024 * 1024
"""Inputs up to this size are digested completely, larger ones by samples."""
_SAMPLES = 64
_FILES_NAMED = 50
"""Up to this many files are listed in the fingerprint, so that a resume can name the file that changed."""
_COUNTED_FILES = 16
"""Up to this many files are counted from their footers before the job starts."""
_CHECK_EVERY_BLOCKS = 256
_REMOTE_BLOCK_BYTES = 8 * 1024 * 1024
_STAMPS = ("ETag", "etag", "generation", "blob_id", "oid", "mtime", "LastModified", "last_modified")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was when the job first read its metadata."""

    path: Path
    """A path, or a remote location with a path's methods."""
    size: int | None
    """In bytes; None if a web server does not report it."""
    stamp: str
    """Differs after any change: modification time and inode, or the store's content tag."""

    def open(self) -> BinaryIO:
        """Open for reading, seekable.

        Raises:
            JobError: the file is missing or has changed.
        """
        self.check()
        if not is_remote(self.path):
            return self.path.open("rb")
        fs, address = store(self.path)
        raw = fs.open(address, "rb", block_size=_REMOTE_BLOCK_BYTES, cache_type="readahead")
        # A failed read does not move the position, so it can be retried.
        if (cache := getattr(raw, "cache", None)) is not None and cache.fetcher is not None:
            cache.fetcher = with_retries(cache.fetcher)
        return cast("BinaryIO", raw)

    def check(self) -> None:
        """Check that the file has not changed since the job started.

        Raises:
            JobError: it has changed or is missing; the message names it.
        """
        try:
            now = look_at(self.path)
        except ConfigError as error:
            raise JobError(f"{error}; it was there when the job started; finished records are kept") from error
        if now != self:
            change = f"{self.size} bytes then, {now.size} now" if now.size != self.size else "another time or tag"
            raise JobError(
                f"{self.path} changed while it was read ({change}); finished records are kept; restore the file and "
                "run again to continue, or start again with --overwrite"
            )

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Blocks of content, decompressed by suffix (.gz, .zst), each with its number of file bytes.

        Raises:
            JobError: it changed, is damaged or truncated.
        """
        blocks = self._raw_blocks()
        suffix = self.path.suffix.lower().replace(".tgz", ".gz")
        return (
            compression.decompress_blocks(suffix, blocks, str(self.path)) if suffix in compression.SUFFIXES else blocks
        )

    def _raw_blocks(self) -> Iterator[tuple[bytes, int]]:
        left = self.size
        with self.open() as file:
            number = 0
            while left is None or left > 0:
                block = file.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))
                if not block:
                    if left is None:
                        break
                    raise JobError(
                        f"{self.path} became {left} bytes shorter while it was read; start again with --overwrite"
                    )
                left = None if left is None else left - len(block)
                number += 1
                if not left or number % _CHECK_EVERY_BLOCKS == 0:
                    self.check()  # before the rows are processed, so that a change wastes little work
                yield block, len(block)

    def describe(self, samples: int | None) -> dict[str, object]:
        """Size and digest of the content, complete or by samples; for a store, its content tag."""
        if is_remote(self.path) and self.stamp:
            return {"bytes": self.size, "tag": self.stamp}
        digest = hashlib.blake2b(digest_size=16)
        with self.open() as file:
            if samples is None or self.size is None or self.size <= samples * BLOCK_BYTES:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
            else:
                for sample in range(samples):
                    file.seek((self.size - BLOCK_BYTES) * sample // max(1, samples - 1))
                    digest.update(file.read(BLOCK_BYTES))
        return {"bytes": self.size, "blake2b": digest.hexdigest()}


def look_at(path: Path) -> InputFile:
    """The current metadata of a file.

    Raises:
        ConfigError: it is missing, unreadable, or not a regular file.
    """
    try:
        if is_remote(path):
            info = facts(path)
            if info["type"] != "file":
                raise ConfigError(f"cannot read input file {path}: it is a {info['type']}")
            stamp = next((f"{key} {info[key]}" for key in _STAMPS if info.get(key)), "")
            return InputFile(path, info.get("size"), stamp)
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"cannot read input file {path}: Is a directory")
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a regular file: a job that can be resumed reads its input twice")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"cannot read input file {path}: Permission denied")
    except OSError as error:
        reason = error.strerror or ("not found" if isinstance(error, FileNotFoundError) else error)
        if not is_remote(path) and path.is_symlink():
            reason = f"{reason}: it is a link to {path.readlink()}"
        raise ConfigError(f"cannot read input file {path}: {reason}") from error
    return InputFile(path, found.st_size, f"{found.st_mtime_ns} {found.st_ino}")


class FileFormat(Protocol):
    """Reads the rows of one file."""

    name: str

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Yield the file's rows that are not done; its first row has position `base`. Returns its row count.

        See `headrace.io.base.Source.chunks`. Checks that the file is unchanged when it is opened, and before each run
        of rows is processed.

        Raises:
            JobError: the rest of the file cannot be read.
        """
        ...

    def count(self, file: InputFile) -> int | None:
        """The number of rows, if known without reading the file.

        Raises:
            ConfigError: the file is damaged.
        """
        ...


class FileSource:
    """Concatenates files; positions continue from each to the next.

    Args:
        files: each with its format, in the order of their names.
        root: names in the fingerprint are relative to it.
        left_out: other names that are not read.
    """

    def __init__(
        self,
        files: Sequence[tuple[InputFile, FileFormat]],
        root: Path | None = None,
        left_out: Sequence[LeftOut] = (),
    ) -> None:
        self._files = files
        self._root = root
        self.left_out = left_out
        self.formats: Sequence[FileFormat] = [form for _, form in files]
        sizes = [file.size for file, _ in files]
        self.total_bytes: int | None = None if None in sizes else sum(size or 0 for size in sizes)
        counts = [form.count(file) for file, form in files] if len(files) <= _COUNTED_FILES else [None]
        self.total_records: int | None = None if None in counts else sum(count or 0 for count in counts)

    def describe(self) -> Mapping[str, object]:
        """Size and digest of the content: whole up to 64 MiB in all, beyond that 64 samples spread over the files.

        With at most 50 files each has its own entry, so that a resume names the one that differs.
        """
        whole = self.total_bytes is not None and self.total_bytes <= WHOLE_DIGEST_BYTES
        samples = None if whole else max(1, _SAMPLES // len(self._files))
        if self._root is None:
            [(file, form)] = self._files
            return {"format": form.name, **file.describe(samples)}
        entries = {
            file.path.relative_to(self._root).as_posix(): {"format": form.name, **file.describe(samples)}
            for file, form in self._files
        }
        if len(entries) <= _FILES_NAMED:
            return {"files": entries}
        digest = hashlib.blake2b(repr(sorted(entries.items())).encode(), digest_size=16)
        return {"files": len(entries), "bytes": self.total_bytes, "blake2b": digest.hexdigest()}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The rows of all files that are not done."""
        base = 0
        for file, form in self._files:
            base += yield from form.read(file, base, next_todo)


def todo(start: int, stop: int, next_todo: Callable[[int], int]) -> list[int]:
    """The positions in start..stop-1 that are not done."""
    positions: list[int] = []
    position = next_todo(start)
    while position < stop:
        positions.append(position)
        position = next_todo(position + 1)
    return positions


def share(size: int, start: int, stop: int, rows: int) -> int:
    """The share of `size` bytes for rows start..stop-1 of `rows`; all shares add up to `size`."""
    return size * stop // rows - size * start // rows if rows else size
