"""Reads `job.json`, the state that a job has stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeGuard

from headrace.errors import JobError
from headrace.io.storage.locations import as_os_errors
from headrace.jobs.state.job_state import FinishedJob, JobState
from headrace.records import Json


def read_state(path: Path) -> JobState | None:
    """The state that a job has stored; None if there is none, or if the job was killed before it had begun.

    Raises:
        JobError: it cannot be read.
    """
    try:
        found = json.loads(as_os_errors(path.read_text)(encoding="utf-8"))
        if not _is_state(found):
            raise ValueError("it lacks fields of a job's state")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path} is damaged ({error}); start again with ``overwrite=True``") from error
    known = {field.name: found[field.name] for field in fields(JobState) if field.name in found}
    state = JobState(**known | {"finished": found["finished"] and FinishedJob(**found["finished"])})
    return None if state.clearing else state


def _is_state(state: object) -> TypeGuard[dict[str, Json]]:
    if not isinstance(state, dict) or not {"fingerprint", "finished"} <= state.keys():
        return False
    finished, settings = state["finished"], state.get("settings")
    return (
        isinstance(state["fingerprint"], dict)
        and isinstance(state.get("before"), dict | None)
        and (settings is None or (isinstance(settings, dict) and {"source", "selection"} <= settings.keys()))
        and (finished is None or (isinstance(finished, dict) and _is_an_end(finished)))
    )


def _is_an_end(finished: Mapping[str, object]) -> bool:
    """Whether all fields of a `FinishedJob` without a default are there, and all are of the right type."""
    known = {field.name: field.type for field in fields(FinishedJob)}
    needed = {field.name for field in fields(FinishedJob) if field.default is MISSING}
    if not needed <= finished.keys() <= known.keys():
        return False
    texts = [value for name, value in finished.items() if known[name] == "str"]
    counts = [value for name, value in finished.items() if known[name] == "int"]
    return all(type(text) is str for text in texts) and all(type(count) is int and count >= 0 for count in counts)
