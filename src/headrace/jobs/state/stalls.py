"""Detects a job whose runs end one after the other without progress."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import BrokenOffError, JobError
from headrace.io.storage.atomic import atomic_file
from headrace.jobs.state.job_state import Pass

MOST_RUNS = 4
"""Runs in a row without a committed record before the job fails for good."""


STALLS = "standstill.json"
"""The file that counts runs without progress."""


def judge_stall(work: Path, todo: Pass, error: BrokenOffError) -> None:
    """Count a run that failed; not if the file cannot be written, as on a full disk.

    Raises:
        JobError: too many runs in a row have committed nothing.
    """
    try:
        done = todo.records_now()
        runs = 1 if done > todo.done else _runs_at(work / STALLS, done) + 1
        with atomic_file(work / STALLS) as file:
            file.write(json.dumps({"done": done, "runs": runs}).encode())
    except OSError:
        return
    if runs >= MOST_RUNS:
        raise JobError(
            f"no progress: {runs} runs in a row have ended with {done:,} records done. The last reason: {error}"
        ) from error


def _runs_at(path: Path, done: int) -> int:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return int(noted["runs"]) if noted["done"] == done else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
