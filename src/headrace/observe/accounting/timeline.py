"""What a device did at each moment: one cause, in bounded memory. Pure: callers pass the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from headrace.events import HostStage

Cause: TypeAlias = Literal[
    "real",
    "padding",
    "copy",
    "retry",
    "lock",
    "lost",
    "starting",
    "read",
    "prepare",
    "company",
    "finish",
    "write",
    "memory",
    "draining",
    "idle",
    "other",
]
"""What a moment of a device went into; `CAUSE_FACTS` says what each means."""


class CauseFacts(NamedTuple):
    """What is said of a cause."""

    label: str
    colour: str
    """In a terminal and a notebook; pages have those of report.css."""
    meaning: str
    """For the docs, as the next one."""
    what_to_do: str = ""


CAUSE_FACTS: Mapping[Cause, CauseFacts] = {
    "real": CauseFacts(
        "computing records", "#1f8a5b", "real work", "a faster device, a lower precision, a smaller model"
    ),
    "padding": CauseFacts(
        "computing padding",
        "#8fcf9f",
        "the share of a batch that is padding",
        "let more records wait, so that lengths match better",
    ),
    "copy": CauseFacts(
        "copies and launches",
        "#5fb0a6",
        "a batch is in the engine, and its device does not compute: data is on its way to or from "
        "it, or work is being launched; known at the end of a run, for Headrace's encoders",
        "larger batches; on a GPU, a faster host",
    ),
    "retry": CauseFacts(
        "retries and failures",
        "#c2362f",
        "calls that failed, the share of failed records in a batch, and waiting for the next try of a record",
        "read the errors file; smaller batches if memory ran out",
    ),
    "lock": CauseFacts(
        "Python's lock",
        "#6f4e37",
        "a batch on its way to the engine's thread, or its results on their way back, "
        "waits for Python's lock or a core",
        "fewer ``workers``, ``worker_kind=process``, larger batches, a host with less other work",
    ),
    "lost": CauseFacts(
        "lost workers",
        "#7a1f1f",
        "a worker has died: what it had begun, and the time until its successor returns something, "
        "unless another worker computes",
        "read the log of the worker",
    ),
    "starting": CauseFacts(
        "starting (load, tune)",
        "#8a93a3",
        "loading the model, looking at the input, choosing a data type",
        "process more records in one job; name ``dtype`` and ``batch_tokens``",
    ),
    "read": CauseFacts(
        "starved by read", "#2f6fc4", "idle, and the next records are being read", "faster storage, Parquet"
    ),
    "prepare": CauseFacts(
        "starved by prepare",
        "#7b5cc9",
        "idle, and the next records are being prepared",
        "``workers``, a cheaper ``prepare`` function",
    ),
    "company": CauseFacts(
        "waiting for more records",
        "#d9a514",
        "idle, and the batcher holds records back for more to join them",
        "a smaller `batch_delay_s` in the engine's profile",
    ),
    "finish": CauseFacts(
        "blocked by finish",
        "#e07b39",
        "idle, and results are finished and encoded too slowly",
        "a cheaper ``finish`` function, ``worker_kind=process``",
    ),
    "write": CauseFacts(
        "blocked by write", "#b4487f", "idle, and results wait for the disk", "faster storage, Parquet"
    ),
    "memory": CauseFacts(
        "memory limit reached",
        "#c7a17a",
        "idle, and no record may be read because as many as allowed are in memory",
        "a larger ``buffer_memory``",
    ),
    "draining": CauseFacts(
        "draining",
        "#a9bfd6",
        "after the last batch: finishing, writing and merging",
        "process more records in one job; an output folder, whose parts are not merged",
    ),
    "idle": CauseFacts("no requests", "#e6eaf0", "idle: the server has no request, and room for more"),
    "other": CauseFacts(
        "other",
        "#d5dae2",
        "idle, and nothing that is measured explains it",
        "if it is large, something else uses the CPU",
    ),
}
CAUSES: tuple[Cause, ...] = get_args(Cause)
COMPUTING: tuple[Cause, ...] = ("real", "padding", "copy", "retry")
"""A batch is in the engine."""
LANES: Mapping[str, Cause] = {
    "read": "read",
    "prepare": "prepare",
    "device": "real",
    "finish": "finish",
    "write": "write",
}
"""What works side by side, in the order of a record, each with the cause that has its colour."""
STAGE_LANES: Mapping[HostStage, str] = {"load": "read", "prepare": "prepare", "finish": "finish", "write": "write"}
LABELS: Mapping[Cause, str] = {cause: facts.label for cause, facts in CAUSE_FACTS.items()}
COLOURS: Mapping[Cause, str] = {cause: facts.colour for cause, facts in CAUSE_FACTS.items()}


def busy_share(causes: Mapping[Cause, float]) -> float:
    """The share of a device's time with a batch in the engine, from the shares or seconds of its causes."""
    whole = sum(causes.values())
    return sum(causes.get(cause, 0.0) for cause in COMPUTING) / whole if whole > 0 else 0.0


