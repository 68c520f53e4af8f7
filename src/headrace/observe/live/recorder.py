"""Writes the state of a run each second and its summary at intervals, for a look at it meanwhile or after a kill."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from headrace.device.process_memory import process_bytes
from headrace.errors import ConfigError
from headrace.events import Event, JobDone, JobStarted, RunDescribed
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.locations import is_remote
from headrace.observe.live.frame import Frame, Window, wall_clock
from headrace.observe.live.job import job_frame
from headrace.observe.reporting import summary
from headrace.observe.reporting.report import Report, ReportBuilder
from headrace.observe.reporting.summary import RunState

logger = logging.getLogger("headrace")

_SAMPLE_S = 1.0
"""Also the time between two frames."""
_EVERY_S = 5.0
_EVERY_REMOTE_S = 30.0
_WORTH = 200
"""Times as long as a write takes, until the next one: 0.5 % of the time at most."""


class Recorder:
    """An event listener that keeps a run's summary and its present state on disk, or in memory for a dashboard.

    A file that cannot be written does not end the job. It must receive each event after `builder`. A run that finds
    nothing to do leaves the files as they are.
    """

    def __init__(
        self,
        builder: ReportBuilder,
        path: Path,
        live: Path,
        described: RunDescribed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._builder = builder
        self._path = path
        self._live = live
        self._window = Window()
        self.frame: Frame | None = None
        """The newest state; None before the first."""
        self._described = described
        self._clock = clock
        self._started_at = wall_clock()
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
        remote = is_remote(self._path)
        every_s = _EVERY_REMOTE_S if remote else _EVERY_S
        frame_every_s = _EVERY_REMOTE_S if remote else _SAMPLE_S
        due = frame_due = self._clock()  # a run that is killed early has a report too
        while not self._over.wait(_SAMPLE_S):
            now = self._clock()
            if (held := process_bytes()) is not None:
                self._builder.note_memory(now, held)
            if now >= frame_due:
                self._show("running", now, self._builder.build(now))
                ended = self._clock()
                frame_due = ended + max(frame_every_s - _SAMPLE_S / 2, _WORTH * (ended - now))
            now = self._clock()
            if now >= due:
                self._write("running", self._builder.build(now))
                ended = self._clock()
                due = ended + max(every_s, _WORTH * (ended - now))

    def _end(self, state: str) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        now = self._clock()
        report = self._builder.build(now)
        if self._written or report.batches or report.ok or report.failed:
            self._write(cast("RunState", state), report)
            self._show(state, now, report)

    def _show(self, state: str, now: float, report: Report) -> None:
        self.frame = job_frame(self._described.name, state, report, self._window, now)
        try:
            with atomic_file(self._live, durable=False) as file:
                file.write(self.frame.as_json().encode())
        except OSError as error:
            logger.debug("headrace: cannot write %s: %s", self._live, error)

    def _write(self, state: RunState, report: Report) -> None:
        described = self._described
        run = summary.summarize(report, state, self._started_at, described.settings, described.versions)
        try:
            summary.write(self._path, [*self._earlier, run.as_json()])
            self._written = True
        except OSError as error:
            if state != "running":  # the next write may succeed, and this one may have met the clearing of the folder
                logger.warning("headrace: cannot write the report to %s: %s", self._path, error)


def _earlier(path: Path) -> list[str]:
    """The earlier runs in the file, each as JSON text; none if it cannot be read, for it is replaced."""
    try:
        return [run.as_json() for run in summary.kept(summary.read(path))]
    except ConfigError:
        return []
