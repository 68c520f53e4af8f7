"""What the events of a run add up to: the one place where events become numbers. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import get_args

from headrace.events import (
    BatchDone,
    BatchFormed,
    BatchSplit,
    BudgetChanged,
    CloseReason,
    DeviceUsed,
    DuplicatesFound,
    EndpointUsed,
    Event,
    HostStage,
    InputLeftOut,
    JobDone,
    JobStarted,
    MemoryUsed,
    OrderChosen,
    PartCommitted,
    PartDamaged,
    PrecisionChosen,
    PrefixCacheUsed,
    PromptsCompared,
    RecordFailed,
    RequestDone,
    StageDone,
    StepDone,
    StepSizeChanged,
    WorkerLost,
    WorkUnitDone,
)
from headrace.observe.accounting.accountant import NO_ACCOUNT
from headrace.observe.accounting.input_size import InputSize, StageProgress
from headrace.observe.accounting.timeline import BusyTime
from headrace.observe.reporting.run_facts import RunFacts, WorkerRow
from headrace.records import LeftOut

_KEPT_FAILURES = 1_000
_SUMMED: Mapping[HostStage, tuple[str, ...]] = {
    "load": ("records", "duration_s", "bytes"),
    "prepare": (
        "records", "duration_s", "tokens", "truncated", "split", "chunks", "empty", "compared", "repeated",
    ),
    "finish": ("records", "duration_s"),
    "write": ("records", "duration_s", "nulled"),
}  # fmt: skip
"""Fields of `StageDone` that are added up."""
_VALUES = {stage: attrgetter(*names) for stage, names in _SUMMED.items()}


class Sums:
    """The sums of a run's events; the formulas of the figures in `run_figures.Report` read them."""

    def __init__(self, host: RunFacts) -> None:
        self.host = host
        self.account = NO_ACCOUNT
        """Where the time went; set before the figures are computed."""
        self.start: float | None = None
        self.last = 0.0
        """When the job started, and the last event, on the events' clock."""
        self.started: JobStarted | None = None
        """The last one."""
        self.ended: JobDone | None = None
        self.committed = 0
        """Successful records in parts. One that was computed once and written for several records counts for each."""
        self.damaged: list[PartDamaged] = []
        self.failures: Counter[str] = Counter()
        self.failed_records: list[RecordFailed] = []
        """The first ones."""
        self.stages: defaultdict[HostStage, Counter[str]] = defaultdict(Counter)
        """For each host stage, the sums of the fields of its events, and the number of events as "events"."""
        self.prepare_cpu_s: float | None = None
        """Seconds of a core that preparing took, if it is measured."""
        self.batches = self.splits = self.out_of_memory = self.full_steps = 0
        """Batches or steps, batches that ran again in halves, those of them that did not fit in memory, and steps with
        all slots taken."""
        self.batched = self.answers = 0
        """Records in the batches, and those with a result."""
        self.cost = self.padded_cost = self.done_cost = self.starved_s = 0.0
        self.fitted = (0.0, 0.0)
        """Records and computed cost of the largest batch that fitted in memory."""
        self.busy = BusyTime()
        self.reasons: Counter[CloseReason] = Counter()
        self.lanes: defaultdict[str, WorkerCount] = defaultdict(WorkerCount)
        self.left_out: dict[str, LeftOut] = {}
        self.orders: dict[str, OrderChosen] = {}
        self.duplicates = 0
        self.prefix_cache: PrefixCacheUsed | None = None
        self.precision: PrecisionChosen | None = None
        self.budget: BudgetChanged | None = None
        self.step_size: StepSizeChanged | None = None
        self.memory: MemoryUsed | None = None
        self.device: DeviceUsed | None = None
        self.endpoint: EndpointUsed | None = None
        self.prompts: PromptsCompared | None = None
        self._formed: dict[tuple[int, int], CloseReason] = {}
        self._split: set[int] = set()
        """Running batches that have run out of memory."""
        self._takers = self._make_takers()

    def _make_takers(self) -> dict[type, Callable[..., None]]:
        return {
            JobStarted: self._start,
            StageDone: self._stage,
            BatchFormed: self._form,
            BatchDone: self._batch,
            BatchSplit: self._halve,
            StepDone: self._step,
            InputLeftOut: self._leave_out,
            RecordFailed: self._fail,
            PartCommitted: self._commit,
            PartDamaged: self.damaged.append,
            DuplicatesFound: self._duplicate,
            OrderChosen: self._order,
            PrefixCacheUsed: self._cache,
            WorkUnitDone: self._lane,
            WorkerLost: self._lane,
            **{kind: partial(setattr, self, name) for kind, name in _LAST.items()},
        }

    def add(self, events: Iterable[Event]) -> None:
        takers = self._takers
        last = self.last
        for event in events:
            if (take := takers.get(type(event))) is not None:
                take(event)
            if isinstance(event, RecordFailed | RequestDone):
                continue
            if self.start is None:
                self.start = event.at
            if event.at > last:
                last = event.at
        self.last = last

    @property
    def wall_s(self) -> float:
        """From the start of the job to the last event."""
        return self.last - self.start if self.start is not None else 0.0

    @property
    def records(self) -> int:
        """Finished records, failed ones included."""
        return self.committed + self.failures.total()

    @property
    def answered(self) -> int:
        """Records with a result, written or not. The chunks of a long record have one each, and count as its share."""
        prepared = self.stages["prepare"]
        inputs = prepared["records"] + prepared["chunks"] - prepared["split"]
        return self.answers if inputs == prepared["records"] else self.answers * prepared["records"] // inputs

    @property
    def skipped(self) -> int:
        """Records that earlier runs had finished."""
        return self.started.records_done if self.started is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens of successful records; 0 if cost is not in tokens, as when none were counted."""
        return round(self.done_cost) if self.stages["prepare"]["tokens"] else 0

    @property
    def input_size(self) -> InputSize:
        """The size of the input, as far as it is known."""
        return InputSize(*((None, None) if self.started is None else
                           (self.started.total_bytes, self.started.total_records)))  # fmt: skip

    @property
    def progress(self) -> StageProgress:
        """How far the records have come."""
        records = {stage: int(self.stages[stage]["records"]) for stage in get_args(HostStage)}
        return StageProgress(records, self.input_size, self.stages["load"]["bytes"])

    @property
    def worker_rows(self) -> tuple[WorkerRow, ...]:
        return tuple(lane.build(name, self.wall_s) for name, lane in sorted(self.lanes.items()))

    @property
    def busy_share(self) -> float:
        """The fraction of the wall time with a batch in the engine; the mean over several workers."""
        if rows := self.worker_rows:
            return sum(row.busy for row in rows) / len(rows)
        return min(1.0, self.busy.seconds / self.wall_s) if self.wall_s > 0 else 0.0

    def per_second(self, count: float) -> float:
        """A count as a rate over the wall time."""
        return count / self.wall_s if self.wall_s > 0 else 0.0

    def per_batch(self, count: float) -> float:
        """A count as a mean over the batches."""
        return count / max(self.batches, 1)

    def _start(self, event: JobStarted) -> None:
        if self.started is None:
            self.start = event.at  # what comes before belongs to loading the model
        self.started = event

    def _lane(self, event: WorkUnitDone | WorkerLost) -> None:
        self.lanes[event.worker].add(event)

    def _leave_out(self, event: InputLeftOut) -> None:
        left_out = event.left_out
        same = self.left_out.get(left_out.reason)
        self.left_out[left_out.reason] = left_out if same is None else same.more(left_out)

    def _fail(self, event: RecordFailed) -> None:
        self.failures[event.reason] += 1
        if len(self.failed_records) < _KEPT_FAILURES:
            self.failed_records.append(event)

    def _stage(self, event: StageDone) -> None:
        sums = self.stages[event.stage]
        sums["events"] += 1
        for name, value in zip(_SUMMED[event.stage], _VALUES[event.stage](event), strict=True):
            if value:
                sums[name] += value
        if event.cpu_s is not None:
            self.prepare_cpu_s = (self.prepare_cpu_s or 0.0) + event.cpu_s

    def _duplicate(self, event: DuplicatesFound) -> None:
        self.duplicates += event.records

    def _order(self, event: OrderChosen) -> None:
        same = self.orders.get(event.order, replace(event, records=0))
        self.orders[event.order] = replace(same, records=same.records + event.records)

    def _cache(self, event: PrefixCacheUsed) -> None:
        one = self.prefix_cache
        if one is None:
            self.prefix_cache = event
            return
        known = one.computed_s is not None and event.computed_s is not None
        self.prefix_cache = PrefixCacheUsed(
            one.queries + event.queries,
            one.hits + event.hits,
            one.computed + event.computed,
            event.at,
            one.generated + event.generated,
            (one.computed_s or 0.0) + (event.computed_s or 0.0) if known else None,
        )

    def _form(self, event: BatchFormed) -> None:
        self.starved_s += event.starved_s
        self._formed[event.batch, event.size] = event.reason

    def _halve(self, event: BatchSplit) -> None:
        self.splits += 1
        self.out_of_memory += event.out_of_memory
        self._split.add(event.batch)

    def _step(self, event: StepDone) -> None:
        self.batches += 1
        self.full_steps += 0 < self.host.slots <= event.size
        self.batched += event.size
        self.answers += event.finished - event.failed
        self.starved_s += event.starved_s
        self.done_cost += event.cost
        self.busy.add(event.at, event.computed_s)

    def _commit(self, event: PartCommitted) -> None:
        self.committed += event.end - event.start - event.failed

    def _batch(self, event: BatchDone) -> None:
        """Count a finished batch. A batch that was stopped before it ran does not count."""
        reason = self._formed.pop((event.batch, event.size), None)
        if event.batch in self._split:
            self._split.discard(event.batch)
        elif event.padded_cost > self.fitted[1] and not event.failed:
            self.fitted = event.size, event.padded_cost
        if event.stopped == event.size:
            return
        if reason is not None:
            self.reasons[reason] += 1
        self.batches += 1
        self.batched += event.size - event.stopped
        self.answers += event.size - event.failed
        self.cost += event.cost
        self.padded_cost += event.padded_cost
        self.done_cost += event.cost * (event.size - event.failed) / event.size  # as if all cost the same
        self.busy.add(event.at, event.computed_s)


class WorkerCount:
    """Adds up the events of a worker."""

    def __init__(self) -> None:
        self.records = self.failed = self.batches = self.lost = 0
        self.busy_s = 0.0

    def add(self, event: WorkUnitDone | WorkerLost) -> None:
        if isinstance(event, WorkerLost):
            self.lost += 1
            return
        self.records += event.records
        self.failed += event.failed
        self.batches += event.batches
        self.busy_s += event.busy_s

    def build(self, worker: str, wall: float) -> WorkerRow:
        """The figures, for a job that took `wall` seconds."""
        busy = min(1.0, self.busy_s / wall) if wall > 0 else 0.0
        return WorkerRow(worker, self.records, self.failed, self.batches, busy, self.lost)


_LAST: dict[type, str] = {
    JobDone: "ended",
    PrecisionChosen: "precision",
    BudgetChanged: "budget",
    StepSizeChanged: "step_size",
    MemoryUsed: "memory",
    DeviceUsed: "device",
    EndpointUsed: "endpoint",
    PromptsCompared: "prompts",
}
"""Events the last of which counts, and where it is kept."""
