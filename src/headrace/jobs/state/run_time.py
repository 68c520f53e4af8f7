"""Run time of a job over all runs, stored in a file at intervals; measured by the monotonic clock."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.locations import is_remote, remove

EVERY_S = 5.0
EVERY_REMOTE_S = 30.0


@dataclass(frozen=True, slots=True)
class RunTime:
    """Run time of all runs; for a killed run, up to its last note."""

    runs: int
    seconds: float


class RunTimeLog:
    """Adds the time since its creation to the run time of earlier runs. Write errors are ignored."""

    def __init__(self, work: Path) -> None:
        self._path = work / "time.json"
        self._began = self._noted = time.monotonic()
        self._earlier: RunTime | None = None
        self._every_s = EVERY_REMOTE_S if is_remote(work) else EVERY_S

    def read(self) -> RunTime:
        """The stored run time."""
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
            return RunTime(int(noted["runs"]), float(noted["seconds"]))
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: not needed
            return RunTime(0, 0.0)

    def note(self) -> None:
        """Store the run time if the last note is old enough."""
        if self._earlier is None or time.monotonic() - self._noted >= self._every_s:
            self.store()

    def forget(self) -> None:
        """Delete the file, for a new job."""
        remove(self._path)

    def store(self) -> None:
        """Store the run time."""
        self._earlier = self._earlier or self.read()
        self._noted = time.monotonic()
        total = RunTime(self._earlier.runs + 1, self._earlier.seconds + self._noted - self._began)
        try:
            with atomic_file(self._path) as file:
                file.write(json.dumps({"runs": total.runs, "seconds": round(total.seconds, 3)}).encode())
        except OSError:
            pass
