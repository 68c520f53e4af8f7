"""`BatchStats`, and the counters behind it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, repeat

from headrace.events import CloseReason

WINDOW_S = 60.0
"""Length of the window of `window_utilization`, in seconds."""

_BOUNDS = tuple(1e-6 * 2 ** (step / 4) for step in range(4 * 31))
"""Upper bounds of the histogram's buckets: four per doubling, 1 µs to 30 minutes."""

_PAST_STEP_S = 0.1
"""Minimum distance between two stored points, in seconds, so that there are at most 600."""


@dataclass(frozen=True, slots=True)
class Durations:
    """A histogram of durations that can be added to another. Percentiles are at most 19 % (2 ** 0.25) too high."""

    counts: tuple[float, ...] = field(default=(), repr=False)
    """Count of each bucket, up to the last non-empty one."""
    total_s: float = field(default=0.0, repr=False)
    """Sum of all durations, in seconds."""

    @property
    def cumulative(self) -> tuple[tuple[float, float], ...]:
        """(bound, count of durations within it) for each doubling from 2 µs to 18 minutes; the last is infinite."""
        counts = (*self.counts, *repeat(0.0, len(_BOUNDS) + 1 - len(self.counts)))
        sums = tuple(accumulate(counts))
        return (*((_BOUNDS[at], sums[at]) for at in range(4, len(_BOUNDS), 4)), (math.inf, sums[-1]))

    def percentile(self, share: float) -> float:
        """The duration in seconds that `share` (0 to 1) of all durations do not exceed; 0 if there are none."""
        left = share * sum(self.counts)
        for bound, count in zip(_BOUNDS, self.counts, strict=False):
            left -= count
            if count and left <= 0:
                return bound
        return _BOUNDS[-1] if any(self.counts) else 0.0

    @property
    def p50(self) -> float:
        """Median, in seconds."""
        return self.percentile(0.50)

    @property
    def p95(self) -> float:
        """95th percentile, in seconds."""
        return self.percentile(0.95)

    @property
    def p99(self) -> float:
        """99th percentile, in seconds."""
        return self.percentile(0.99)

    def __add__(self, other: Durations) -> Durations:
        longer, shorter = sorted((self.counts, other.counts), key=len, reverse=True)
        counts = tuple(a + b for a, b in zip(longer, shorter, strict=False)) + longer[len(shorter) :]
        return Durations(counts, self.total_s + other.total_s)


_NOT_SUMMED = {"avg_batch_size", "avg_batch_cost", "max_batch_size", "close_reasons", "queue_times", "process_times"}
"""Fields of `BatchStats` that replicas do not add up."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """A snapshot of a batcher's counters.

    `BatchStats.merge` combines the snapshots of several replicas, with their joint utilization.
    """

    total_submitted: int = 0
    """Records admitted."""
    total_completed: int = 0
    """Records that got a result. Failed and cancelled ones do not count."""
    total_failed: int = 0
    """Records that got an exception from a batch."""
    total_batches: int = 0
    """Batches passed to `process_fn`, including running ones."""
    total_batched: int = 0
    """Records in those batches."""
    total_batch_cost: float = 0
    """Sum of those records' costs."""
    total_padded_cost: float = 0
    """Cost of those batches including padding: records × the longest if the engine pads."""
    avg_batch_size: float = 0.0
    """Records per batch."""
    avg_batch_cost: float = 0.0
    """Cost per batch."""
    busy_time_s: float = 0.0
    """Seconds with at least one batch in `process_fn`."""
    idle_time_s: float = 0.0
    """The remaining seconds between the first `start()` and now, except while stopped."""
    window_busy_s: float = 0.0
    """Busy seconds within the last `window_s`."""
    window_s: float = 0.0
    """Length of the window, in seconds: 60, or less soon after the start."""
    waiting: int = 0
    """Records waiting for a batch now."""
    waiting_cost: float = 0
    """Cost of the waiting records."""
    in_flight: int = 0
    """Records being processed now."""
    max_batch_size: int = 0
    """The batcher's limit (of replicas: the largest)."""
    close_reasons: Mapping[CloseReason, int] = field(default_factory=dict)
    """Number of batches by close reason."""
    queue_times: Durations = Durations()
    """How long records waited for their batch; at most 32 records per batch are sampled."""
    process_times: Durations = Durations()
    """How long batches took in `process_fn`."""

    @property
    def utilization(self) -> float:
        """Fraction of wall time with at least one batch in `process_fn`, 0 to 1."""
        wall = self.busy_time_s + self.idle_time_s
        return self.busy_time_s / wall if wall > 0 else 0.0

    @property
    def window_utilization(self) -> float:
        """The same over the last `window_s` seconds."""
        return min(self.window_busy_s / self.window_s, 1.0) if self.window_s > 0 else 0.0

    @property
    def batch_utilization(self) -> float:
        """How full batches are: records per batch ÷ `max_batch_size`, 0 to 1."""
        return self.avg_batch_size / self.max_batch_size if self.max_batch_size else 0.0

    @property
    def padding_efficiency(self) -> float:
        """Cost without padding ÷ cost with padding, 0 to 1; 1 before the first batch."""
        return self.total_batch_cost / self.total_padded_cost if self.total_padded_cost else 1.0

    @staticmethod
    def merge(snapshots: Iterable[BatchStats]) -> BatchStats:
        """Merge the snapshots of several replicas: counts and times are added up."""
        every = list(snapshots)
        reasons: Counter[CloseReason] = Counter()
        for stats in every:
            reasons.update(stats.close_reasons)
        names = [one.name for one in fields(BatchStats) if one.name not in _NOT_SUMMED]
        summed = {name: sum(getattr(stats, name) for stats in every) for name in names}
        batches = max(summed["total_batches"], 1)
        return BatchStats(
            **summed,
            avg_batch_size=summed["total_batched"] / batches,
            avg_batch_cost=summed["total_batch_cost"] / batches,
            max_batch_size=max((stats.max_batch_size for stats in every), default=0),
            close_reasons=dict(reasons),
            queue_times=sum((stats.queue_times for stats in every), Durations()),
            process_times=sum((stats.process_times for stats in every), Durations()),
        )


