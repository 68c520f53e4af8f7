"""Which files of a finished job have changed since."""

from __future__ import annotations

from pathlib import Path

from headrace.io.sinks.targets import Target
from headrace.io.storage.checksums import digest_of
from headrace.io.storage.locations import exists
from headrace.io.storage.parts import PartFolder
from headrace.jobs.state.passes import FinishedJob

NEW = "retry-new"
"""The folder, in the working folder, of the files that a retry has written and that are being moved to their places."""


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
    if digest and digest_of(path) != digest:
        return [f"{path} (its content has changed: another checksum)"]
    return []
