"""Records on disk which batch is in the engine, to name it after a crash or kill."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from headrace.io.storage.locations import is_remote
from headrace.jobs.state.output import JobOutput
from headrace.wording import spelled

logger = logging.getLogger("headrace")

_BYTES = 64

Extent: TypeAlias = tuple[int, int, int]
"""How many records a batch has, and their first and last position."""


def extent_of(positions: Sequence[int]) -> Extent:
    """The extent of a batch with records of these positions, in any order."""
    return len(positions), min(positions), max(positions)


class InFlightFile:
    """A file with the number of records in the engine and their first and last position; empty if there are none.

    Batches may enter and leave on several threads.

    It is written in place without a sync, because it must survive the process, not the machine. Nothing is noted where
    it cannot be written, such as in an object store.
    """

    def __init__(self, work: Path) -> None:
        self._path = None if is_remote(work) else work / "in-flight"
        self._file: int | None = None
        self._inside: list[Extent] = []
        self._lock = threading.Lock()

    def left_behind(self) -> str:
        """The batch in the engine when an earlier run crashed; empty if none did."""
        try:
            count, first, last = map(int, self._path.read_text(encoding="ascii").split()) if self._path else (0, 0, 0)
        except (OSError, ValueError):
            return ""
        return f"{count:,} records (positions {first:,} to {last:,})" if count else ""

    def enter(self, batch: Extent) -> None:
        """Note a batch that enters the engine."""
        with self._lock:
            self._inside.append(batch)
            self._note()

    def leave(self, batch: Extent) -> None:
        """Note that the batch has left the engine."""
        with self._lock:
            self._inside.remove(batch)
            self._note()

    def close(self) -> None:
        """Remove the file when a run ends normally."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.forget()

    def forget(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _note(self) -> None:
        if self._path is None:
            return
        text = ""
        if self._inside:
            counts, firsts, lasts = zip(*self._inside, strict=True)
            text = f"{sum(counts)} {min(firsts)} {max(lasts)}"
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.pwrite(self._file, text.ljust(_BYTES).encode(), 0)


def warn_of_crash(output: JobOutput, *, overwrite: bool) -> None:
    """Log a warning if the last run crashed or was killed in the engine; not with `overwrite`.

    Raises:
        OutputLockedError: the last run has not ended.
    """
    in_flight = InFlightFile(output.work)
    if not in_flight.left_behind():
        return
    with output.locked():
        if (left := in_flight.left_behind()) and not overwrite:
            logger.warning(
                "headrace: the last run was killed or crashed while the engine had %s. If the engine crashes, "
                + spelled("``engine_process=True`` turns the record that causes it into a dead letter"),
                left,
            )
        in_flight.forget()
