"""Read the state of a job from its files: while it runs, after a kill, or when it is finished."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.io.formats.writer import Layout
from headrace.io.sinks.targets import Target, find_target
from headrace.io.storage.addresses import display_name
from headrace.io.storage.checksums import digest_of
from headrace.io.storage.lease import may_live
from headrace.io.storage.locations import as_os_errors, exists, is_remote
from headrace.io.storage.parts import PartFolder
from headrace.jobs.state.job_state import FinishedJob, JobState
from headrace.jobs.state.lock import LockHolder, holder_in
from headrace.jobs.state.state_file import read_state
from headrace.jobs.state.windows import Windows

NEW = "retry-new"
"""The folder, in the working folder, of the files that a retry has written and that are being moved to their places."""
JobStatus: TypeAlias = Literal["running", "not running", "finished"]


class NoJobError(ConfigError):
    """No job has written this output, or its first run has only just started."""


class LoadingError(NoJobError):
    """The first run of the job is loading the model, so it has written nothing yet."""

    def __init__(self, name: str, holder: LockHolder) -> None:
        super().__init__(f"the job of {name} is loading the model, in {holder}")
        self.holder = holder


@dataclass(frozen=True, slots=True)
class Inspection:
    """The state of a job."""

    state: JobStatus
    holder: LockHolder | None
    """The process that runs it, from its lock file or lease; None if none does."""
    records: int
    """Finished records, including failed ones."""
    failed: int
    reasons: Mapping[str, int]
    """Failed records by reason, the most frequent first."""
    parts: int
    """Number of committed parts."""
    retried: tuple[int, int] | None
    """For a retry in progress: dead letters with a new outcome, and dead letters in all."""
    swapping: bool
    """Whether a retry has ended whose new files are not all in their places; the next run moves them."""
    settings: Mapping[str, object] | None
    """The settings of the job; None if JSON cannot hold them."""
    damaged: Sequence[str]
    """Files that have changed since they were committed, each with the reason."""


def known_target(name: str | Path) -> Target:
    """The output of that name; a name that does not show the format counts as JSON Lines.

    Raises:
        ConfigError: the name is no output.
    """
    return find_target(name) if _has_format(name) else find_target(name, "jsonl")


def state_of(name: str | Path) -> tuple[Target, JobState]:
    """The output of that name, in its own format, and the state of its job.

    Raises:
        NoJobError: no job has written there.
        LoadingError: its first run loads the model.
        ConfigError: its state cannot be read.
        JobError: it is damaged.
    """
    target = known_target(name)
    try:
        state = read_state(target.work / "job.json")
    except OSError as error:
        raise ConfigError(f"cannot read {target.work / 'job.json'}: {error}") from error
    if state is None:
        if not (target.is_folder or is_remote(target.place)) and target.place.is_dir():
            raise NoJobError(f"{target.place} is a folder: for its parts, end the name in /")
        if (holder := job_holder(target)) is not None:
            raise LoadingError(display_name(name), holder)
        if exists(target.work / "lock"):
            raise NoJobError(
                f"no job has written {display_name(name)}: its run was killed before it began, while it loaded the "
                "model; the same command begins it"
            )
        raise NoJobError(
            f"no job has written {display_name(name)}: there is no {target.work / 'job.json'}, "
            "which a job writes once its model is loaded"
        )
    chosen = (state.settings or {}).get("output_format")
    return find_target(name, chosen if isinstance(chosen, str) else target.format), state


def inspect(name: str | Path, *, verify: bool = False) -> Inspection:
    """Inspect an output. Writes nothing, and does not disturb a run.

    Args:
        verify: compare the content with the stored checksums; otherwise compare sizes only.

    Raises:
        ConfigError: no job has written there.
    """
    target, state = state_of(name)
    folder = target.place if target.is_folder else target.work
    parts = PartFolder(folder, f".{target.format}{target.compression}", target.work)
    windows = windows_of(target, parts)
    committed = windows.others(parts.committed())
    finished, swapping = state.finished, state.swap
    retry = PartFolder(target.work / "retry", f".{target.format}{target.compression}")
    again = sum(end - start for start, end in retry.committed())
    holder = job_holder(target)
    if finished:
        records, dead_letters = finished.records, [current(target.errors, target.work, swapping=swapping)]
    else:
        dead_letters = parts.twins(committed)
        records = sum(end - start for start, end in committed)
        for window in windows.all:
            dead_letters += window.parts.twins(window.committed)
            records += window.finished
    reasons = _reasons(dead_letters)
    if finished:
        damaged = changes(target, parts, finished, read=verify, swapping=swapping)
    else:
        found = parts.check(committed, set(committed) if verify else ()) + windows.check(read=verify)
        damaged = [str(damage) for damage in found if exists(damage.path)]  # otherwise the run has just merged it
    return Inspection(
        state="running" if holder else "finished" if finished else "not running",
        holder=holder,
        records=records,
        failed=finished.failed if finished else reasons.total(),
        reasons=dict(reasons.most_common()),
        parts=len(committed) + sum(len(window.committed) for window in windows.all),
        retried=(again, finished.failed) if finished and again and not swapping else None,
        swapping=swapping,
        settings=state.settings,
        damaged=damaged,
    )


def windows_of(target: Target, parts: PartFolder) -> Windows:
    """What an unfinished job has committed in another order than the input's; nothing in an object store."""
    windows = Windows(target.work / "order", parts, target.writer(Layout("output")))
    return windows if is_remote(target.place) else windows.look()


