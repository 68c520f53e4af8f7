"""The output of a job and its working folder: what it was begun with, its parts, and the one merged file at the end.

For `out.parquet`: `out.parquet.parts/` holds `job.json`, `lock` and the parts; `out.errors.jsonl` takes the dead
letters. The end is a row of steps, each of which may be repeated after a kill: merge the dead letters, merge the
parts, mark the job finished, remove the parts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, JobError, ResumeMismatchError
from headrace.io.base import PartWriter
from headrace.io.parts import Interval, PartFolder, atomic_file
from headrace.jobs.ledger import Ledger
from headrace.jobs.lock import exclusive


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished job left."""

    records: int
    """Rows of the input, failed ones included."""
    failed: int
    bytes: int
    """Size of the merged file."""


class JobOutput:
    """Where a job writes. All methods block: they do file I/O.

    Raises:
        ConfigError: the folder to write to does not exist.
    """

    def __init__(self, target: Path, writer: PartWriter) -> None:
        if not target.parent.is_dir():
            raise ConfigError(f"cannot write {target}: {target.parent} is not a folder")
        if target.is_dir():
            raise ConfigError(f"cannot write {target}: it is a folder; name a file in it")
        self.target = target
        self.errors = target.with_suffix(".errors.jsonl")
        self.writer = writer
        folder = target.with_name(target.name + ".parts")
        self.parts = PartFolder(folder, writer.suffix)
        self._state = folder / "job.json"

    def refuse_foreign_files(self) -> None:
        """Check that nothing would be replaced but what a job here has written.

        Raises:
            ConfigError: the output or its errors file exists, and no job says how it was made.
        """
        for path in (self.target, self.errors):
            if path.exists() and not self._state.exists():
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
        self.parts.path.mkdir(exist_ok=True)
        with exclusive(self.parts.path / "lock", self.target):
            yield

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
            self._write_state(fingerprint, None)
            return Ledger([])
        self._compare(state["fingerprint"], fingerprint)
        if state["finished"] is None:
            return Ledger(self.parts.committed())
        finished = Finished(**state["finished"])
        if not self.target.exists():  # someone took the result away: what is wanted is a new one
            self._write_state(fingerprint, None)
            return self.begin(fingerprint, overwrite=False)
        if self.target.stat().st_size != finished.bytes:
            raise ConfigError(f"{self.target} is not the file the finished job wrote; pass --overwrite to replace it")
        self.parts.clear()  # a kill may have come between the mark and this
        return finished

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
        with atomic_file(self.target) as file:
            self.writer.merge([self.parts.part_path(interval) for interval in committed], file)
        finished = Finished(ledger.done, failed, self.target.stat().st_size)
        self._write_state(fingerprint, finished)
        self.parts.clear()
        return finished

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
            return json.loads(self._state.read_text(encoding="utf-8"))
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