_SEGMENTS = 256
"""Stretches that may still change; older ones are settled."""
_BINS = 512
_FIRST_WIDTH_S = 0.05
_GAPS = 64

Shares: TypeAlias = tuple[tuple[Cause, float], ...]
"""What a stretch of time went into, and which fraction of it; the fractions add up to 1."""


class _Segment(NamedTuple):
    start: float
    end: float
    rank: int
    shares: Shares


class TimeBins:
    """Sums over time in at most 512 bins of equal width, which doubles when there are too many.

    Args:
        origin: where the first bin starts.
    """

    def __init__(self, origin: float) -> None:
        self.width_s = _FIRST_WIDTH_S
        self.sums: dict[str, list[float]] = {}
        self._origin = origin

    def highest(self, name: str, at: float, value: float) -> None:
        """Keep the highest value of the bin of the moment `at`. Such rows are named "max ...": bins merge by it."""
        place = self._place(at)
        row = self._row(name, place)
        row[place] = max(row[place], value)

    def spread(self, name: str, start: float, end: float, amount: float) -> None:
        """Add `amount`, spread evenly over the time from `start` to `end`."""
        last = int((end - self._origin) / self.width_s)
        row = self.sums.get(name)
        if row is not None and 0 <= last < len(row) and int((start - self._origin) / self.width_s) == last:
            row[last] += amount  # the common case: within one bin, which is there
            return
        last = self._place(end)
        first = self._place(start)  # after the last: the width may have doubled
        row = self._row(name, last)
        if first >= last:
            row[last] += amount
            return
        per_s = amount / (end - start)
        for place in range(first, last + 1):
            left = max(start, self._origin + place * self.width_s)
            right = min(end, self._origin + (place + 1) * self.width_s)
            row[place] += max(right - left, 0.0) * per_s

    def reduce(self, names: Sequence[Cause], to: float, rest: Cause) -> None:
        """Let the rows together add up to `to` if they are more, evenly; the rest goes to another row."""
        rows = [self.sums[name] for name in names if name in self.sums]
        whole = sum(map(sum, rows))
        if whole <= to:
            return
        for row in rows:
            for place, value in enumerate(row):
                if value:
                    self._row(rest, place)[place] += value * (1 - to / whole)
                    row[place] = value * to / whole

    def copy(self) -> TimeBins:
        other = TimeBins(self._origin)
        other.width_s = self.width_s
        other.sums = {name: list(row) for name, row in self.sums.items()}
        return other

    def _place(self, at: float) -> int:
        place = max(int((at - self._origin) / self.width_s), 0)
        while place >= _BINS:
            self._double()
            place //= 2
        return place

    def _double(self) -> None:
        self.width_s *= 2
        for name, row in self.sums.items():
            if len(row) % 2:
                row.append(0.0)
            pairs = zip(row[::2], row[1::2], strict=True)
            self.sums[name] = [max(pair) if name.startswith("max ") else sum(pair) for pair in pairs]

    def _row(self, name: str, place: int) -> list[float]:
        row = self.sums.setdefault(name, [])
        if len(row) <= place:
            row += [0.0] * (place + 1 - len(row))
        return row


