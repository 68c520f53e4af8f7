"""The output of a job and its working folder: whether it goes on or is refused, its parts, and the merged file.

For the file `out.parquet`: `out.parquet.parts/` holds `job.json`, `lock` and the parts; `out.errors.jsonl` takes the
dead letters. A job ends in steps that may be repeated after a kill: merge the dead letters, merge the parts, mark the
job finished, remove the parts.

For the folder `out/`: the parts in it are the output, and stay. All other files, such as incomplete ones, are in
`out/_headrace/`, which readers of such folders skip because of its name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, cast

from headrace.errors import BrokenOffError, ConfigError, JobError, ResumeMismatchError
from headrace.io.base import PartWriter
from headrace.io.sinks.targets import Target
from headrace.io.storage.atomic import atomic_file, target_of, temporary_of
from headrace.io.storage.checksums import Damage, DigestWriter, Interval, digest_of, listed
from headrace.io.storage.lease import Lease
from headrace.io.storage.locations import abort_uploads, exists, file_names, is_remote, no_folder, remove
from headrace.io.storage.parts import PartFolder
from headrace.jobs.state.dead_letter_retry import Retrying
from headrace.jobs.state.fingerprint import check_same, check_same_input
from headrace.jobs.state.inspection import changes
from headrace.jobs.state.job_state import FinishedJob, JobState, ModelState, Pass
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.lock import locked_folder
from headrace.jobs.state.running_merge import RunningMerge
from headrace.jobs.state.stalls import STALLS
from headrace.jobs.state.state_file import read_state
from headrace.jobs.state.windows import Windows

REPORT = "report.json"
"""The figures of a job's runs, which stay beside its state."""
LIVE = "live.json"
"""What the newest run does now, or did last."""


@dataclass(frozen=True, slots=True)
class StartMode:
    """How a run starts on an output."""

    state: JobState
    """What it writes of itself: all but what becomes of the output."""
    changes: Literal["refuse", "ignore", "overwrite"] = "refuse"
    """What to do if the output was started with other settings."""


