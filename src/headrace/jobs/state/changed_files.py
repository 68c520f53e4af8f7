"""Which files of a finished job have changed since."""

from __future__ import annotations

from pathlib import Path

from headrace.io.sinks.targets import Target
from headrace.io.storage.checksums import digest_of
from headrace.io.storage.locations import exists
from headrace.io.storage.parts import PartFolder
from headrace.jobs.state.passes import Finished


def changes(target: Target, parts: PartFolder, finished: Finished, *, read: bool) -> list[str]:
    """The files of a finished job that have changed since, each with the reason.

    Args:
        read: compare the content too, not only sizes.
    """
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
    """How a file has changed, if that is known: at most one line."""
    if not exists(path):
        return [f"{path} (it is missing)"]
    if size is not None and (found := path.stat().st_size) != size:
        return [f"{path} ({found:,} bytes; {size:,} when the job ended)"]
    if digest and digest_of(path) != digest:
        return [f"{path} (its content has changed: another checksum)"]
    return []
