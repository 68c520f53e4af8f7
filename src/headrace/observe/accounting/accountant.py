"""Gives every second of a device one cause, from the events of a job or a server. Pure: it reads no clock."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from headrace.batching.policy.cost_line import CostLine
from headrace.events import (
    BatchDone,
    BatchFormed,
    BatchSplit,
    DeviceUsed,
    Event,
    HostStage,
    JobDone,
    JobStarted,
    ModelLoaded,
    PipelineWaited,
    RecordFailed,
    RequestDone,
    StageDone,
    StepDone,
    WorkerLost,
    WorkUnitDone,
)
from headrace.observe.accounting.histogram import Buckets, Histogram
from headrace.observe.accounting.timeline import CAUSES, Cause, DeviceTimeline, Shares, TimeBins

T = TypeVar("T")

# What outranks what, at one moment: see `timeline.Cause`.
_REQUEST, _READ, _PREPARE, _WAITING, _COMPANY, _LOADING, _COMPUTING, _STARTING = range(1, 9)
_KEPT = 300
"""The first and the last batches, and chunks of each stage, that are kept one by one."""
_RECENT = 64
"""Chunks of the sink that may explain why a job waited for it."""
_IDLE_OF_THE_END: frozenset[Cause] = frozenset({"other", "finish", "write", "memory"})

_HISTOGRAMS = ("size", "cost", "duration", "waited", "request")
_HANDLED: Shares = (("other", 1.0),)

BatchBox: TypeAlias = tuple[float, float, int, float, float, int, str]
"""Start and duration in seconds, records, cost, padded cost, failed records, close reason."""
StageBox: TypeAlias = tuple[HostStage, float, float, int]
"""Stage, start and duration in seconds, records."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where the time of a device went, up to a moment. Times are in seconds since the beginning."""

    wall_s: float
    causes: Mapping[Cause, float]
    """Seconds of each cause; they add up to `wall_s`."""
    bin_s: float
    """Width of a bin."""
    bins: Mapping[str, list[float]]
    """Sums of each bin: seconds by cause; "stage ..." (seconds of work of a stage), "records", "failed", "cost",
    "requests"; the most bytes held, as "max memory"."""
    histograms: Mapping[str, Buckets]
    """The distributions of the batches' "size", "cost", "duration" (seconds) and "waited" (seconds that the oldest
    record waited), and of the time of a server's requests: "request" (seconds)."""
    batches: tuple[BatchBox, ...]
    """The first and the last ones."""
    chunks: tuple[StageBox, ...]
    """The first and the last ones of the host stages."""
    fixed_s: float | None = None
    """What a batch takes beside what grows with its cost, in seconds; None if batches are too few or too equal."""
    fill_s: float = 0.0
    """From the start of the job to its first batch."""


NO_ACCOUNT = Account(0.0, {}, 0.0, {}, {}, (), ())
"""Nothing has been heard."""


class _Ends(Generic[T]):
    """The first entries and the last ones of a sequence of any length."""

    def __init__(self) -> None:
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=_KEPT)

    def add(self, entry: T) -> None:
        if len(self._first) < _KEPT:
            self._first.append(entry)
        else:
            self._last.append(entry)

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        yield from self._last


