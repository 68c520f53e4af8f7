"""Retries the dead letters of a finished job; records that succeed move to their places in the output.

Its parts are in `retry/` within the working folder, and number the dead letters rather than the input. When each one
has an outcome, all files that change are written again in `retry-new/`. Then the job's state is updated, which is the
only commit point: after it, the new files are moved to their places, also by the next run if this one is killed.
"""

from __future__ import annotations

import errno
import io
import json
import shutil
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from headrace.errors import ConfigError, JobError
from headrace.io.base import PartWriter
from headrace.io.sinks.targets import Target
from headrace.io.storage.atomic import atomic_file, sync_folder, target_of
from headrace.io.storage.checksums import DigestWriter, Seal, digest_of, listed
from headrace.io.storage.locations import file_names, is_remote, remove, remove_folder, store, with_retries
from headrace.io.storage.parts import Interval, PartFolder
from headrace.jobs.state.inspection import NEW
from headrace.jobs.state.job_state import FinishedJob, Pass
from headrace.jobs.state.ledger import Ledger

_ERRORS = "errors.jsonl"
_TWINS = ".errors"
_BLOCK_BYTES = 1024 * 1024


class DeadLetters:
    """The dead letters of a finished job, by position."""

    def __init__(self, errors: Path, expected: int) -> None:
        """Read them. Raises ConfigError: they are not the ones that the job wrote."""
        found: list[tuple[int, int, int]] = []
        try:
            with errors.open("rb") as lines:
                for line in lines:
                    letter = json.loads(line)
                    found.append((letter["position"], letter["attempts"], hash(str(letter["id"]))))
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{errors} has changed since the job ended ({error}); restore it to retry") from error
        if len(found) != expected:
            raise ConfigError(
                f"{errors} has {len(found)} dead letters, but the job wrote {expected}; restore it to retry"
            )
        found.sort()
        self.positions = array("q", (position for position, _, _ in found))
        self.attempts = array("q", (attempts for _, attempts, _ in found))
        self._ids = array("q", (identity for _, _, identity in found))

    def __len__(self) -> int:
        return len(self.positions)

    def may_be(self, position: int, identity: object) -> bool:
        """Whether the record of this id is the one that failed there; a row without one has None, or its position."""
        known, without = self._ids[self.place(position)], (None, position)
        return known in map(hash, map(str, (identity, *without))) or identity in without

    def place(self, position: int) -> int:
        """The number of the first dead letter at or after `position`."""
        return bisect_left(self.positions, position)