class JobOutput:
    """Where a job writes. All methods block: they do file I/O.

    Args:
        makes_folder: whether to create the folder of the output.

    Raises:
        ConfigError: the folder to write to does not exist.
    """

    def __init__(self, target: Target, writer: PartWriter, *, makes_folder: bool = False) -> None:
        place = target.place
        if not is_remote(place):
            if not (makes_folder or place.parent.is_dir()):
                raise ConfigError(f"cannot write {target}: {no_folder(place.parent)}")
            if place.is_dir() and not target.is_folder:
                raise ConfigError(f"cannot write {target}: it is a folder; name a file in it, or end it in /")
            if place.is_file() and target.is_folder:
                raise ConfigError(f"cannot write {target}: it is a file; name a folder")
            _check_links(target)
        self._target = target
        self.name = str(target)
        """What the user calls it, without its password."""
        self.target = place
        self.table = target.table
        """The address, without its login, of the table that takes the rows, if the output is one."""
        self.errors = target.errors
        self._siblings = target.siblings
        self.writer = writer
        self.is_folder = target.is_folder
        self.work = target.work
        """The working folder."""
        self._lease: Lease | None = None
        self._is_locked = False
        self._before: dict[str, list[int] | None] | None = None
        folder = place if target.is_folder else target.work
        self.parts = PartFolder(folder, writer.suffix, target.work, self._check_lease, self._note)
        self.windows = None if is_remote(place) else Windows(target.work / "order", self.parts, writer)
        """Records that are worked on in another order than the input's; None in an object store."""
        self._state = target.work / "job.json"
        self._retrying = Retrying(target, self.parts, writer, self._check_lease)
        self._merging: RunningMerge | None = None
        """The merge that runs beside the job, if this output is one file that can be written so."""
        self.scratch = target.work / "scratch"
        """A local folder, created on use, for files that make a resume faster and may be lost."""

    def refuse_foreign_files(self) -> None:
        """Check that only files written by a job here would be replaced.

        Raises:
            ConfigError: the output or its errors file exists, and not from a job here.
        """
        for path in (self.target, self.errors):
            is_output_folder = self.is_folder and path == self.target
            # An empty folder is accepted, and so is what a job left that was killed before it wrote its state.
            taken = bool(set(file_names(path)) - {self.work.name}) if is_output_folder else exists(path)
            if taken and not self.has_begun:
                raise ConfigError(
                    f"{path} exists and was not written by a job here; pass ``overwrite=True`` to replace it, "
                    "or choose another output"
                )

    def _check_errors(self) -> None:
        """Check that no output of another format here uses the same errors file; its dead letters must not be lost."""
        if not exists(self.errors):
            return
        for other in self._siblings:
            state = read_state(other.work / "job.json")
            if state and state.finished and state.finished.failed:
                raise ConfigError(
                    f"{self.errors} holds the dead letters of {other}: give this output another name, or retry them "
                    "first; committed records are kept"
                )

    @property
    def _files(self) -> tuple[Path, ...]:
        """The files outside of the folders that only jobs write to; in a store, no other program is reckoned with."""
        return () if self.is_folder or is_remote(self.target) else (self.target, self.errors)

    @property
    def has_begun(self) -> bool:
        return exists(self._state)

    @property
    def is_finished(self) -> bool:
        """Whether any job has finished here; False if its state cannot be read."""
        try:
            state = self.read_state()
        except JobError:
            return False
        return state is not None and state.finished is not None

    @property
    def _is_fixed(self) -> bool:
        """Whether this process cannot change what a job has left here, so that it needs no lock to read it."""
        return not is_remote(self.target) and self.work.is_dir() and not os.access(self.work, os.W_OK)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output while the body runs, which may lock it again. A body that begins no job leaves no files.

        Raises:
            OutputLockedError: another process writes it.
        """
        if self._is_locked or (self._is_fixed and self.is_finished):
            yield
            return
        remote = is_remote(self.target)
        with self._locked_in_store() if remote else locked_folder(self.work, self.name, lambda: self.has_begun):
            if not remote:
                self.parts.sweep()
                for path in self._files:  # where links to other disks lead
                    with contextlib.suppress(OSError):
                        remove(temporary_of(target_of(path)))
            self._is_locked = True
            try:
                yield
            finally:
                if self._merging is not None:
                    self._merging.stop()
                self._is_locked = False

    @contextlib.contextmanager
    def _locked_in_store(self) -> Iterator[None]:
        self._lease = Lease(self.work / "lock", self.name)
        with self._lease.held(), tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            self.scratch = Path(folder)
            abort_uploads(self.target, self.errors, self.work)
            yield

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _wait_until_alone(self) -> None:
        if self._lease is not None:
            self._lease.wait_until_alone()

    def begin(self, start: StartMode) -> Pass | FinishedJob:
        """The remaining work, or how the job ended. Starts again if there is no state, or if `start` asks for it.

        Raises:
            ResumeMismatchError: the output was started with other settings; each difference is named.
            ConfigError: the output is not the file that the finished job wrote, or its errors file is another output's.
            JobError: the parts contradict each other.
        """
        state = None if start.changes == "overwrite" else self.read_state()
        if state is None or state.finished is None:
            self._check_errors()
        if state is not None:
            self._before = state.before
        else:
            self._before = {path.name: _stamp(path) for path in self._files}
            if exists(self._state):  # no kill may leave it with some of its parts, or old parts with the new state
                self._write_state(start, None, clearing=True)
            self._retrying.clear()
            self.parts.clear()
            self._clear_scratch()
            for name in (STALLS, REPORT, LIVE):
                remove(self.work / name)
            self._write_state(start, None)
            return self._pass(start, Ledger([]))
        finished = self._resumed(state, start)
        if finished is None:
            return self._resume(start)
        begun = self._begin_finished(start, finished)
        if begun is finished and start.changes == "ignore":
            check_same_input(self._target, state.fingerprint, start.state.fingerprint)
            if not self._is_fixed:
                self._write_state(start, finished)
        return begun

    def _begin_finished(self, start: StartMode, finished: FinishedJob) -> Pass | FinishedJob:
        """How the job ended, or a pass if some of its output is missing."""
        if self.is_folder:
            return self._begin_finished_folder(start, finished)
        if not exists(self.target):  # the user has removed the result and wants a new one
            return self._reopen(start)  # a kill may have left some parts
        if self.target.stat().st_size != finished.bytes:
            raise ConfigError(
                f"{self.target} is not the file the finished job wrote; pass ``overwrite=True`` to replace it"
            )
        if not self._is_fixed:
            self.parts.clear()  # the job may have been killed after it was marked finished
            self._clear_scratch()
        return finished

    def _resume(self, start: StartMode) -> Pass:
        intervals, damaged = self.parts.resume()
        if self.windows is None:
            return self._pass(start, Ledger(intervals), damaged)
        finished, lost = self.windows.load(intervals)
        return self._pass(start, Ledger(finished), damaged + lost)

    def _reopen(self, start: StartMode) -> Pass:
        """Continue a finished job whose output was removed."""
        self._before = {path.name: _stamp(path) for path in self._files}
        self._retrying.clear()  # its parts number the old dead letters
        self._write_state(start, None)
        return self._resume(start)

    def _begin_finished_folder(self, start: StartMode, finished: FinishedJob) -> Pass | FinishedJob:
        """Compute missing parts again. A changed part may have been changed on purpose, so it is refused."""
        if damaged := self.parts.check(self.parts.committed()):
            raise ConfigError(
                f"{self.target}/ has changed since the job finished: {listed(damaged)}; remove the damaged files and "
                "run again to compute them again, or pass ``overwrite=True``"
            )
        parts = self.parts.committed() if self._is_fixed else self.parts.take_over()
        return finished if Ledger(parts).done == finished.records else self._reopen(start)

    def begin_retry(self, start: StartMode) -> Pass | FinishedJob:
        """A pass over the dead letters of the finished job; how it ended if there are none.

        Raises:
            ResumeMismatchError: the output was started with other settings; each difference is named.
            ConfigError: there is no finished job, or its files have changed.
        """
        state = self.read_state()
        finished = None if state is None else self._resumed(state, start, retry=True)
        if finished is None:
            raise ConfigError(
                f"there is no finished job at {self._target}: finish it first (with ``max_error_rate=1`` if it stops "
                "because of errors), then retry"
            )
        if not finished.failed:
            return finished
        if changed := changes(self._target, self.parts, finished, read=not self.is_folder):
            raise ConfigError(
                f"{changed[0]} has changed since the job finished: restore it to retry, or run the job again with "
                "``overwrite=True``"
            )

        def commit(ended: FinishedJob) -> None:
            self._wait_until_alone()
            if changed := changes(self._target, self.parts, finished, read=not self.is_folder):
                raise JobError(f"{changed[0]} has changed during the retry, and is not replaced: restore it to retry")
            self._write_state(start, ended, swap=True)
            self._retrying.swap()
            self._push()
            self._write_state(start, ended)

        return self._retrying.begin(finished, commit)

    def refuse_changes(self, state: JobState, start: StartMode, *, retry: bool) -> None:
        """Check that a job is the one of this state, unless changes are to be ignored.

        Raises:
            ResumeMismatchError: it has other settings; each difference is named. Or its parts have another format,
                which would stay beside those of this job, with the same records.
        """
        if other := self.parts.other_suffix():
            raise ResumeMismatchError(
                f"{self._target} has parts that end in {other}, and this job writes {self.writer.suffix}: restore "
                "``output_format``, choose another output, or pass ``overwrite=True`` to start again"
            )
        if start.changes != "ignore":
            asked = state.settings, start.state.settings
            ended = state.finished is not None
            check_same(self._target, state.fingerprint, start.state.fingerprint, asked, retry=retry, finished=ended)

    def _resumed(self, state: JobState, start: StartMode, *, retry: bool = False) -> FinishedJob | None:
        """How the job ended; None if it has not. Completes the end of a retry that was killed."""
        self.refuse_changes(state, start, retry=retry)
        if state.swap:
            self._retrying.swap()
            self._push()
        if state.swap or (start.changes == "ignore" and state.finished is None):
            self._write_state(start, state.finished)
        return state.finished

    def _pass(self, start: StartMode, ledger: Ledger, damaged: Sequence[Damage] = ()) -> Pass:
        failed = self.parts.count_errors()
        if self.windows is not None:
            failed += self.windows.count_errors()
        finish = functools.partial(self._finish, start)
        if self.writer.merges_early and not self.is_folder and not is_remote(self.target):
            self._merging = RunningMerge(self._merge)
            self._merging.add(self.parts.committed())
        return Pass(ledger, self.parts, finish, ledger.done, failed, None, damaged=damaged, windows=self.windows)

    def show_errors(self, start: StartMode, parts: PartFolder | Windows) -> None:
        """Write the dead letters of an unfinished job where the user looks for them."""
        self._refuse_new(self.errors, lambda: "")
        self._own_errors(start)
        parts.merge_errors(self.errors, work=self.work)
        if self._before is not None and not self.is_folder:
            self._before[self.errors.name] = _stamp(self.errors)
            self._write_state(start, None)

    def _own_errors(self, start: StartMode) -> None:
        """Note that the errors file is the job's own from now on, also after a kill before it is complete."""
        if self._before is not None and not self.is_folder and self.errors.name in self._before:
            del self._before[self.errors.name]
            self._write_state(start, None)

    def _refuse_new(self, path: Path, digest: Callable[[], str]) -> None:
        """Check that the job replaces no file that another program has put there while it ran.

        Args:
            digest: of what it is to be replaced by; a run that was killed may have written the same.
        """
        if self._before is None or path.name not in self._before or _stamp(path) in (None, self._before[path.name]):
            return
        if digest_of(path) != digest():
            raise JobError(
                f"{path} has appeared or changed since the job began, and is not replaced: move it away and run the "
                "same command again; finished records are kept"
            )

    def merge_so_far(self) -> None:
        """Write the finished records of a job that will not be continued to one file; the parts stay."""
        committed = self.parts.committed()
        sound = self.parts.take_over(self.parts.check(committed, set(committed)))
        if self.windows is not None:
            self.windows.load(sound)
            self.windows.give_up()
            sound = self.parts.committed()
        self.parts.merge_errors(self.errors, sound, self.work)
        self._merge(sound)

    def _note(self, part: Interval, size: int) -> None:
        if self._merging is not None:
            self._merging.add([part], size)

    def _merge(self, intervals: Iterable[Interval]) -> str:
        paths = map(self.parts.part_path, intervals)
        with atomic_file(self.target, self.work) as file:
            target = DigestWriter(file)
            self.writer.merge(list(paths) if isinstance(intervals, Sequence) else paths, cast("BinaryIO", target))
            self._refuse_new(self.target, target.digest)
        return target.digest()

    def _finish(self, start: StartMode) -> FinishedJob:
        self._wait_until_alone()
        if self.windows is not None:
            self.windows.finish()
        committed = self.parts.close(read_all=not self.is_folder)
        ledger = Ledger(committed)
        if not ledger.is_whole:
            raise BrokenOffError(f"{self.parts.path} has a gap at record {ledger.next_todo(0)}: run again to fill it")
        failed = self.parts.count_errors()
        self._check_errors()
        self._refuse_new(self.errors, lambda: digest_of(*self.parts.twins(committed)))
        self._own_errors(start)
        self.parts.merge_errors(self.errors, committed, self.work)
        errors_digest = digest_of(self.errors) if failed else ""
        digest = (self._merging and self._merging.finish(committed)) or ""
        if not digest and not self.is_folder:
            digest = self._merge(committed)
        size = 0 if self.is_folder else self.target.stat().st_size
        finished = FinishedJob(ledger.done, failed, size, digest, errors_digest)
        self._push()
        self._write_state(start, finished)
        if not self.is_folder:
            self.parts.clear()
        self._clear_scratch()
        return finished

    def _push(self) -> None:
        self.writer.publish(lambda: [self.parts.part_path(part) for part in self.parts.committed()], self.scratch)

    def _clear_scratch(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.windows is not None:
            self.windows.clear()

    def read_state(self) -> JobState | None:
        """The state of the job; None if there is none. Raises JobError: it cannot be read."""
        return read_state(self._state)

    def begun_with_model(self) -> ModelState | None:
        """The downloaded model that the job here was begun with; None without such a job, or with a local model."""
        try:
            state = self.read_state()
        except JobError:
            return None  # whoever begins the job will say so
        begun = state and state.model
        return begun if isinstance(begun, dict) and {"name", "commit"} <= begun.keys() else None

    def _write_state(
        self, start: StartMode, finished: FinishedJob | None, *, swap: bool = False, clearing: bool = False
    ) -> None:
        state = replace(start.state, before=self._before, finished=finished, swap=swap, clearing=clearing)
        with atomic_file(self._state) as file:
            file.write(json.dumps(asdict(state), indent=1).encode())


def _stamp(path: Path) -> list[int] | None:
    """Differs after any change of a file: its size, time and number; None if it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _check_links(target: Target) -> None:
    """Check that what links lead to can be written."""
    for path in (target.place, target.errors, target.work):
        if not path.is_symlink():
            continue
        end = target_of(path)
        is_folder = path == target.work or (target.is_folder and path == target.place)
        if end.is_symlink():
            raise ConfigError(f"cannot write {target}: {path} is a link that leads back to itself; remove it")
        if not (end if is_folder else end.parent).is_dir():
            why = no_folder(end if is_folder else end.parent)
            raise ConfigError(f"cannot write {target}: {path} is a link to {end}, and {why}, or remove the link")
