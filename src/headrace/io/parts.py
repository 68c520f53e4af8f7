"""Parts of an output: files that say in their names which positions of the input they hold.

`part-<start>-<end><suffix>` holds what became of all positions start..end-1: the finished rows in input order, and the
failed ones in its twin `part-<start>-<end>.errors.jsonl`. The rename of the part is the one commit point, or in an
object store its one put. The twin is durable before it; a twin without its part means nothing and is overwritten.

What a process had sent to a store when it was killed may come late, when another has listed the parts and works on what
they left. Such a part holds positions of others: whoever comes next takes one of them away, and does what it held anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from headrace.io.locations import is_remote, store, with_retries

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

    What goes to an object store is collected in a temporary file first, and then put in one call.

    Raises:
        OSError: the folder cannot be written, or is full; nothing is left behind.
    """
    if is_remote(path):
        with tempfile.NamedTemporaryFile() as spool:
            yield cast("BinaryIO", spool)
            spool.flush()
            fs, address = store(path)
            with_retries(lambda: fs.put_file(spool.name, address))()
        return
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
    """Make renames and removals in a folder durable; a store's calls are when they return."""
    if is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PartFolder:
    """The committed parts of one output format in a folder. One process at a time may write to it.

    Args:
        path: of the folder.
        suffix: the end of the parts' names.
        twins: the folder of the twins, where it is another one.
        guard: called before each commit; raises where this process may no longer write.
    """

    def __init__(
        self, path: Path, suffix: str, twins: Path | None = None, guard: Callable[[], None] = lambda: None
    ) -> None:
        self.path = path
        self._guard = guard
        self._stale: set[str] | None = None
        self._known: set[str] = set()
        """In a store: what was there at the beginning, and what was committed since."""
        self._suffix = suffix
        self._twins_path = twins or path

    def committed(self) -> list[Interval]:
        """The intervals of all committed parts, ascending."""
        matches = (_NAME.fullmatch(name) for name in file_names(self.path))
        return sorted(Interval(int(m[1]), int(m[2])) for m in matches if m and m[3] == self._suffix)

    def take_over(self) -> list[Interval]:
        """The same at the beginning of a run, which from now on is the only one to commit.

        In a store, of two parts that hold the same position one is removed. A folder of this machine knows no such.
        """
        found = self.committed()
        if not is_remote(self.path):
            return found
        kept: list[Interval] = []
        for interval in found:
            if kept and interval.start < kept[-1].end:
                self._guard()
                remove(self.part_path(interval))
            else:
                kept.append(interval)
        self._known = {path.name for path in (*map(self.part_path, kept), *self.twins(kept))}
        return kept

    def close(self) -> list[Interval]:
        """The same at its end. In a store, what has come from others since `take_over` is removed."""
        if is_remote(self.path):
            for folder in {self.path, self._twins_path}:
                for name in set(file_names(folder)) - self._known:
                    if _NAME.fullmatch(name):
                        self._guard()
                        remove(folder / name)
        return self.committed()

    def commit(self, interval: Interval, rows: bytes, failures: bytes) -> None:
        """Make a part durable, all or nothing.

        Raises:
            OSError: the folder cannot be written, or is full; the part is not committed.
            JobError: another process has taken the output over.
        """
        self._guard()
        if failures:
            self._write(self.errors_path(interval), failures)
        else:
            self._remove_stale_twin(interval)
        self._write(self.part_path(interval), rows)

    def _write(self, path: Path, content: bytes) -> None:
        if is_remote(path):
            fs, address = store(path)
            with_retries(lambda: fs.pipe_file(address, content))()
            self._known.add(path.name)
        else:
            with atomic_file(path) as file:
                file.write(content)

    def _remove_stale_twin(self, interval: Interval) -> None:
        """What an earlier try left, when other records of the same interval had failed; listed once, at the first."""
        if self._stale is None:
            self._stale = {name for name in file_names(self._twins_path) if name.endswith(_ERRORS)}
        if (twin := self.errors_path(interval)).name in self._stale:
            remove(twin)

    def part_path(self, interval: Interval) -> Path:
        """Where the finished rows of an interval are."""
        return self.path / f"part-{interval.start:012d}-{interval.end:012d}{self._suffix}"

    def errors_path(self, interval: Interval) -> Path:
        """Where the failed records of an interval are, if any failed."""
        return self._twins_path / f"part-{interval.start:012d}-{interval.end:012d}{_ERRORS}"

    def merge_errors(self, target: Path, of: Sequence[Interval] | None = None) -> None:
        """All dead letters so far (or of some parts) as one file in input order; no file where there are none."""
        twins = self.twins(self.committed() if of is None else of)
        if not twins:
            target.unlink(missing_ok=True)
            return
        with atomic_file(target) as out:
            for twin in twins:
                with twin.open("rb") as file:
                    shutil.copyfileobj(file, out, 1024 * 1024)

    def count_errors(self, of: Sequence[Interval] | None = None) -> int:
        """Dead letters of all committed parts, or of some."""
        count = 0
        for twin in self.twins(self.committed() if of is None else of):
            with twin.open("rb") as file:
                count += sum(block.count(b"\n") for block in iter(lambda: file.read(1024 * 1024), b""))
        return count

    def twins(self, intervals: Sequence[Interval]) -> list[Path]:
        """The twins there are of these parts."""
        there = set(file_names(self._twins_path))
        return [twin for interval in intervals if (twin := self.errors_path(interval)).name in there]

    def clear(self) -> None:
        """Remove all parts, twins and what a killed process left half written."""
        for folder in {self.path, self._twins_path}:
            for name in file_names(folder):
                if _NAME.fullmatch(name.removesuffix(_TEMPORARY)):
                    remove(folder / name)
            sync_folder(folder)
        self._known.clear()


def file_names(folder: Path) -> list[str]:
    """What is in a folder; nothing if there is none."""
    try:
        if not is_remote(folder):
            return [path.name for path in folder.iterdir()]
        fs, address = store(folder)
        found = with_retries(lambda: fs.ls(address, detail=False, refresh=True))()
    except FileNotFoundError:
        return []
    return [name.rstrip("/").rpartition("/")[2] for name in found]


def move(source: Path, destination: Path) -> None:
    """Put a complete file in another's place; in a store a copy, then a removal, which may be repeated after a kill."""
    if not is_remote(source):
        source.replace(destination)
        sync_folder(destination.parent)
        return
    fs, address = store(source)
    with_retries(lambda: fs.cp_file(address, store(destination)[1]))()
    remove(source)


def remove_folder(folder: Path) -> None:
    """Remove a folder of files, if it is there."""
    for name in file_names(folder):
        remove(folder / name)
    if not is_remote(folder) and folder.exists():
        folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    if not is_remote(path):
        path.unlink(missing_ok=True)
        return
    fs, address = store(path)
    try:
        with_retries(lambda: fs.rm_file(address))()
    except FileNotFoundError:
        pass