class DeviceTimeline:
    """One cause for each moment of a device from `began` on.

    What is painted later covers what has a lower rank. Only the last 256 stretches can still be painted over; older
    time is settled: added up in `bins`.

    Args:
        began: when the time begins.
        empty: the cause of time that nothing is painted over.
    """

    def __init__(self, began: float, bins: TimeBins, empty: Cause = "other") -> None:
        self.began = began
        self._empty = empty
        self.end = began
        self.bins = bins
        self._segments: list[_Segment] = []
        self._settled = began

    def extend(self, end: float) -> None:
        """Let the timeline reach to `end`."""
        if end > self.end:
            self._push(_Segment(self.end, end, 0, ((self._empty, 1.0),)))
            self.end = end
        if len(self._segments) > _SEGMENTS:
            self._settle(len(self._segments) - _SEGMENTS // 2)

    def paint(self, start: float, end: float, rank: int, shares: Shares) -> None:
        """Give the time from `start` to `end` a cause, where what it has is of a lower rank (1 or more)."""
        start = max(start, self._settled)
        if start >= self.end:  # the common case: nothing is there yet
            self.extend(start)
            self._push(_Segment(start, end, rank, shares))
            self.end = max(end, start)
            return
        self.extend(end)
        if end <= start:
            return
        segments = self._segments
        first, covers = len(segments), False
        while first and segments[first - 1].end > start:
            first -= 1
            covers = covers or (segments[first].rank < rank and segments[first].start < end)
        if not covers:
            return
        covered = segments[first:]
        del segments[first:]
        for segment in covered:
            if segment.rank >= rank or segment.start >= end:
                self._push(segment)
                continue
            left, right = max(segment.start, start), min(segment.end, end)
            if segment.start < left:
                self._push(_Segment(segment.start, left, segment.rank, segment.shares))
            self._push(_Segment(left, right, rank, shares))
            if right < segment.end:
                self._push(_Segment(right, segment.end, segment.rank, segment.shares))

    def replace(self, since: float, causes: frozenset[Cause], cause: Cause) -> None:
        """Give time after `since` another cause, where it has one of `causes`."""
        segments, self._segments = self._segments, []
        for segment in segments:
            if segment.end <= since or not {name for name, _ in segment.shares} <= causes:
                self._push(segment)
                continue
            left = max(segment.start, since)
            self._push(segment._replace(end=left))
            self._push(_Segment(left, segment.end, segment.rank, ((cause, 1.0),)))

    def copy(self) -> DeviceTimeline:
        other = DeviceTimeline(self.began, self.bins.copy(), self._empty)
        other.end, other._settled, other._segments = self.end, self._settled, list(self._segments)
        return other

    def settled(self) -> TimeBins:
        """Settle everything, for good; the bins hold the seconds of each cause under its name."""
        self._settle(len(self._segments))
        return self.bins

    def _push(self, segment: _Segment) -> None:
        if segment.end <= segment.start:
            return
        if self._segments:
            last = self._segments[-1]
            if last.rank == segment.rank and last.shares == segment.shares:
                self._segments[-1] = _Segment(last.start, segment.end, last.rank, last.shares)
                return
        self._segments.append(segment)

    def _settle(self, count: int) -> None:
        for segment in self._segments[:count]:
            for cause, share in segment.shares:
                if share > 0:
                    self.bins.spread(cause, segment.start, segment.end, share * (segment.end - segment.start))
            self._settled = segment.end
        del self._segments[:count]


class BusyTime:
    """The total length of a union of intervals, which arrive in order of their ends."""

    def __init__(self) -> None:
        self._settled = 0.0
        self._open: list[tuple[float, float]] = []

    def add(self, end: float, duration_s: float) -> None:
        """Count the interval of `duration_s` seconds that ended at `end`."""
        start = end - duration_s
        while self._open and self._open[-1][1] >= start:
            earlier_start, earlier_end = self._open.pop()
            start, end = min(start, earlier_start), max(end, earlier_end)
        self._open.append((start, end))
        if len(self._open) > _GAPS:  # no batch is long enough to span this many gaps
            settled_start, settled_end = self._open.pop(0)
            self._settled += settled_end - settled_start

    @property
    def seconds(self) -> float:
        """The time covered so far."""
        return self._settled + sum(end - start for start, end in self._open)
