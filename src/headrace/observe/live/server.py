"""What the device of a server did: the same account as a job's, from the events of a server."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.device.process_memory import process_bytes
from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, Listener, RequestDone, StepDone
from headrace.observe.accounting.timeline import CAUSES, COMPUTING, Cause
from headrace.observe.live.frame import Totals, wall_clock
from headrace.observe.reporting import summary
from headrace.observe.reporting.report import ReportBuilder
from headrace.observe.reporting.summary import RunSummary
from headrace.wording import spelled

_PERIOD_S = 3600.0
_SAMPLE_S = 5.0
_MUCH = 0.1


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is, for its report; known once its model is loaded."""

    settings: Mapping[str, str]
    versions: Mapping[str, str]
    counts_tokens: bool = False
    """Whether cost is in tokens."""


class _Period:
    def __init__(self, began: float) -> None:
        self.began = began
        self.started_at = wall_clock()
        self.builder = ReportBuilder(began, server=True)
        self.requests = 0
        self.errors: Counter[str] = Counter()

    def summary(self, now: float, facts: ServerFacts) -> RunSummary:
        report = self.builder.build(now)
        account = report.account
        records, failed = (round(sum(account.bins.get(name, ()))) for name in ("records", "failed"))
        advice = server_advice(account.causes)
        report = replace(
            report,
            ok=records,
            failed=failed,
            failures=dict(self.errors.most_common()),
            wall_s=account.wall_s,
            tokens=round(sum(account.bins.get("cost", ()))) if facts.counts_tokens else 0,
            advice=advice,
            advices=(),
        )
        return summary.summarize(report, "running", self.started_at, facts.settings, facts.versions)

    def totals(self, now: float, facts: ServerFacts) -> Totals:
        report = self.builder.build(now)
        account = report.account
        counts = {
            "requests": self.requests,
            "records": sum(account.bins.get("records", ())),
            "failed": sum(account.bins.get("failed", ())),
            "batches": report.batches,
        }
        if facts.counts_tokens:
            counts["tokens"] = sum(account.bins.get("cost", ()))
        return Totals(now, account.causes, {"prepare": report.times.prepare}, counts)


class ServerAccount:
    """A thread-safe event listener that accounts for the time of a server's device.

    Memory is bounded: the details are those of this hour and the last one; older time is kept in sums.

    Args:
        began: when the time begins, on the events' clock.
    """

    def __init__(self, name: str, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.began = began
        self._clock = clock
        self._lock = threading.Lock()
        self._period = _Period(began)
        self._last_hour: deque[RunSummary] = deque(maxlen=1)
        self._ended = Totals(began, {}, {}, {})
        """The sums of all earlier hours."""
        self._ended_errors: Counter[str] = Counter()
        """The errors of all earlier hours, by name."""
        self._sampled = began
        self._highest: dict[Cause, float] = {}
        self.facts = ServerFacts({}, {})

    def __call__(self, event: Event) -> None:
        period = self._period
        if isinstance(event, RequestDone):
            if event.method != "POST":  # a look at the state takes nothing of the device
                return
            period.requests += 1
            if event.status >= 400:
                period.errors[f"{event.status} on {event.route}"] += 1
        period.builder(event)
        now = getattr(event, "at", self._sampled)
        if now - self._sampled >= _SAMPLE_S:
            self._sample(now)

    def _sample(self, now: float) -> None:
        with self._lock:
            self._sampled = now
            if (held := process_bytes()) is not None:
                self._period.builder.note_memory(now, held)
            if now - self._period.began >= _PERIOD_S:
                ended, self._period = self._period, _Period(now)
                self._last_hour.append(ended.summary(now, self.facts))
                self._ended = _sum(self._ended, ended.totals(now, self.facts))
                self._ended_errors += ended.errors

    def runs(self) -> list[RunSummary]:
        """This hour, after the last one; each as a run."""
        with self._lock:
            return [*self._last_hour, self._period.summary(self._clock(), self.facts)]

    def totals(self) -> Totals:
        """Sums since the beginning."""
        with self._lock:
            return _sum(self._ended, self._period.totals(self._clock(), self.facts))

    def errors(self) -> dict[str, int]:
        """Requests that failed since the beginning, by status and route, the most frequent first."""
        with self._lock:
            return dict((self._ended_errors + self._period.errors).most_common())

    def seconds_by_cause(self) -> dict[Cause, float]:
        """Seconds of the device by cause since the beginning. None of them ever falls, as a counter must not."""
        causes = self.totals().causes
        with self._lock:
            self._highest = {cause: max(causes.get(cause, 0.0), self._highest.get(cause, 0.0)) for cause in CAUSES}
            return dict(self._highest)


def numbered(listener: Listener, number: int, of: int) -> Listener:
    """The listener for one model of several, whose batches each count from 0."""

    def listen(event: Event) -> None:
        if isinstance(event, RequestDone):  # reported by the server of all models
            return
        if isinstance(event, BatchFormed | BatchDone | BatchSplit):
            event = replace(event, batch=event.batch * of + number)
        elif isinstance(event, StepDone):
            event = replace(event, step=event.step * of + number)
        listener(event)

    return listen


def _sum(before: Totals, after: Totals) -> Totals:
    return Totals(
        after.at,
        {cause: before.causes.get(cause, 0.0) + after.causes.get(cause, 0.0) for cause in CAUSES},
        {stage: before.stages.get(stage, 0.0) + seconds for stage, seconds in after.stages.items()},
        {name: before.counts.get(name, 0.0) + count for name, count in after.counts.items()},
    )


def server_advice(causes: Mapping[Cause, float]) -> str:
    """What the time of a server's device went into, and the one setting that would change it."""
    whole = sum(causes.values()) - causes.get("starting", 0.0)
    if whole <= 0:
        return "The server has taken no request yet."
    share = {cause: seconds / whole for cause, seconds in causes.items()}
    busy = sum(share.get(cause, 0.0) for cause in COMPUTING)
    first = f"The device was busy {busy:.0%} of the time"
    rules: tuple[tuple[Cause, str], ...] = (
        ("padding", "{:.0%} went into padding: fewer records a batch, a smaller ``batch_tokens``"),
        ("retry", "{:.0%} went into batches that failed: read the server's log"),
        ("company", "{:.0%} it waited for more records to join a batch: a smaller ``batch_timeout_s``"),
        ("prepare", "{:.0%} it waited for texts or images to be prepared: more cores, or a second server"),
        ("other", "{:.0%} it waited for requests to be read and answered: fewer, larger requests, or a second server"),
    )
    lost, text = max((share.get(cause, 0.0), text) for cause, text in rules)
    idle = share.get("idle", 0.0)
    if lost >= max(_MUCH, idle / 4):
        return f"{first}; {spelled(text.format(lost), 'flags')}."
    if idle >= _MUCH:
        return f"{first}, and for {idle:.0%} there was no request: it has room for more."
    return f"{first}: only a faster device, a lower precision or another replica makes it faster."