class Accountant:
    """Sorts the time of one device into causes.

    Where several batches run at the same time, a moment counts once. A moment at which no batch runs has the cause that
    is closest to the device: the batcher's own delay, then the sink or a retry, then preparing, then reading.

    A server has further causes: "idle" is a moment without a request, and "other" one at which a request is there and
    no batch runs, such as while it is parsed or answered.

    Args:
        began: when the time begins, on the events' clock: before the model is loaded.
        server: whether the events are those of a server.
    """

    def __init__(self, began: float, *, server: bool = False) -> None:
        self._bins = TimeBins(began)
        self._timeline = DeviceTimeline(began, self._bins, "idle" if server else "other")
        self._server = server
        self._requests: list[tuple[float, float]] = []
        """Spans with at least one request, not yet added to the bins."""
        self._requested = 0
        """How many requests these spans hold."""
        self._began = began
        self._started: float | None = None
        self._fill_s = 0.0
        self._busy_until: float | None = None
        self._formed: dict[tuple[int, int], BatchFormed] = {}
        self._wasted: defaultdict[int, float] = defaultdict(float)
        """Seconds of failed calls of running batches."""
        self._sink: deque[StageDone] = deque(maxlen=_RECENT)
        self._device_s: float | None = None
        """What the device itself computed, reported at the end."""
        self._heard: dict[str, float] = {}
        """When each worker last returned work."""
        self._dead: dict[str, float] = {}
        """When workers died that have not been replaced yet."""
        self._histograms = {name: Histogram() for name in _HISTOGRAMS}
        self._line = CostLine()
        self._batches: _Ends[BatchBox] = _Ends()
        self._chunks: defaultdict[str, _Ends[StageBox]] = defaultdict(_Ends)
        self._takers: dict[type, Callable[..., None]] = {
            BatchFormed: self._form,
            BatchSplit: self._split,
            BatchDone: self._batch,
            StepDone: self._step,
            StageDone: self._stage,
            PipelineWaited: self._wait,
            JobStarted: self._start,
            JobDone: self._end,
            ModelLoaded: self._loaded,
            WorkUnitDone: self._worker,
            WorkerLost: self._worker,
            DeviceUsed: self._used,
        }

    def add(self, events: Iterable[Event]) -> None:
        """Take in events. Many together cost a fraction of what each would cost alone."""
        extend, takers = self._timeline.extend, self._takers
        for event in events:
            if isinstance(event, RequestDone):
                self._request(event)
            elif not isinstance(event, RecordFailed):
                if (take := takers.get(type(event))) is not None:
                    take(event)
                extend(event.at)
        if self._requests:
            self._paint_requests()

    def memory(self, at: float, held: int) -> None:
        """Note how many bytes the process holds."""
        self._bins.highest("max memory", at, held)

    def account(self, now: float) -> Account:
        """Where the time went up to `now`. Batches that run count as far as they have come."""
        timeline = self._timeline.copy()
        for formed in self._formed.values():
            timeline.paint(formed.at, now, _COMPUTING, (("real", 1.0),))
        timeline.extend(now)
        bins = timeline.settled()
        if self._device_s is not None:
            bins.reduce(("real", "padding"), self._device_s, "copy")
        return Account(
            timeline.end - self._began,
            {cause: sum(bins.sums.get(cause, ())) for cause in CAUSES},
            bins.width_s,
            {name: bins.sums[name] for name in (*CAUSES, *sorted(bins.sums.keys() - set(CAUSES))) if name in bins.sums},
            {name: one.buckets() for name, one in self._histograms.items() if one or name != "request"},
            tuple(self._batches),
            tuple(itertools.chain(*self._chunks.values())),
            self._line.fixed_s(),
            self._fill_s,
        )

    def _form(self, event: BatchFormed) -> None:
        self._formed[event.batch, event.size] = event
        if self._server:  # records were waiting, whose requests are not done yet
            self._timeline.paint(event.at - min(event.starved_s, event.waited_s), event.at, _REQUEST, _HANDLED)
        if event.company_s:
            self._timeline.paint(event.at - event.company_s, event.at, _COMPANY, (("company", 1.0),))

    def _split(self, event: BatchSplit) -> None:
        self._wasted[event.batch] += event.duration_s

    def _used(self, event: DeviceUsed) -> None:
        self._device_s = event.computed_s

    def _batch(self, event: BatchDone) -> None:
        formed = self._formed.pop((event.batch, event.size), None)
        wasted = self._wasted.pop(event.batch, 0.0)
        if event.stopped >= event.size:  # it did not run
            return
        self._compute(event.at, event.duration_s, _shares(event, wasted))
        done = event.size - event.failed
        self._count(event, done, event.failed - event.stopped, event.cost * done / event.size)
        computed = event.padded_cost or event.cost
        self._record(event.size, computed, event.duration_s)
        if formed is not None:
            self._histograms["waited"].add(formed.waited_s)
        if not wasted and not event.failed:
            self._line.add(computed, event.duration_s)
        reason = formed.reason if formed is not None else ""
        start = max(event.at - event.duration_s - self._began, 0.0)
        self._batches.add(
            (start, event.duration_s, event.size, event.cost, event.padded_cost, event.failed, str(reason))
        )

    def _step(self, event: StepDone) -> None:
        failed = event.size > 0 and event.failed == event.size
        wasted = self._wasted.pop(event.step, 0.0) > 0
        lock = _lock(event)
        self._compute(
            event.at, event.duration_s, (("retry" if failed or wasted else "real", 1.0 - lock), ("lock", lock))
        )
        self._count(event, event.finished - event.failed, event.failed, event.cost)
        self._record(event.size, event.size, event.duration_s)
        self._line.add(event.size, event.duration_s)
        start = max(event.at - event.duration_s - self._began, 0.0)
        self._batches.add((start, event.duration_s, event.size, event.cost, event.cost, event.failed, "step"))

    def _compute(self, at: float, duration_s: float, shares: Shares) -> None:
        self._timeline.paint(at - duration_s, at, _COMPUTING, shares)
        if self._busy_until is None and self._started is not None:
            self._fill_s = max(at - duration_s - self._started, 0.0)
        self._busy_until = at if self._busy_until is None else max(self._busy_until, at)

    def _count(self, event: BatchDone | StepDone, done: int, failed: int, cost: float) -> None:
        """Count what a batch has finished, evenly over its time."""
        start, end = max(event.at - event.duration_s, self._began), max(event.at, self._began)
        self._bins.spread("records", start, end, done)
        self._bins.spread("cost", start, end, cost)
        if failed:
            self._bins.spread("failed", start, end, failed)

    def _record(self, size: int, cost: float, duration_s: float) -> None:
        for name, value in (("size", size), ("cost", cost), ("duration", duration_s)):
            self._histograms[name].add(value)

    def _stage(self, event: StageDone) -> None:
        start = max(event.at - event.duration_s, self._began)
        self._bins.spread(f"stage {event.stage}", start, max(event.at, start), max(event.at - start, 0.0))
        self._chunks[event.stage].add((event.stage, start - self._began, event.duration_s, event.records))
        if event.stage == "load":
            self._timeline.paint(start, event.at, _READ, (("read", 1.0),))
        elif event.stage == "prepare":
            self._timeline.paint(start, event.at, _PREPARE, (("prepare", 1.0),))
        else:
            self._sink.append(event)

    def _wait(self, event: PipelineWaited) -> None:
        start = event.at - event.duration_s
        shares = self._sink_shares(start, event.at) if event.on == "sink" else ((event.on, 1.0),)
        self._timeline.paint(start, event.at, _WAITING, shares)

    def _sink_shares(self, start: float, end: float) -> Shares:
        """Whether finishing or writing kept the sink from taking more."""
        spent = {"finish": 0.0, "write": 0.0}
        for chunk in self._sink:
            spent[chunk.stage] += max(min(chunk.at, end) - max(chunk.at - chunk.duration_s, start), 0.0)
        both = spent["finish"] + spent["write"]
        finish = spent["finish"] / both if both > 0 else 0.0
        return ("finish", finish), ("write", 1.0 - finish)

    def _worker(self, event: WorkUnitDone | WorkerLost) -> None:
        """What a dead worker had begun is lost, and so is the time until its successor returns something.

        While another worker computes, that counts.
        """
        if isinstance(event, WorkerLost):
            since = self._dead.setdefault(event.worker, self._heard.get(event.worker, self._started or self._began))
        else:
            self._heard[event.worker] = event.at
            since = self._dead.pop(event.worker, event.at)
        self._timeline.paint(since, event.at, _WAITING, (("lost", 1.0),))

    def _request(self, event: RequestDone) -> None:
        self._requested += 1
        self._histograms["request"].add(event.duration_s)
        start, end = event.at - event.duration_s, event.at
        spans = self._requests
        if spans and start <= spans[-1][1]:  # under load, many become one
            spans[-1] = (min(start, spans[-1][0]), max(end, spans[-1][1]))
        else:
            spans.append((start, end))

    def _paint_requests(self) -> None:
        for start, end in self._requests:
            self._timeline.paint(start, end, _REQUEST, _HANDLED)
            self._timeline.extend(end)
        first, last = max(self._requests[0][1], self._began), max(self._requests[-1][1], self._began)
        self._bins.spread("requests", first, max(last, first), self._requested)
        self._requests.clear()
        self._requested = 0

    def _loaded(self, event: ModelLoaded) -> None:
        self._timeline.paint(event.at - event.duration_s, event.at, _LOADING, (("starting", 1.0),))

    def _start(self, event: JobStarted) -> None:
        if self._started is None:
            self._started = event.at
            self._timeline.paint(self._began, event.at, _STARTING, (("starting", 1.0),))

    def _end(self, event: JobDone) -> None:
        self._formed.clear()
        self._timeline.extend(event.at)
        if self._busy_until is not None:
            self._timeline.replace(self._busy_until, _IDLE_OF_THE_END, "draining")


def _shares(event: BatchDone, wasted_s: float) -> Shares:
    """What the time of a batch went into: failed calls and failed records, padding, and records."""
    lost = min(wasted_s / event.duration_s, 1.0) if event.duration_s > 0 else 0.0
    lost += (1 - lost) * max(event.failed - event.stopped, 0) / event.size
    padded = max(1 - event.cost / event.padded_cost, 0.0) if event.padded_cost > 0 else 0.0
    lock = _lock(event)
    useful = (1 - lock) * (1 - lost)
    return ("real", useful * (1 - padded)), ("padding", useful * padded), ("retry", (1 - lock) * lost), ("lock", lock)


def _lock(event: BatchDone | StepDone) -> float:
    """The fraction of its time that passed between threads."""
    return min(event.handed_s / event.duration_s, 1.0) if event.duration_s > 0 else 0.0
