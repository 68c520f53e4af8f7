"""Input files: what they are, a fingerprint of their content, and whether they change during a job."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from headrace.errors import ConfigError, JobError
from headrace.io.storage.locations import facts, is_remote, store, with_retries

BLOCK_BYTES = 256 * 1024
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
    encoding: str | None = field(default=None, compare=False)
    """The encoding of its text; None for UTF-8."""

    def open(self) -> BinaryIO:
        """Open for reading, seekable. Raises JobError: the file is missing or has changed."""
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
                "run again to continue, or start again with ``overwrite=True``"
            )

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
    """The current metadata of a file. Raises ConfigError: it is missing, unreadable, or not a regular file."""
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
            raise ConfigError(
                f"{path} is not a regular file, and a job that can go on reads its input twice: pipe it to `-i -`, "
                "which copies it first"
            )
        if not os.access(path, os.R_OK):
            raise ConfigError(f"cannot read input file {path}: Permission denied")
    except OSError as error:
        reason = error.strerror or ("not found" if isinstance(error, FileNotFoundError) else error)
        if not is_remote(path) and path.is_symlink():
            reason = f"{reason}: it is a link to {path.readlink()}"
        raise ConfigError(f"cannot read input file {path}: {reason}") from error
    return InputFile(path, found.st_size, f"{found.st_mtime_ns} {found.st_ino}")
