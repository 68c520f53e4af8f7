"""Build a job's report from its events: results, timings and advice."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

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
    WorkerLost,
    WorkUnitDone,
)
from headrace.observe.accounting.accountant import Account, Accountant
from headrace.observe.accounting.batches import BusyTime, successful_cost
from headrace.observe.accounting.device_limit import DeviceFigures, device_figures
from headrace.observe.accounting.meter import InputSize, StageProgress
from headrace.observe.accounting.worker_rows import WorkerCount
from headrace.observe.accounting.worker_rows import WorkerRow as WorkerRow
from headrace.observe.reporting.advice import AdviceInputs, Host, advices, advise
from headrace.observe.reporting.results import Report as Report
from headrace.observe.reporting.results import StageTimes as StageTimes
from headrace.observe.reporting.results import State, both
from headrace.observe.reporting.results import StepFigures as StepFigures
from headrace.records import LeftOut

_KEPT_FAILURES = 1_000
_MANY_FAILED = 0.1
_ENOUGH = 1_000
"""So many records show whether many fail, as long as the job has not ended."""
_TOGETHER = 128
"""Events that are taken in together: many cost a fraction of what each would cost alone."""


class ReportBuilder:
    """A thread-safe event listener that aggregates a report.

    Args:
        began: when the time begins, on the events' clock; None for the first event.
        host: what the run has for its host stages.
        server: whether the events are those of a server.
    """

    _endpoint: EndpointUsed | None = None

    def __init__(self, began: float | None = None, host: Host | None = None, *, server: bool = False) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._accountant = None if began is None else Accountant(began, server=server)
        self._host = host or Host()
        self._start: float | None = None
        self._started = self._retries = False
        self._last = 0.0
        self._state: State = "interrupted"
        self._skipped = self._skipped_failed = self._ok = 0
        """Committed records. A result that was computed once and written for several records counts for each."""
        self._damaged: list[PartDamaged] = []
        self._formed: dict[tuple[int, int], CloseReason] = {}
        self._failures: Counter[str] = Counter()
        self._failed_records: list[RecordFailed] = []
        """The first ones."""
        self._stages = dict.fromkeys(("load", "prepare", "finish", "write"), 0.0)
        self._passed = dict.fromkeys(("load", "prepare", "finish", "write"), 0)
        """Records that each stage has finished."""
        self._size = InputSize(None, None)
        self._loaded_bytes = 0
        self._long = self._long_chunks = self._duplicates = 0
        """Records that were split, and the chunks of them."""
        self._prepare_cpu_s: float | None = None
        self._chunks = 0
        self._compared = self._repeated = 0
        """Records that were compared with earlier ones, and how many are equal to one."""
        self._split: set[int] = set()
        """Running batches that have run out of memory."""
        self._fitted = (0.0, 0.0)
        """Records and computed cost of the largest batch that fitted."""
        self._full_steps = 0
        self._prepared_tokens = self._truncated = self._nulled = self._empty = self._batches = self._batched = (
            self._splits
        ) = self._out_of_memory = 0
        self._cost = self._padded_cost = self._done_cost = self._starved = 0.0
        self._busy = BusyTime()
        self._reasons: Counter[CloseReason] = Counter()
        self._lanes: defaultdict[str, WorkerCount] = defaultdict(WorkerCount)
        self._left_out: dict[str, LeftOut] = {}
        self._precision: PrecisionChosen | None = None
        self._budget: float | None = None
        self._memory: MemoryUsed | None = None
        self._device: DeviceUsed | None = None
        self._orders: dict[str, OrderChosen] = {}
        self._prefix_cache: PrefixCacheUsed | None = None
        self._prompts: PromptsCompared | None = None
        self._takers = self._make_takers()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) >= _TOGETHER or isinstance(event, BatchSplit):  # which holds an error, and its frames
                self._take_all()

    def _make_takers(self) -> dict[type, Callable[..., None]]:
        """What takes in each type of event."""
        tuning = (
            PrecisionChosen,
            BudgetChanged,
            MemoryUsed,
            DeviceUsed,
            EndpointUsed,
            PrefixCacheUsed,
            PromptsCompared,
        )
        return {
            JobStarted: self._add_start,
            JobDone: self._add_end,
            StageDone: self._add_stage,
            BatchFormed: self._add_formed,
            BatchDone: self._add_batch,
            BatchSplit: self._add_split,
            StepDone: self._add_step,
            InputLeftOut: self._add_left_out,
            RecordFailed: self._add_failure,
            PartCommitted: self._add_part,
            PartDamaged: self._damaged.append,
            DuplicatesFound: self._add_duplicates,
            OrderChosen: self._add_order,
            WorkUnitDone: self._add_lane,
            WorkerLost: self._add_lane,
            **dict.fromkeys(tuning, self._add_tuning_event),
        }

    def _take_all(self) -> None:
        """Take in the events that wait. The caller holds the lock."""
        events, self._waiting = self._waiting, []
        if self._accountant is None:
            timed = (event.at for event in events if not isinstance(event, RecordFailed))
            self._accountant = next(map(Accountant, timed), None)
        takers = self._takers
        for event in events:
            if (take := takers.get(type(event))) is not None:
                take(event)
            if isinstance(event, RecordFailed | RequestDone):
                continue
            if self._start is None:
                self._start = event.at
            if event.at > self._last:
                self._last = event.at
        if self._accountant is not None:
            self._accountant.add(events)

    def _add_start(self, event: JobStarted) -> None:
        self._skipped, self._skipped_failed = event.records_done, event.failed_done
        self._size = InputSize(event.total_bytes, event.total_records)
        self._retries = event.retry
        if not self._started:
            self._started, self._start = True, event.at  # what comes before belongs to loading the model

    def _add_end(self, event: JobDone) -> None:
        self._state = event.state

    def _add_lane(self, event: WorkUnitDone | WorkerLost) -> None:
        self._lanes[event.worker].add(event)

    def _add_left_out(self, event: InputLeftOut) -> None:
        left_out = event.left_out
        same = self._left_out.get(left_out.reason)
        self._left_out[left_out.reason] = left_out if same is None else same.more(left_out)

    def _add_failure(self, event: RecordFailed) -> None:
        self._failures[event.reason] += 1
        if len(self._failed_records) < _KEPT_FAILURES:
            self._failed_records.append(event)

    def _add_stage(self, event: StageDone) -> None:
        stage = event.stage
        self._stages[stage] += event.duration_s
        self._passed[stage] += event.records
        if stage == "load":
            self._loaded_bytes += event.bytes
        elif stage == "write":
            self._nulled += event.nulled
        elif stage == "prepare":
            self._add_prepared(event)

    def _add_prepared(self, event: StageDone) -> None:
        self._prepared_tokens += event.tokens
        self._truncated += event.truncated
        self._empty += event.empty
        self._long += event.split
        self._long_chunks += event.chunks
        self._chunks += 1
        self._compared += event.compared
        self._repeated += event.repeated
        if event.cpu_s is not None:
            self._prepare_cpu_s = (self._prepare_cpu_s or 0.0) + event.cpu_s

    def _add_duplicates(self, event: DuplicatesFound) -> None:
        self._duplicates += event.records

    def _add_order(self, event: OrderChosen) -> None:
        same = self._orders.get(event.order, replace(event, records=0))
        self._orders[event.order] = replace(same, records=same.records + event.records)

    def _add_tuning_event(
        self,
        event: PrecisionChosen
        | BudgetChanged
        | MemoryUsed
        | DeviceUsed
        | EndpointUsed
        | PrefixCacheUsed
        | PromptsCompared,
    ) -> None:
        match event:
            case PrecisionChosen():
                self._precision = event
            case BudgetChanged():
                self._budget = event.budget
            case MemoryUsed():
                self._memory = event
            case DeviceUsed():
                self._device = event
            case EndpointUsed():
                self._endpoint = event
            case PromptsCompared():
                self._prompts = event
            case PrefixCacheUsed():
                self._prefix_cache = event if self._prefix_cache is None else both(self._prefix_cache, event)

    def _add_formed(self, event: BatchFormed) -> None:
        self._starved += event.starved_s
        self._formed[event.batch, event.size] = event.reason

    def _add_split(self, event: BatchSplit) -> None:
        self._splits += 1
        self._out_of_memory += event.out_of_memory
        self._split.add(event.batch)

    def _add_step(self, event: StepDone) -> None:
        self._batches += 1
        self._full_steps += event.size >= self._host.slots
        self._batched += event.size
        self._starved += event.starved_s
        self._done_cost += event.cost
        self._busy.add(event.at, event.computed_s)

    def _add_part(self, event: PartCommitted) -> None:
        self._ok += event.end - event.start - event.failed

    def _add_batch(self, event: BatchDone) -> None:
        """Count a finished batch. A batch that was stopped before it ran does not count."""
        reason = self._formed.pop((event.batch, event.size), None)
        if event.batch in self._split:
            self._split.discard(event.batch)
        elif event.padded_cost > self._fitted[1] and not event.failed:
            self._fitted = event.size, event.padded_cost
        if event.stopped == event.size:
            return
        if reason is not None:
            self._reasons[reason] += 1
        self._batches += 1
        self._batched += event.size - event.stopped
        self._cost += event.cost
        self._padded_cost += event.padded_cost
        self._done_cost += successful_cost(event)
        self._busy.add(event.at, event.computed_s)

    def build(self) -> Report:
        """The report of all events so far."""
        with self._lock:
            self._take_all()
            return self._build(self._account(self._last))

    def note_memory(self, now: float, held: int) -> None:
        """Note how many bytes the process holds."""
        with self._lock:
            self._take_all()
            if self._accountant is not None:
                self._accountant.memory(now, held)

    def snapshot(self, now: float) -> tuple[Report, Account]:
        """The report and the account at the moment `now`."""
        with self._lock:
            self._take_all()
            account = self._account(now)
            return self._build(account), account

    def passed(self) -> StageProgress:
        """How far the records have come."""
        with self._lock:
            self._take_all()
            return StageProgress(dict(self._passed), self._size, self._loaded_bytes)

    def _account(self, now: float) -> Account:
        accountant = self._accountant or Accountant(now)
        return accountant.account(now)

    def _build(self, account: Account) -> Report:
        wall = self._last - self._start if self._start is not None else 0.0
        failed = self._failures.total()
        records = self._ok + failed
        times = StageTimes(
            load=self._stages["load"],
            prepare=self._stages["prepare"],
            starved=self._starved,
            inference=self._busy.seconds,
            finish=self._stages["finish"],
            write=self._stages["write"],
        )
        # If tokens were counted, cost is in tokens.
        tokens = round(self._done_cost) if self._prepared_tokens else 0
        lanes = tuple(lane.build(name, wall) for name, lane in sorted(self._lanes.items()))
        busy = min(1.0, times.inference / wall) if wall > 0 else 0.0
        if lanes:
            busy = sum(lane.busy for lane in lanes) / len(lanes)
        device = device_figures(self._device, wall, records, account.fixed_s, self._batches)
        numbers = self._advice_inputs(account, device, records, wall, busy)
        return Report(
            state=self._state,
            ok=self._ok,
            failed=failed,
            skipped=self._skipped,
            skipped_failed=self._skipped_failed,
            failures=dict(self._failures.most_common()),
            truncated=self._truncated,
            split=self._long,
            chunks=self._long_chunks,
            wall_s=wall,
            records_per_s=records / wall if wall > 0 else 0.0,
            tokens=tokens,
            tokens_per_s=tokens / wall if wall > 0 else 0.0,
            busy=busy,
            padding_efficiency=self._padding_efficiency,
            batches=self._batches,
            mean_batch_size=self._batched / self._batches if self._batches else 0.0,
            splits=self._splits,
            close_reasons=dict(self._reasons.most_common()),
            times=times,
            advice=advise(numbers),
            damaged=tuple(self._damaged),
            lanes=lanes,
            left_out=tuple(self._left_out.values()),
            nulled=self._nulled,
            empty=self._empty,
            precision=self._precision,
            budget=self._budget,
            memory=self._memory,
            duplicates=self._duplicates,
            order=tuple(self._orders.values()),
            prefix_cache=self._prefix_cache,
            causes=account.causes,
            device=device,
            advices=tuple(advices(numbers)),
            account=account,
            failed_records=tuple(self._failed_records),
        )

    @property
    def _padding_efficiency(self) -> float:
        return self._cost / self._padded_cost if self._padded_cost > 0 else 1.0

    def _many_failed(self, records: int) -> str:
        """See `AdviceInputs.failures`; `records` are those of this run."""
        failed = self._failures.total()
        if self._retries:
            return f"{failed:,} of {records:,} records failed again" if failed > _MANY_FAILED * records else ""
        records, failed = records + self._skipped, failed + self._skipped_failed
        if failed <= _MANY_FAILED * records or (self._state == "interrupted" and records < _ENOUGH):
            return ""
        return f"{failed / records:.0%} of the records{'' if self._state == 'finished' else ' so far'} failed"

    def _advice_inputs(
        self, account: Account, device: DeviceFigures | None, records: int, wall: float, busy: float
    ) -> AdviceInputs:
        return AdviceInputs(
            records=records,
            failures=self._many_failed(records),
            batches=self._batches,
            wall_s=wall,
            busy=busy,
            padding_efficiency=self._padding_efficiency,
            host_s=dict(self._stages),
            causes=account.causes,
            fixed_s=account.fixed_s,
            limited_by_size=self._reasons["full_size"] / max(self._reasons.total(), 1),
            limited_by_cost=self._reasons["full_cost"] / max(self._reasons.total(), 1),
            mean_cost=self._padded_cost / max(self._batches, 1),
            fill_s=account.fill_s,
            out_of_memory=self._out_of_memory,
            fitted=self._fitted,
            chunks=self._chunks,
            prepare_cpu_s=self._prepare_cpu_s,
            repeated=self._repeated / max(self._compared, 1),
            slots_full=self._full_steps / max(self._batches, 1),
            tuning_s=self._precision.duration_s if self._precision is not None else 0.0,
            dtype=self._precision.dtype if self._precision is not None else "",
            dtype_speed=self._precision.speed if self._precision is not None else 1.0,
            lanes=len(self._lanes),
            host=self._host,
            device=device,
            larger_pay=self._memory.larger_pay if self._memory is not None else None,
            prompts=self._prompts,
            prefix_cache=self._prefix_cache,
            endpoint=self._endpoint,
        )