class BatchMeter:
    """The counters behind `BatchStats`. Every `now` is the batcher's clock, in seconds."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0
        self.batches = 0
        self.taken = 0
        """Records that have left the queue for a batch or a slot."""
        self.batched = 0
        self.batch_cost: float = 0
        self.padded_cost: float = 0
        self.in_flight = 0
        self.left = 0
        """Records that left before they were in a batch: cancelled, expired or stopped."""
        self.reasons: Counter[CloseReason] = Counter()
        self._queue_times = [0.0] * (len(_BOUNDS) + 1)
        self._queued_s = 0.0
        self._process_times = [0.0] * (len(_BOUNDS) + 1)
        self._processed_s = 0.0
        self._running = 0
        self._busy = 0.0
        self._busy_since = 0.0
        self._wall = 0.0
        self._started: float | None = None
        self._past: deque[tuple[float, float]] = deque()  # (wall, busy) at each change between busy and idle

    def start(self, now: float) -> None:
        self._started = now

    def stop(self, now: float) -> None:
        """The batcher has stopped; a batch that still runs is abandoned and will not be reported as ended."""
        if self._started is not None:
            self._remember(now)
            self._busy = self._busy_at(now)
            self._running = self.in_flight = 0
            self._wall = self._wall_at(now)
            self._started = None

    def began(
        self, now: float, size: int, cost: float, padded: float, reason: CloseReason, waits: Iterable[tuple[float, int]]
    ) -> None:
        """A batch was passed to `process_fn`; `waits` are seconds in the queue, each with its number of records."""
        self.step_began(now, size, cost, padded)
        self.taken += size
        self.in_flight += size
        self.reasons[reason] += 1
        for waited, count in waits:
            self._queue_times[bisect_left(_BOUNDS, waited)] += count
            self._queued_s += waited * count

    def ended(self, now: float, size: int, failed: int, completed: int, duration: float) -> None:
        """A batch ended: `failed` records got an exception, `completed` a result; the rest were cancelled."""
        self.in_flight -= size
        self.failed += failed
        self.completed += completed
        self.step_ended(now, duration)

    def joined(self, now: float, arrival: float) -> None:
        """A record got a slot of a step-wise engine for the first time."""
        self.taken += 1
        self._queue_times[bisect_left(_BOUNDS, now - arrival)] += 1
        self._queued_s += now - arrival

    def snapshot(self, now: float, waiting: int, waiting_cost: float, max_batch_size: int) -> BatchStats:
        wall, busy = self._wall_at(now), self._busy_at(now)
        since = max(wall - WINDOW_S, 0.0)
        return BatchStats(
            total_submitted=self.taken + self.left + waiting,
            total_completed=self.completed,
            total_failed=self.failed,
            total_batches=self.batches,
            total_batched=self.batched,
            total_batch_cost=self.batch_cost,
            total_padded_cost=self.padded_cost,
            avg_batch_size=self.batched / max(self.batches, 1),
            avg_batch_cost=self.batch_cost / max(self.batches, 1),
            busy_time_s=busy,
            idle_time_s=max(wall - busy, 0.0),
            window_busy_s=busy - self._busy_before(since, wall, busy),
            window_s=wall - since,
            waiting=waiting,
            waiting_cost=waiting_cost,
            in_flight=self.in_flight,
            max_batch_size=max_batch_size,
            close_reasons=dict(self.reasons),
            queue_times=_trimmed(self._queue_times, self._queued_s),
            process_times=_trimmed(self._process_times, self._processed_s),
        )

    def step_began(self, now: float, size: int, cost: float, padded: float) -> None:
        """Records of this cost went to the engine: a batch, or a step of all that are in it."""
        if not self._running:
            self._remember(now)
            self._busy_since = now
        self._running += 1
        self.batches += 1
        self.batched += size
        self.batch_cost += cost
        self.padded_cost += padded

    def step_ended(self, now: float, duration: float) -> None:
        self._running -= 1
        self._process_times[bisect_left(_BOUNDS, duration)] += 1
        self._processed_s += duration
        if not self._running:
            self._busy += now - self._busy_since
            self._remember(now)

    def _remember(self, now: float) -> None:
        wall = self._wall_at(now)
        if self._past and wall - self._past[-1][0] < _PAST_STEP_S:
            return
        self._past.append((wall, self._busy_at(now)))
        while len(self._past) > 1 and self._past[1][0] <= wall - WINDOW_S:
            self._past.popleft()

    def _wall_at(self, now: float) -> float:
        return self._wall + (now - self._started if self._started is not None else 0.0)

    def _busy_at(self, now: float) -> float:
        return self._busy + (now - self._busy_since if self._running else 0.0)

    def _busy_before(self, since: float, wall: float, busy: float) -> float:
        """Busy seconds up to wall second `since`, interpolated between stored points."""
        before = (0.0, 0.0)
        for point in (*self._past, (wall, busy)):
            if point[0] >= since:
                span = point[0] - before[0]
                return before[1] + (point[1] - before[1]) * ((since - before[0]) / span if span else 1.0)
            before = point
        return before[1]


def _trimmed(counts: list[float], total_s: float) -> Durations:
    used = len(counts)
    while used and not counts[used - 1]:
        used -= 1
    return Durations(tuple(counts[:used]), total_s)