class Retrying:
    """The files of a retry.

    Args:
        parts: the parts of the output, if it is a folder of them.
        guard: called before each commit.
    """

    def __init__(self, target: Target, parts: PartFolder, writer: PartWriter, guard: Callable[[], None]) -> None:
        self._folder = target.work / "retry"
        self._new = target.work / NEW
        self._target = None if target.is_folder else target.place
        self._output = parts
        self._errors = target.errors
        self._writer = writer
        self._parts = PartFolder(self._folder, writer.suffix, None, guard)

    def begin(self, finished: FinishedJob, commit: Callable[[FinishedJob], None]) -> Pass:
        """Start or continue a retry; `commit` is called when all new files are written.

        Raises:
            ConfigError: the dead letters are not the ones that the job wrote.
        """
        if not is_remote(self._folder):
            self._folder.mkdir(exist_ok=True)
        dead_letters = DeadLetters(self._errors, finished.failed)
        self._check_parts(dead_letters)
        intervals, damaged = self._parts.resume()
        ledger = Ledger(intervals)

        def next_todo(position: int) -> int:
            number = ledger.next_todo(dead_letters.place(position))
            return dead_letters.positions[number] if number < len(dead_letters) else sys.maxsize

        def finish() -> FinishedJob:
            ended = self._make_new(dead_letters, finished)
            commit(ended)
            return ended

        failed = self._parts.count_errors()
        return Pass(
            next_todo, self._parts, finish, ledger.done, failed, len(dead_letters), dead_letters.place, damaged,
            may_be=dead_letters.may_be,
        )  # fmt: skip

    def _check_parts(self, dead_letters: DeadLetters) -> None:
        """Check the parts of a folder: damaged ones must not be copied into new parts, which would pass for intact."""
        if self._target is not None:
            return
        touched = [
            part for part in self._output.committed() if dead_letters.place(part.start) < dead_letters.place(part.end)
        ]
        if damaged := self._output.check(touched, set(touched)):
            raise ConfigError(
                f"{listed(damaged)}: changed since it was committed; remove it, run the job again to "
                "compute it again, then retry"
            )

    def swap(self) -> None:
        """Move the new files to their places and remove the other files of the retry. May be repeated.

        The twin of a part is moved first, and its old twin is removed last, so that a part always has a twin that fits.
        """
        names = file_names(self._new)
        for name in sorted(names, key=lambda name: not name.endswith(_TWINS)):
            new, place = self._new / name, self._place(name)
            if name.endswith(_ERRORS) and not new.stat().st_size:
                remove(target_of(place))
                remove(new)
            else:
                _move(new, place)
        if self._target is None:
            self._output.settle()
        self.clear()

    def clear(self) -> None:
        remove_folder(self._new)
        remove_folder(self._folder)

    def _place(self, name: str) -> Path:
        if name == self._errors.name:
            return self._errors
        if self._target is not None:
            return self._target
        return (self._errors.parent if name.endswith((_ERRORS, _TWINS)) else self._output.path) / name

    def _make_new(self, dead_letters: DeadLetters, finished: FinishedJob) -> FinishedJob:
        committed = self._parts.close(read_all=True)
        if Ledger(committed).next_todo(0) != len(dead_letters):
            raise JobError(f"{self._folder} has gaps: run again to fill them")
        remove_folder(self._new)  # left incomplete by a killed process
        if not is_remote(self._new):
            self._new.mkdir()
        left = {dead_letters.place(json.loads(line)["position"]) for line in self._lines(committed)}
        with atomic_file(self._new / self._errors.name) as file:
            self._copy_dead_letters(dead_letters, committed, left, file)
        errors_digest = digest_of(self._new / self._errors.name) if left else ""
        if self._target is not None:
            turns = _turns(dead_letters.positions, left, 0)
            new = self._new / self._target.name
            with atomic_file(new) as file:
                target = DigestWriter(file)
                self._writer.interleave(self._target, self._paths(committed), turns, cast("BinaryIO", target))
            return FinishedJob(finished.records, len(left), new.stat().st_size, target.digest(), errors_digest)
        for interval in self._output.committed():
            self._make_part(interval, dead_letters, left, committed)
        return FinishedJob(finished.records, len(left), 0, "", errors_digest)

    def _make_part(
        self, interval: Interval, dead_letters: DeadLetters, left: set[int], committed: Sequence[Interval]
    ) -> None:
        """Write one part of a folder and its twin again, if records of it have succeeded."""
        first, last = dead_letters.place(interval.start), dead_letters.place(interval.end)
        if all(number in left for number in range(first, last)):
            return
        sources = [part for part in committed if part.end > first and part.start < last]
        passed_over = sum(number not in left for number in range(sources[0].start, first))
        positions = dead_letters.positions[first:last]
        turns = [(0, -passed_over), *_turns(positions, {n - first for n in left if first <= n < last}, interval.start)]
        new = self._new / self._output.part_path(interval).name
        with atomic_file(new) as file:
            part = DigestWriter(file)
            self._writer.interleave(
                self._output.part_path(interval), self._paths(sources), turns, cast("BinaryIO", part)
            )
        twin = io.BytesIO()
        self._copy_dead_letters(dead_letters, sources, {number for number in left if first <= number < last}, twin)
        letters = twin.getvalue()
        done = interval.end - interval.start - letters.count(b"\n")
        seal = Seal(interval, done, part.tell(), len(letters), part.digest(letters))
        with atomic_file(self._new / seal.name) as file:
            file.write(letters)

    def _paths(self, intervals: Sequence[Interval]) -> list[Path]:
        return [self._parts.part_path(interval) for interval in intervals]

    def _lines(self, intervals: Sequence[Interval]) -> Iterator[bytes]:
        for twin in self._parts.twins(intervals):
            with twin.open("rb") as lines:
                yield from lines

    def _copy_dead_letters(
        self, dead_letters: DeadLetters, committed: Sequence[Interval], wanted: set[int], file: BinaryIO
    ) -> None:
        """Copy the new dead letters with these numbers; their attempts add up."""
        for line in self._lines(committed):
            letter = json.loads(line)
            number = dead_letters.place(letter["position"])
            if number in wanted:
                letter["attempts"] += dead_letters.attempts[number]
                file.write(json.dumps(letter).encode() + b"\n")


def _turns(positions: Sequence[int], left: set[int], start: int) -> Iterator[tuple[int, int]]:
    """Pairs of counts: output rows up to the place of a record that has succeeded, and rows to insert there."""
    before = 0
    for number, position in enumerate(positions):
        before += position - start
        start = position + 1
        if number not in left:
            yield before, 1
            before = 0


def _move(source: Path, destination: Path) -> None:
    """Move a file over another; in a store or to another disk, copy then remove, which may be repeated after a kill."""
    if not is_remote(source):
        destination = target_of(destination)
        try:
            source.replace(destination)
            sync_folder(destination.parent)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with source.open("rb") as file, atomic_file(destination) as copy:
                shutil.copyfileobj(file, copy, _BLOCK_BYTES)
            source.unlink()
        return
    fs, address = store(source)
    with_retries(lambda: fs.cp_file(address, store(destination)[1]))()
    remove(source)
