"""The listener that makes a job's report from its events."""

from __future__ import annotations

import threading
from dataclasses import replace

from headrace.events import BatchSplit, Event, RecordFailed
from headrace.observe.accounting.accountant import Accountant
from headrace.observe.reporting.advice import advices, advise
from headrace.observe.reporting.event_sums import Sums
from headrace.observe.reporting.figure import fill
from headrace.observe.reporting.run_facts import RunFacts
from headrace.observe.reporting.run_figures import Report as Report
from headrace.observe.reporting.run_figures import StepFigures as StepFigures

_TOGETHER = 128
"""Events that are taken in together: many cost a fraction of what each would cost alone."""


class ReportBuilder:
    """A thread-safe event listener that aggregates a report.

    Args:
        began: when the time begins, on the events' clock; None for the first event.
        server: whether the events are those of a server.
    """

    def __init__(self, began: float | None = None, host: RunFacts | None = None, *, server: bool = False) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._accountant = None if began is None else Accountant(began, server=server)
        self._sums = Sums(host or RunFacts())

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) >= _TOGETHER or isinstance(event, BatchSplit):  # which holds an error, and its frames
                self._take_all()

    def _take_all(self) -> None:
        """Take in the events that wait. The caller holds the lock."""
        events, self._waiting = self._waiting, []
        if self._accountant is None:
            timed = (event.at for event in events if not isinstance(event, RecordFailed))
            self._accountant = next(map(Accountant, timed), None)
        self._sums.add(events)
        if self._accountant is not None:
            self._accountant.add(events)

    def build(self, now: float | None = None) -> Report:
        """The report of all events so far, at the moment `now`; None for that of the last event."""
        with self._lock:
            self._take_all()
            now = self._sums.last if now is None else now
            self._sums.account = (self._accountant or Accountant(now)).account(now)
            figures = fill(Report, self._sums)
        return replace(figures, advice=advise(figures), advices=tuple(advices(figures)))

    def note_memory(self, now: float, held: int) -> None:
        """Note how many bytes the process holds."""
        with self._lock:
            self._take_all()
            if self._accountant is not None:
                self._accountant.memory(now, held)
