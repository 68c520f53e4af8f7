"""Parts of an output: files that say in their names which positions of the input they hold.

`part-<start>-<end><suffix>` holds what became of all positions start..end-1: the finished rows in input order, and the
failed ones in its twin `part-<start>-<end>.errors.jsonl`. The rename of the part is the one commit point. The twin is
durable before it; a twin without its part means nothing and is overwritten.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

_NAME = re.compile(r"part-(\d{12,})-(\d{12,})(\..+)")
_ERRORS = ".errors.jsonl"
_TEMPORARY = ".tmp"


class Interval(NamedTuple):
    """Positions start..end-1."""

    start: int
    end: int


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name complete and durable, or not at all; it replaces what is there.

    Raises:
        OSError: the folder cannot be written, or is full; nothing is left behind.
    """
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PartFolder:
    """The committed parts of one output format in a folder. One process at a time may write to it."""

    def __init__(self, path: Path, suffix: str) -> None:
        self.path = path
        self._suffix = suffix

    def committed(self) -> list[Interval]:
        """The intervals of all committed parts, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(Interval(int(m[1]), int(m[2])) for m in matches if m and m[3] == self._suffix)

    def commit(self, interval: Interval, rows: bytes, failures: bytes) -> None:
        """Make a part durable, all or nothing.

        Raises:
            OSError: the folder cannot be written, or is full; the part is not committed.
        """
        if failures:
            with atomic_file(self.errors_path(interval)) as file:
                file.write(failures)
        else:
            # What an earlier try left, when other records of the same interval had failed.
            self.errors_path(interval).unlink(missing_ok=True)
        with atomic_file(self.part_path(interval)) as file:
            file.write(rows)

    def part_path(self, interval: Interval) -> Path:
        """Where the finished rows of an interval are."""
        return self.path / f"part-{interval.start:012d}-{interval.end:012d}{self._suffix}"

    def errors_path(self, interval: Interval) -> Path:
        """Where the failed records of an interval are, if any failed."""
        return self.path / f"part-{interval.start:012d}-{interval.end:012d}{_ERRORS}"

    def merge_errors(self, target: Path) -> None:
        """All dead letters so far as one file in input order; no file where there are none."""
        twins = self._twins(self.committed())
        if not twins:
            target.unlink(missing_ok=True)
            return
        with atomic_file(target) as out:
            for twin in twins:
                with twin.open("rb") as file:
                    shutil.copyfileobj(file, out, 1024 * 1024)

    def count_errors(self) -> int:
        """Dead letters of all committed parts."""
        count = 0
        for twin in self._twins(self.committed()):
            with twin.open("rb") as file:
                count += sum(block.count(b"\n") for block in iter(lambda: file.read(1024 * 1024), b""))
        return count

    def _twins(self, intervals: Sequence[Interval]) -> list[Path]:
        return [twin for interval in intervals if (twin := self.errors_path(interval)).exists()]

    def clear(self) -> None:
        """Remove all parts, twins and what a killed process left half written."""
        for path in list(self.path.iterdir()):
            if _NAME.fullmatch(path.name.removesuffix(_TEMPORARY)):
                path.unlink(missing_ok=True)
        sync_folder(self.path)
