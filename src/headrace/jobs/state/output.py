"""The output of a job and its working folder: its settings, its parts, and the merged file at the end.

For the file `out.parquet`: `out.parquet.parts/` holds `job.json`, `lock` and the parts; `out.errors.jsonl` takes the
dead letters. The end is a row of steps, each of which may be repeated after a kill: merge the dead letters, merge the
parts, mark the job finished, remove the parts.

For the folder `out/`: the parts in it are the output, and stay. All else, half-written files included, is in
`out/_headrace/`, which readers of such folders pass over for its name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Literal, TypeGuard, cast

from headrace.errors import ConfigError, JobError
from headrace.io.base import PartWriter
from headrace.io.sinks.targets import Target
from headrace.io.storage.checksums import Damage, DigestWriter, Interval, digest_of
from headrace.io.storage.lease import Lease
from headrace.io.storage.locations import as_os_errors, drop_uploads, exists, file_names, is_remote, remove
from headrace.io.storage.parts import PartFolder, atomic_file, listed
from headrace.jobs.state.fingerprint import check_same
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.lock import exclusive
from headrace.jobs.state.passes import Finished, JobState, Pass
from headrace.jobs.state.retrying import Retrying
from headrace.jobs.state.run_time import RunTimeLog
from headrace.jobs.state.stalls import StallDetector

REPORT = "report.json"
"""The figures of a job's runs, which stay beside its state."""


@dataclass(frozen=True, slots=True)
class StartMode:
    """How a run starts on an output."""

    fingerprint: Mapping[str, object]
    """Facts that determine the output, as JSON."""
    settings: Mapping[str, object] | None = None
    """The settings of the job, as JSON; None if JSON cannot hold them."""
    changes: Literal["refuse", "ignore", "overwrite"] = "refuse"
    """What to do where the output was started with other settings."""
    made_of: str | None = None
    """Identity of the engine: see `engines.identity`; None if unknown."""


