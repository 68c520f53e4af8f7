"""Detects a job whose runs end one after the other without progress."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import BrokenOffError, JobError
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.locations import remove
from headrace.jobs.state.job_state import Pass

MOST_RUNS = 4
"""Runs in a row without a committed record before the job fails for good."""


class StallDetector:
    """Counts runs without progress in a file. If it cannot be written, as on a full disk, the run is not counted."""

    def __init__(self, work: Path) -> None:
        self._path = work / "standstill.json"

    def judge(self, todo: Pass, error: BrokenOffError) -> None:
        """Count a run that failed. Raises JobError: too many runs in a row have committed nothing."""
        try:
            done = todo.records_now()
            runs = 1 if done > todo.done else self._runs_at(done) + 1
            with atomic_file(self._path) as file:
                file.write(json.dumps({"done": done, "runs": runs}).encode())
        except OSError:
            return
        if runs >= MOST_RUNS:
            raise JobError(
                f"no progress: {runs} runs in a row have ended with {done:,} records done. The last reason: {error}"
            ) from error

    def forget(self) -> None:
        """Delete the file, for a new job."""
        remove(self._path)

    def _runs_at(self, done: int) -> int:
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
            return int(noted["runs"]) if noted["done"] == done else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0
