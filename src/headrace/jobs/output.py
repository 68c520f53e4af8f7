"""The output of a job and its working folder: what it was begun with, its parts, and the one merged file at the end.

For the file `out.parquet`: `out.parquet.parts/` holds `job.json`, `lock` and the parts; `out.errors.jsonl` takes the
dead letters. The end is a row of steps, each of which may be repeated after a kill: merge the dead letters, merge the
parts, mark the job finished, remove the parts.

For the folder `out/`: the parts in it are the output, and stay. All else is in `out/_headrace/`, which readers of such
folders pass over for its name.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, JobError, ResumeMismatchError
from headrace.io.base import PartWriter
from headrace.io.lease import Lease
from headrace.io.locations import as_os_errors, exists, is_remote
from headrace.io.parts import Interval, PartFolder, atomic_file, file_names
from headrace.io.targets import Target
from headrace.jobs.ledger import Ledger
from headrace.jobs.lock import exclusive


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished job left."""

    records: int
    """Rows of the input, failed ones included."""
    failed: int
    bytes: int
    """Size of the merged file; 0 for a folder of parts."""


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
        self.target = place
        self.errors = target.errors
        self.writer = writer
        self._is_folder = target.is_folder
        self._work = target.work
        self._lease: Lease | None = None
        folder = place if target.is_folder else target.work
        self.parts = PartFolder(folder, writer.suffix, target.work, self._check_lease)
        self._state = target.work / "job.json"
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
            is_output_folder = self._is_folder and path == self.target
            taken = bool(file_names(path)) if is_output_folder else exists(path)  # an empty folder is welcome
            if taken and not exists(self._state):
                raise ConfigError(
                    f"{path} exists and no job here says how it was made; pass --overwrite to replace it, "
                    "or choose another output"
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that writes this output.

        Raises:
            OutputLockedError: another one does.
        """
        lock = self._work / "lock"
        if is_remote(self.target):
            self._lease = Lease(lock, self.target)
            with self._lease.held(), tempfile.TemporaryDirectory(prefix="headrace-") as folder:
                self.scratch = Path(folder)
                yield
        else:
            try:
                self._work.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write {self.target}: {error.strerror or error}: {self._work}") from error
            with exclusive(lock, self.target):
                yield

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def begin(self, fingerprint: Mapping[str, Any], overwrite: bool) -> Ledger | Finished:
        """What is done so far, or how the job ended if it has. Begins anew where there is nothing, or with `overwrite`.

        Raises:
            ResumeMismatchError: the output was begun with something else; each difference is named.
            ConfigError: the output file is not the one the finished job wrote.
            JobError: the parts contradict each other.
        """
        state = None if overwrite else self._read_state()
        if state is None:
            self.parts.clear()  # first, so that no kill leaves old parts under the new fingerprint
            self._clear_scratch()
            self._write_state(fingerprint, None)
            return Ledger([])
        self._compare(state["fingerprint"], fingerprint)
        if state["finished"] is None:
            return Ledger(self.parts.committed())
        finished = Finished(**state["finished"])
        if self._is_folder:
            ledger = Ledger(self.parts.committed())
            return finished if ledger.done == finished.records else ledger  # a part that was taken away is made anew
        if not exists(self.target):  # someone took the result away: what is wanted is a new one
            self._write_state(fingerprint, None)
            return self.begin(fingerprint, overwrite=False)
        if self.target.stat().st_size != finished.bytes:
            raise ConfigError(f"{self.target} is not the file the finished job wrote; pass --overwrite to replace it")
        self.parts.clear()  # a kill may have come between the mark and this
        self._clear_scratch()
        return finished

    def merge_so_far(self) -> None:
        """What is finished as one file, of a job that will not be continued; the parts stay as they are."""
        self.parts.merge_errors(self.errors)
        with atomic_file(self.target) as file:
            self.writer.merge([self.parts.part_path(interval) for interval in self.parts.committed()], file)

    def finish(self, fingerprint: Mapping[str, Any]) -> Finished:
        """Merge all parts into the one output file and mark the job finished.

        Raises:
            JobError: the parts do not hold every position from 0 on.
        """
        committed = self.parts.committed()
        ledger = Ledger(committed)
        if ledger.intervals not in ([], [Interval(0, ledger.done)]):
            raise JobError(f"{self.parts.path} has gaps ({ledger.intervals[:3]} ...): run again to fill them")
        failed = self.parts.count_errors()
        self.parts.merge_errors(self.errors)
        if self._is_folder:
            finished = Finished(ledger.done, failed, 0)
            self._write_state(fingerprint, finished)
            self._clear_scratch()
            return finished
        with atomic_file(self.target) as file:
            self.writer.merge([self.parts.part_path(interval) for interval in committed], file)
        finished = Finished(ledger.done, failed, self.target.stat().st_size)
        self._write_state(fingerprint, finished)
        self.parts.clear()
        self._clear_scratch()
        return finished

    def _clear_scratch(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _compare(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        differences = [
            f"{key} was {old!r}, now {new!r}"
            for key in sorted({*_flat(then), *_flat(now)})
            if (old := _flat(then).get(key)) != (new := _flat(now).get(key))
        ]
        if differences:
            raise ResumeMismatchError(
                f"{self.target} was begun with something else: {'; '.join(differences)}. "
                "Restore that, choose another output, or pass --overwrite to begin anew"
            )

    def _read_state(self) -> Any:
        try:
            return json.loads(as_os_errors(self._state.read_text)(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise JobError(f"{self._state} is damaged ({error}); begin anew with --overwrite") from error

    def _write_state(self, fingerprint: Mapping[str, Any], finished: Finished | None) -> None:
        state = {"fingerprint": fingerprint, "finished": asdict(finished) if finished else None}
        with atomic_file(self._state) as file:
            file.write(json.dumps(state, indent=1).encode())


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; values as JSON gives them back."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(inner))
    return flat
