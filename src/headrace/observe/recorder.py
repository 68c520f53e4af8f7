"""Writes the summary of a run at intervals, so that a report can be made while it runs and after a kill."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from headrace.device.process_memory import process_bytes
from headrace.errors import ConfigError
from headrace.events import Event, JobDone, JobStarted
from headrace.io.storage.locations import is_remote
from headrace.observe import summary
from headrace.observe.report import ReportBuilder
from headrace.observe.summary import RunState, RunSummary

logger = logging.getLogger("headrace")

_SAMPLE_S = 1.0
_EVERY_S = 5.0
_EVERY_REMOTE_S = 30.0
_WORTH = 200
"""Times as long as a write takes, until the next one: 0.5 % of the time at most."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a run is, for its report."""

    settings: Mapping[str, str]
    versions: Mapping[str, str]


class Recorder:
    """An event listener that keeps a run's summary on disk. A summary that cannot be written does not end the job.

    It must hear each event after `builder` has. A run that finds nothing to do leaves the file as it is.

    Args:
        builder: makes the figures.
        path: of the file.
        description: what the run is.
        clock: of the events.
    """

    def __init__(
        self,
        builder: ReportBuilder,
        path: Path,
        description: Description,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._builder = builder
        self._path = path
        self._description = description
        self._clock = clock
        self._started_at = datetime.now(UTC).timestamp()
        self._earlier: list[str] = []
        self._written = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobStarted) and self._thread is None:
            self._earlier = _earlier(self._path)
            self._thread = threading.Thread(target=self._run, name="headrace-recorder", daemon=True)
            self._thread.start()
        elif isinstance(event, JobDone):
            self._end(event.state)

    def _run(self) -> None:
        """Sample the memory, and write now and then. Runs on the thread."""
        every_s = _EVERY_REMOTE_S if is_remote(self._path) else _EVERY_S
        due = self._clock()  # a run that is killed early has a report too
        while not self._over.wait(_SAMPLE_S):
            now = self._clock()
            if (held := process_bytes()) is not None:
                self._builder.note_memory(now, held)
            if now >= due:
                self._write("running", now)
                ended = self._clock()
                due = ended + max(every_s, _WORTH * (ended - now))

    def _end(self, state: str) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        report = self._builder.build()
        if self._written or report.batches or report.ok or report.failed:
            self._write(cast("RunState", state), self._clock())

    def _write(self, state: RunState, now: float) -> None:
        report, account = self._builder.snapshot(now)
        figures, described = summary.figures_of(report), self._description
        run = RunSummary(self._started_at, state, figures, account, described.settings, described.versions)
        try:
            summary.write(self._path, [*self._earlier, run.as_json()])
            self._written = True
        except OSError as error:
            if state != "running":  # the next write may succeed, and this one may have met the clearing of the folder
                logger.warning("headrace: cannot write the report to %s: %s", self._path, error)


def _earlier(path: Path) -> list[str]:
    """The earlier runs in the file, each as JSON text; none if it cannot be read, for it is replaced."""
    try:
        return [run.as_json() for run in summary.read(path)]
    except ConfigError:
        return []