class JobOutput:
    """Where a job writes. All methods block: they do file I/O.

    Raises:
        ConfigError: the folder to write to does not exist.
    """

    def __init__(self, target: Target, writer: PartWriter) -> None:
        place = target.place
        if not is_remote(place):
            if not place.parent.is_dir():
                raise ConfigError(f"cannot write {target}: {place.parent} is not a folder")
            if place.is_dir() and not target.is_folder:
                raise ConfigError(f"cannot write {target}: it is a folder; name a file in it, or end it in /")
            if place.is_file() and target.is_folder:
                raise ConfigError(f"cannot write {target}: it is a file; name a folder")
        self._target = target
        self.target = place
        self.errors = target.errors
        self._siblings = target.siblings
        self.writer = writer
        self.is_folder = target.is_folder
        self.work = target.work
        """The working folder."""
        self._lease: Lease | None = None
        folder = place if target.is_folder else target.work
        self.parts = PartFolder(folder, writer.suffix, target.work, self._check_lease)
        self._state = target.work / "job.json"
        self._retrying = Retrying(
            target.work,
            None if target.is_folder else place,
            self.parts,
            self.errors,
            writer,
            self._check_lease,
        )
        self.scratch = target.work / "scratch"
        """A folder of this machine, made by who needs it, for what makes a resume faster and may be lost."""

    def refuse_foreign_files(self) -> None:
        """Check that nothing would be replaced but what a job here has written.

        Raises:
            ConfigError: the output or its errors file exists, and no job says how it was made.
        """
        try:
            self._refuse_foreign_files()
        except OSError as error:
            raise ConfigError(f"cannot write {self.target}: {error.strerror or error}") from error

    def _refuse_foreign_files(self) -> None:
        for path in (self.target, self.errors):
            is_output_folder = self.is_folder and path == self.target
            # An empty folder is welcome, and what a job has left that was killed before it could say anything.
            taken = bool(set(file_names(path)) - {self.work.name}) if is_output_folder else exists(path)
            if taken and not exists(self._state):
                raise ConfigError(
                    f"{path} exists and no job here says how it was made; pass --overwrite to replace it, "
                    "or choose another output"
                )

    def _check_errors(self) -> None:
        """Another output here may differ from this one in its format alone; its dead letters must not be lost."""
        if not exists(self.errors):
            return
        for other in self._siblings:
            state = read_state(other.work / "job.json")
            if state and state["finished"] and state["finished"]["failed"]:
                raise ConfigError(
                    f"{self.errors} holds the dead letters of {other}: give this output another name, or retry those "
                    "first; what is committed is kept"
                )

    @property
    def is_finished(self) -> bool:
        """Whether a job has come to its end here, whichever it was, as far as can be read."""
        try:
            state = self.read_state()
        except JobError:
            return False
        return state is not None and state["finished"] is not None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output while the body runs.

        Raises:
            OutputLockedError: another process writes it.
        """
        lock = self.work / "lock"
        if is_remote(self.target):
            self._lease = Lease(lock, self.target)
            with self._lease.held(), tempfile.TemporaryDirectory(prefix="headrace-") as folder:
                self.scratch = Path(folder)
                drop_uploads(self.target, self.errors, self.work)
                yield
        else:
            try:
                self.work.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write {self.target}: {error.strerror or error}: {self.work}") from error
            with exclusive(lock, self.target):
                self.parts.sweep()
                yield

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _wait_until_alone(self) -> None:
        if self._lease is not None:
            self._lease.wait_until_alone()

    def begin(self, start: StartMode) -> Pass | Finished:
        """What is left to do, or how the job ended. Starts again if there is no state, or if `start` asks for it.

        Raises:
            ResumeMismatchError: the output was started with other settings; each difference is named.
            ConfigError: the output file is not the one the finished job wrote, or its errors file is another's.
            JobError: the parts contradict each other.
        """
        state = None if start.changes == "overwrite" else self.read_state()
        if state is None or state["finished"] is None:
            self._check_errors()
        if state is None:
            self._retrying.clear()
            self.parts.clear()  # first, so that no kill leaves old parts under the new fingerprint
            self._clear_scratch()
            RunTimeLog(self.work).forget()
            StallDetector(self.work).forget()
            remove(self.work / REPORT)
            self._write_state(start, None)
            return self._pass(start, Ledger([]))
        finished = self._resumed(state, start)
        if finished is None:
            return self._resume(start)
        if self.is_folder:
            return self._begin_finished_folder(start, finished)
        if not exists(self.target):  # someone took the result away: what is wanted is a new one
            return self._reopen(start)  # a kill may have left some parts
        if self.target.stat().st_size != finished.bytes:
            raise ConfigError(f"{self.target} is not the file the finished job wrote; pass --overwrite to replace it")
        self.parts.clear()  # a kill may have come between the mark and this
        self._clear_scratch()
        return finished

    def _resume(self, start: StartMode) -> Pass:
        intervals, damaged = self.parts.resume()
        return self._pass(start, Ledger(intervals), damaged)

    def _reopen(self, start: StartMode) -> Pass:
        """Go on with a job that had ended, to make anew what was taken away."""
        self._retrying.clear()  # it numbers the dead letters there were
        self._write_state(start, None)
        return self._resume(start)

    def _begin_finished_folder(self, start: StartMode, finished: Finished) -> Pass | Finished:
        """Parts that were taken away are made anew; one that is another now may be so on purpose, and is refused."""
        if damaged := self.parts.check(self.parts.committed()):
            raise ConfigError(
                f"{self.target}/ is not as the finished job left it: {listed(damaged)}; remove what is damaged and run "
                "again to make it anew, or pass --overwrite"
            )
        return finished if Ledger(self.parts.take_over()).done == finished.records else self._reopen(start)

    def begin_retry(self, start: StartMode) -> Pass | Finished:
        """A pass over the dead letters of the finished job; how it ended, if it left none.

        Raises:
            ResumeMismatchError: the output was started with other settings; each difference is named.
            ConfigError: there is no finished job, or its files are not as it left them.
        """
        state = self.read_state()
        finished = None if state is None else self._resumed(state, start)
        if finished is None:
            raise ConfigError(
                f"there is no finished job at {self.target}: run it to its end first (--max-error-rate 1 if it stops "
                "for its errors), then retry what failed"
            )
        if not finished.failed:
            return finished
        if changed := changes(self._target, self.parts, finished, read=not self.is_folder):
            raise ConfigError(
                f"{changed[0]} is not as the finished job left it: restore it to retry what failed, or begin anew with "
                "--overwrite"
            )

        def commit(ended: Finished) -> None:
            self._wait_until_alone()
            self._write_state(start, ended, swap=True)
            self._retrying.swap()
            self._write_state(start, ended)

        return self._retrying.begin(finished, commit)

    def _resumed(self, state: JobState, start: StartMode) -> Finished | None:
        """How the job ended, if it has. What a kill has left half done is done."""
        if start.changes != "ignore":
            check_same(self.target, state["fingerprint"], start.fingerprint)
        finished = Finished(**state["finished"]) if state["finished"] else None
        if state.get("swap"):
            self._retrying.swap()
        if state.get("swap") or start.changes == "ignore":
            self._write_state(start, finished)
        return finished

    def _pass(self, start: StartMode, ledger: Ledger, damaged: Sequence[Damage] = ()) -> Pass:
        failed = self.parts.count_errors()
        finish = functools.partial(self._finish, start)
        return Pass(ledger.next_todo, self.parts, finish, ledger.done, failed, None, damaged=damaged)

    def merge_so_far(self) -> None:
        """What is finished as one file, of a job that will not be continued; the parts stay as they are."""
        committed = self.parts.committed()
        sound = self.parts.take_over(self.parts.check(committed, set(committed)))
        self.parts.merge_errors(self.errors, sound, self.work)
        self._merge(sound)

    def _merge(self, intervals: Sequence[Interval]) -> str:
        """All rows as the one output file; returns its digest."""
        with atomic_file(self.target, self.work) as file:
            target = DigestWriter(file)
            self.writer.merge([self.parts.part_path(interval) for interval in intervals], cast("BinaryIO", target))
        return target.digest

    def _finish(self, start: StartMode) -> Finished:
        """Merge all parts into the one output file and mark the job finished.

        Raises:
            JobError: the parts do not hold every position from 0 on, or some are damaged.
        """
        self._wait_until_alone()
        committed = self.parts.close(read_all=not self.is_folder)
        ledger = Ledger(committed)
        if not ledger.is_whole:
            raise JobError(f"{self.parts.path} has a gap at record {ledger.next_todo(0)}: run again to fill it")
        failed = self.parts.count_errors()
        self._check_errors()
        self.parts.merge_errors(self.errors, committed, self.work)
        errors_digest = digest_of(self.errors) if failed else ""
        if self.is_folder:
            finished = Finished(ledger.done, failed, 0, "", errors_digest)
            self._write_state(start, finished)
        else:
            digest = self._merge(committed)
            finished = Finished(ledger.done, failed, self.target.stat().st_size, digest, errors_digest)
            self._write_state(start, finished)
            self.parts.clear()
        self._clear_scratch()
        return finished

    def _clear_scratch(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def read_state(self) -> JobState | None:
        """The state of the job; None if there is none.

        Raises:
            JobError: it cannot be read.
        """
        return read_state(self._state)

    def _write_state(self, start: StartMode, finished: Finished | None, *, swap: bool = False) -> None:
        state = {
            "fingerprint": start.fingerprint,
            "settings": start.settings,
            "made_of": start.made_of,
            "finished": asdict(finished) if finished else None,
            "swap": swap,
        }
        with atomic_file(self._state) as file:
            file.write(json.dumps(state, indent=1).encode())


def changes(target: Target, parts: PartFolder, finished: Finished, *, read: bool) -> list[str]:
    """What of a finished job is not as it was left; `read`: by content too, else by size."""
    if target.is_folder:
        intervals = parts.committed()
        found = [str(damage) for damage in parts.check(intervals, set(intervals) if read else ())]
        if sum(end - start for start, end in intervals) != finished.records:
            found.append(f"{target} (parts are missing)")
    else:
        found = _file_change(target.place, finished.digest if read else "", finished.bytes)
    if finished.failed:
        found += _file_change(target.errors, finished.errors_digest if read else "")
    return found


def _file_change(path: Path, digest: str, size: int | None = None) -> list[str]:
    """How a file differs from what it was, where that is known: at most one line."""
    if not exists(path):
        return [f"{path} (it is gone)"]
    if size is not None and (found := path.stat().st_size) != size:
        return [f"{path} ({found:,} bytes; {size:,} when the job ended)"]
    if digest and digest_of(path) != digest:
        return [f"{path} (its content is not what was written: another checksum)"]
    return []


def read_state(path: Path) -> JobState | None:
    """The state that a job has stored; None if there is none.

    Raises:
        JobError: it cannot be read.
    """
    try:
        state = json.loads(as_os_errors(path.read_text)(encoding="utf-8"))
        if not _is_state(state):
            raise ValueError("it is not as a job writes it")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path} is damaged ({error}); begin anew with --overwrite") from error
    return state


def _is_state(state: object) -> TypeGuard[JobState]:
    if not isinstance(state, dict) or not {"fingerprint", "finished"} <= state.keys():
        return False
    finished, settings = state["finished"], state.get("settings")
    return (
        isinstance(state["fingerprint"], dict)
        and (settings is None or (isinstance(settings, dict) and {"source", "selection"} <= settings.keys()))
        and (finished is None or (isinstance(finished, dict) and _is_an_end(finished)))
    )


def _is_an_end(finished: Mapping[str, object]) -> bool:
    """Whether the fields of a `Finished` are there, and of its types; those with a default may be missing."""
    known = {field.name: field.type for field in fields(Finished)}
    needed = {field.name for field in fields(Finished) if field.default is MISSING}
    if not needed <= finished.keys() <= known.keys():
        return False
    texts = [value for name, value in finished.items() if known[name] == "str"]
    counts = [value for name, value in finished.items() if known[name] == "int"]
    return all(type(text) is str for text in texts) and all(type(count) is int and count >= 0 for count in counts)
