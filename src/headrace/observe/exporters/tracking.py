"""Event listeners that send a job's settings, live figures and report page to an experiment tracker."""

from __future__ import annotations

import abc
import logging
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from headrace.device.process_memory import process_bytes
from headrace.errors import ConfigError, MissingExtraError, text_of
from headrace.events import Event, JobDone, ModelLoaded, RunDescribed
from headrace.observe.accounting.timeline import busy_share
from headrace.observe.live.frame import Frame, Window, wall_clock
from headrace.observe.live.job import job_frame
from headrace.observe.page.render import ReportedJob, write_page
from headrace.observe.reporting import summary
from headrace.observe.reporting.report import ReportBuilder

logger = logging.getLogger("headrace")

BEGIN_S = 30.0
"""How long after the start of a job its end waits for a tracker that has not answered yet."""
_END_S = 60.0
"""How long the end of a job waits for a tracker that has answered to take the last figures and the page."""
_FOREIGN = re.compile(r"[^\w ./:-]", re.ASCII)
_LONGEST = 200

Ended: TypeAlias = Literal["finished", "interrupted", "failed"]


class Tracker(abc.ABC):
    """A run of an experiment tracker. One thread calls all methods; they may block and raise."""

    @abc.abstractmethod
    def begin(self, name: str, settings: dict[str, str]) -> None:
        """Start the run."""

    @abc.abstractmethod
    def log(self, metrics: dict[str, float], seconds: int) -> None:
        """Add figures of the moment `seconds` after the job's start."""

    @abc.abstractmethod
    def add_file(self, path: Path) -> None:
        """Keep a file."""

    @abc.abstractmethod
    def end(self, state: Ended) -> None:
        """End the run."""


class TrackingListener:
    """An event listener for jobs that reports to an experiment tracker; one object serves any number of jobs in turn.

    It works on its own thread. A tracker that does not answer, or fails, costs one warning and never the job.

    Args:
        every_s: seconds between two sets of figures, > 0.

    Raises:
        ConfigError: `every_s` is not a number above 0.
    """

    def __init__(self, make: Callable[[], Tracker], every_s: float = 10.0) -> None:
        if not 0 < every_s < math.inf:
            raise ConfigError(f"every_s is {every_s!r}; it must be a number of seconds above 0")
        self._make = make
        self._every_s = every_s
        self._job: _TrackedJob | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunDescribed):
            self._job = _TrackedJob(self._make(), event, self._every_s)
        elif isinstance(event, ModelLoaded) and self._job is None:
            raise ConfigError("experiment trackers are for jobs; a server has /metrics and OpenTelemetry")
        elif self._job is not None:
            self._job.builder(event)
            if isinstance(event, JobDone):
                job, self._job = self._job, None
                job.end(event.state)


class _TrackedJob:
    def __init__(self, tracker: Tracker, described: RunDescribed, every_s: float) -> None:
        self.builder = ReportBuilder(described.at)
        self._tracker = tracker
        self._described = described
        self._every_s = every_s
        self._started_at = wall_clock()
        self._window = Window()
        self._state: Ended | None = None
        self._begun = False
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-tracker", daemon=True)
        self._thread.start()

    def end(self, state: Ended) -> None:
        """Report the end; waits for that, within limits."""
        self._state = state
        self._over.set()
        self._thread.join(max(self._began + BEGIN_S - time.monotonic(), 0.1))
        if self._begun:
            self._thread.join(_END_S)
        if self._thread.is_alive():
            logger.warning("headrace: %s does not answer; it lacks the end of this job", type(self._tracker).__name__)

    def _run(self) -> None:
        try:
            self._tracker.begin(self._described.name, _parameters(self._described))
            self._begun = True
            while not self._over.wait(self._every_s):
                self._log()
            self._log()
            self._add_page()
            self._tracker.end(self._state or "interrupted")
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything
            logger.warning(
                "headrace: %s failed, and the job is not tracked further: %s: %s",
                type(self._tracker).__name__, type(error).__name__, " ".join(text_of(error).split())[:_LONGEST],
            )  # fmt: skip

    def _log(self) -> None:
        now = time.monotonic()
        report = self.builder.build(now)
        frame = job_frame(self._described.name, self._state or "running", report, self._window, now)
        self._tracker.log(dict(_metrics(frame)), round(frame.up_s))

    def _add_page(self) -> None:
        report, described = self.builder.build(time.monotonic()), self._described
        state = self._state or "interrupted"
        run = summary.summarize(report.spoken(), state, self._started_at, described.settings, described.versions)
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            page = Path(folder, "report.html")
            try:
                write_page(page, [ReportedJob(described.name, state, [run])])
            except MissingExtraError as error:
                logger.warning("headrace: the tracker gets no report page: %s", error)
            else:
                self._tracker.add_file(page)


def key(text: str) -> str:
    """A name that every tracker accepts."""
    return _FOREIGN.sub("_", text)[:_LONGEST].strip(" /.") or "_"


def _parameters(described: RunDescribed) -> dict[str, str]:
    versions = {f"version of {name}": version for name, version in described.versions.items()}
    return {key(name): value for name, value in {**described.settings, **versions}.items()}


def _metrics(frame: Frame) -> Iterator[tuple[str, float]]:
    """The figures of a frame by name: rates, shares of the device's time, sums, queues, errors and memory."""
    now = frame.causes if frame.state.startswith("running") else None
    causes = now or frame.causes_of_all  # at the end, those of the whole run
    for group, figures in (
        ("rate", {f"{name}_per_s": value for name, value in frame.rates.items()}),
        ("device", causes),
        ("total", frame.counts),
        ("threads", frame.lanes),
        ("waiting", frame.queue),
        ("errors", frame.errors),
    ):
        for name, value in figures.items():
            yield key(f"{group}/{name.replace(' ', '_')}"), float(value)
    yield "device/busy", busy_share(causes)
    if (held := process_bytes()) is not None:
        yield "memory/process_bytes", float(held)
