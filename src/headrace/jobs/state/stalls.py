"""Runs of a job that end at the same place, one after the other: the next one will not get further by itself."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import BrokenOffError, JobError
from headrace.io.storage.locations import remove
from headrace.io.storage.parts import atomic_file
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.passes import Pass

MOST_RUNS = 4
"""So many runs in a row may end without a record committed before that is said, with another exit status."""


class StallDetector:
    """Counts such runs in a file. One that cannot be written, as on a full disk, is left out: it decides nothing."""

    def __init__(self, work: Path) -> None:
        self._path = work / "standstill.json"

    def judge(self, todo: Pass, error: BrokenOffError) -> None:
        """Note that a run was broken off.

        Raises:
            JobError: this and the runs before it have committed nothing.
        """
        try:
            done = Ledger(todo.parts.committed()).done
            runs = 1 if done > todo.done else self._runs_at(done) + 1
            with atomic_file(self._path) as file:
                file.write(json.dumps({"done": done, "runs": runs}).encode())
        except OSError:
            return
        if runs >= MOST_RUNS:
            raise JobError(
                f"no progress: {runs} runs in a row have ended here, with {done:,} records done. "
                f"The last reason: {error}"
            ) from error

    def forget(self) -> None:
        """The job begins anew."""
        remove(self._path)

    def _runs_at(self, done: int) -> int:
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
            return int(noted["runs"]) if noted["done"] == done else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0
