"""A job's current rates and its remaining time, for the progress display."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.events import BatchDone, Event, JobStarted, StepDone
from headrace.observe.reporting.event_sums import Sums
from headrace.observe.reporting.run_facts import RunFacts

_WINDOW_S = 20.0
_SAMPLE_S = 0.5


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
    """Turns the sums of a job's events into snapshots. Times use the clock of the events."""

    def __init__(self) -> None:
        self._sums = Sums(RunFacts())
        self._samples: deque[_Sample] = deque()

    def add(self, event: Event) -> None:
        self._sums.add((event,))
        match event:
            case JobStarted():
                if not event.records_done:  # otherwise, skipping finished records would count as speed
                    self._samples.append(self._sample(event.at))
            case BatchDone() | StepDone():
                if not self._samples or event.at - self._samples[-1].at >= _SAMPLE_S:
                    self._samples.append(self._sample(event.at))

    def snapshot(self, now: float) -> Snapshot:
        while len(self._samples) > 1 and now - self._samples[1].at > _WINDOW_S:
            self._samples.popleft()
        sums, current = self._sums, self._sample(now)
        skipped = sums.skipped
        first = self._samples[0] if self._samples else current
        elapsed = now - first.at
        rate = (current.records - first.records) / elapsed if elapsed > 0 else 0.0
        done = skipped + current.records  # of the whole input, as are the fraction and the remaining time
        fraction = sums.input_size.fraction(
            done, skipped + sums.stages["load"]["records"], sums.stages["load"]["bytes"]
        )
        return Snapshot(
            ok=sums.answered,
            failed=sums.failures.total(),
            skipped=skipped,
            records_per_s=rate,
            tokens_per_s=(current.tokens - first.tokens) / elapsed if elapsed > 0 else 0.0,
            busy=min(1.0, (current.busy_s - first.busy_s) / elapsed) if elapsed > 0 else 0.0,
            fraction=fraction,
            eta_s=done * (1 - fraction) / fraction / rate if fraction and rate else None,
            dtype=sums.precision.dtype if sums.precision is not None else "",
        )

    def _sample(self, at: float) -> _Sample:
        sums = self._sums
        return _Sample(at, sums.answered + sums.failures.total(), sums.tokens, sums.busy.seconds)
