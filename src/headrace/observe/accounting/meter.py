"""A job's current rates and its remaining time, for the progress display."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.events import BatchDone, Event, JobStarted, PrecisionChosen, RecordFailed, StageDone, StepDone
from headrace.observe.accounting.batches import BusyTime, successful_cost

_WINDOW_S = 20.0
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class InputSize:
    """The size of a job's input, as far as it is known."""

    bytes: int | None
    records: int | None

    def fraction(self, done: int, read: int, read_bytes: int) -> float | None:
        """How much of the input is done; None where its size is unknown.

        Args:
            done: records, those of earlier runs included.
            read: records that have been read, those of earlier runs included.
            read_bytes: bytes that have been read.
        """
        if self.records:
            return min(1.0, done / self.records)
        if self.bytes:
            # Records that were only read ahead are not done: count the processed share of the bytes read.
            processed = min(1.0, done / read) if read else 1.0
            return min(1.0, read_bytes * processed / self.bytes)
        return None


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far the records of a job have come."""

    records: Mapping[str, int]
    """Records that each host stage has finished: load, prepare, finish, write."""
    input_size: InputSize
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a job; rates cover the last 20 seconds."""

    ok: int
    failed: int
    skipped: int
    records_per_s: float
    tokens_per_s: float
    busy: float
    fraction: float | None
    """Done fraction of the whole input; None if its size is unknown."""
    eta_s: float | None
    """Remaining seconds; None if unknown."""
    dtype: str = ""
    """The dtype that the model computes in, if known."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    records: int
    tokens: float
    busy_s: float


class Meter:
    """Aggregates events into snapshots. Times use the clock of the events."""

    def __init__(self) -> None:
        self._size = InputSize(None, None)
        self._skipped = self._answers = self._failed = self._bytes = self._loaded = self._prepared = self._inputs = 0
        self._tokens = 0.0
        self._counts_tokens = False
        self._dtype = ""
        self._busy = BusyTime()
        self._samples: deque[_Sample] = deque()

    def add(self, event: Event) -> None:
        """Count one event."""
        match event:
            case JobStarted():
                self._size = InputSize(event.total_bytes, event.total_records)
                self._skipped = event.records_done
                if not self._skipped:  # otherwise, skipping finished records would count as speed
                    self._samples.append(self._sample(event.at))
            case StageDone(stage="load"):
                self._bytes += event.bytes
                self._loaded += event.records
            case StageDone(stage="prepare"):
                self._counts_tokens |= event.tokens > 0
                self._prepared += event.records
                self._inputs += event.records + event.chunks - event.split
            case BatchDone():
                self._ran(event, event.size - event.failed, successful_cost(event))
            case StepDone():
                self._ran(event, event.finished - event.failed, event.cost)
            case RecordFailed():
                self._failed += 1
            case PrecisionChosen():
                self._dtype = event.dtype
            case _:
                pass

    def _ran(self, event: BatchDone | StepDone, ok: int, cost: float) -> None:
        self._answers += ok
        if self._counts_tokens:  # then cost is in tokens
            self._tokens += cost
        self._busy.add(event.at, event.computed_s)
        if not self._samples or event.at - self._samples[-1].at >= _SAMPLE_S:
            self._samples.append(self._sample(event.at))

    @property
    def _ok(self) -> int:
        """Records with an answer. The chunks of a long record have one each; these count as their share of it."""
        return self._answers if self._inputs == self._prepared else self._answers * self._prepared // self._inputs

    def snapshot(self, now: float) -> Snapshot:
        """The state at time `now`."""
        while len(self._samples) > 1 and now - self._samples[1].at > _WINDOW_S:
            self._samples.popleft()
        current = self._sample(now)
        first = self._samples[0] if self._samples else current
        elapsed = now - first.at
        rate = (current.records - first.records) / elapsed if elapsed > 0 else 0.0
        done = self._skipped + current.records  # of the whole input, as are the fraction and the remaining time
        fraction = self._size.fraction(done, self._skipped + self._loaded, self._bytes)
        return Snapshot(
            ok=self._ok,
            failed=self._failed,
            skipped=self._skipped,
            records_per_s=rate,
            tokens_per_s=(current.tokens - first.tokens) / elapsed if elapsed > 0 else 0.0,
            busy=min(1.0, (current.busy_s - first.busy_s) / elapsed) if elapsed > 0 else 0.0,
            fraction=fraction,
            eta_s=done * (1 - fraction) / fraction / rate if fraction and rate else None,
            dtype=self._dtype,
        )

    def _sample(self, at: float) -> _Sample:
        return _Sample(at, self._ok + self._failed, self._tokens, self._busy.seconds)
