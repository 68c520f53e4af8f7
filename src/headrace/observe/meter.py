"""How fast a job goes now and when it will end: the arithmetic behind the progress display."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.events import BatchDone, Event, JobStarted, NumbersChosen, RecordFailed, StageDone, StepDone
from headrace.observe.batches import BusyTime, cost_of_the_ok

_WINDOW_S = 20.0
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a job; rates are those of the last 20 seconds."""

    ok: int
    failed: int
    skipped: int
    records_per_s: float
    tokens_per_s: float
    busy: float
    fraction: float | None
    """Of the whole input, None where its size is unknown."""
    eta_s: float | None
    """Seconds to go, None where that cannot be told."""
    dtype: str = ""
    """The numbers that the model computes with, where they are known."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    records: int
    tokens: float
    busy_s: float


class Meter:
    """Adds up events; `snapshot` says how things stand. Times are those of the events' own clock."""

    def __init__(self) -> None:
        self._total_bytes: int | None = None
        self._total_records: int | None = None
        self._skipped = self._ok = self._failed = self._bytes = self._loaded = 0
        self._tokens = 0.0
        self._counts_tokens = False
        self._dtype = ""
        self._busy = BusyTime()
        self._samples: deque[_Sample] = deque()

    def hear(self, event: Event) -> None:
        """Count an event."""
        match event:
            case JobStarted():
                self._total_bytes, self._total_records = event.total_bytes, event.total_records
                self._skipped = event.records_done
                if not self._skipped:  # else the time to pass over finished records would count
                    self._samples.append(self._sample(event.at))
            case StageDone(stage="load"):
                self._bytes += event.bytes
                self._loaded += event.records
            case StageDone(stage="prepare"):
                self._counts_tokens |= event.tokens > 0
            case BatchDone():
                self._ran(event, event.size - event.failed, cost_of_the_ok(event))
            case StepDone():
                self._ran(event, event.finished - event.failed, event.cost)
            case RecordFailed():
                self._failed += 1
            case NumbersChosen():
                self._dtype = event.dtype
            case _:
                pass

    def _ran(self, event: BatchDone | StepDone, ok: int, cost: float) -> None:
        self._ok += ok
        if self._counts_tokens:  # then they are what a record costs
            self._tokens += cost
        self._busy.add(event.at, event.duration_s)
        if not self._samples or event.at - self._samples[-1].at >= _SAMPLE_S:
            self._samples.append(self._sample(event.at))

    def snapshot(self, now: float) -> Snapshot:
        """How things stand at `now`."""
        while len(self._samples) > 1 and now - self._samples[1].at > _WINDOW_S:
            self._samples.popleft()
        current = self._sample(now)
        first = self._samples[0] if self._samples else current
        elapsed = now - first.at
        rate = (current.records - first.records) / elapsed if elapsed > 0 else 0.0
        fraction = self._fraction(current.records)
        return Snapshot(
            ok=self._ok,
            failed=self._failed,
            skipped=self._skipped,
            records_per_s=rate,
            tokens_per_s=(current.tokens - first.tokens) / elapsed if elapsed > 0 else 0.0,
            busy=min(1.0, (current.busy_s - first.busy_s) / elapsed) if elapsed > 0 else 0.0,
            fraction=fraction,
            eta_s=self._records_left(fraction) / rate if fraction and rate else None,
            dtype=self._dtype,
        )

    def _sample(self, at: float) -> _Sample:
        return _Sample(at, self._ok + self._failed, self._tokens, self._busy.seconds)

    def _records_left(self, fraction: float) -> float:
        """Of the whole input. Fractions of two moments do not tell: passing over finished records changes them too."""
        return (self._skipped + self._ok + self._failed) * (1 - fraction) / fraction

    def _fraction(self, done: int) -> float | None:
        """Of the whole input, after `done` records of this run; None where its size is unknown."""
        if self._total_records:
            return min(1.0, (self._skipped + done) / self._total_records)
        if self._total_bytes:
            # What is read ahead is not done yet: count only the processed share of the records read so far.
            read = self._skipped + self._loaded
            processed = min(1.0, (self._skipped + done) / read) if read else 1.0
            return min(1.0, self._bytes * processed / self._total_bytes)
        return None