def _has_format(name: str | Path) -> bool:
    try:
        find_target(name)
    except ConfigError:
        return False
    return True


def _reasons(dead_letters: Iterable[Path]) -> Counter[str]:
    reasons: Counter[str] = Counter()
    for path in dead_letters:
        try:
            with path.open("rb") as lines:
                for line in lines:
                    reasons[json.loads(line)["reason"]] += 1
        except FileNotFoundError:
            continue  # nothing failed, or the run has just merged it
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    return reasons


def job_holder(target: Target) -> LockHolder | None:
    """The process that runs the job of an output, or the holder of its lease in a store; None if it is free."""
    return holder_of(target.work / "lock")


def holder_of(lock: Path) -> LockHolder | None:
    """The process that holds a lock file, or the holder of a lease in a store; None if it is free."""
    try:
        if is_remote(lock):
            content = as_os_errors(lock.read_text)(encoding="utf-8")
            return holder_in(content) if may_live(content) else None
        with lock.open("r", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given up when the file is closed, at once
            except BlockingIOError:
                return holder_in(file.read())
    except FileNotFoundError:
        pass
    return None


# -- which files of a finished job have changed ---------------------------------------------------------------------


def current(path: Path, work: Path, *, swapping: bool) -> Path:
    """Where the file is whose place is `path`; `swapping` says whether new files are being moved to their places."""
    new = work / NEW / path.name
    return new if swapping and exists(new) else path


def changes(
    target: Target, parts: PartFolder, finished: FinishedJob, *, read: bool, swapping: bool = False
) -> list[str]:
    """The files of a finished job that have changed since, each with the reason.

    Args:
        read: compare the content too, not only sizes.
        swapping: see `current`.
    """
    if target.is_folder:
        intervals = parts.committed()
        found = [str(damage) for damage in parts.check(intervals, set(intervals) if read else ())]
        if sum(end - start for start, end in intervals) != finished.records:
            found.append(f"{target} (parts are missing)")
    else:
        found = _file_change(
            current(target.place, target.work, swapping=swapping), finished.digest if read else "", finished.bytes
        )
    if finished.failed:
        found += _file_change(
            current(target.errors, target.work, swapping=swapping), finished.errors_digest if read else ""
        )
    return found


def _file_change(path: Path, digest: str, size: int | None = None) -> list[str]:
    """How a file has changed, if that is known: at most one line."""
    if not exists(path):
        return [f"{path} (it is missing)"]
    if size is not None and (found := path.stat().st_size) != size:
        return [f"{path} ({found:,} bytes; {size:,} when the job ended)"]
    if digest and digest_of(path, like=digest) != digest:
        return [f"{path} (its content has changed: another checksum)"]
    return []
