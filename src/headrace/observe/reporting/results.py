"""What a job's report says; `report.py` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.events import (
    CloseReason,
    MemoryUsed,
    OrderChosen,
    PartDamaged,
    PrecisionChosen,
    PrefixCacheUsed,
    RecordFailed,
)
from headrace.observe.accounting.accountant import Account
from headrace.observe.accounting.device_limit import DeviceFigures
from headrace.observe.accounting.timeline import Cause
from headrace.observe.accounting.worker_rows import WorkerRow
from headrace.observe.reporting import notebook
from headrace.observe.reporting.advice import Advice
from headrace.records import LeftOut
from headrace.wording import spelled

if TYPE_CHECKING:
    import pyarrow as pa

State: TypeAlias = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds spent in each step, summed over workers. Steps overlap, so the sum exceeds the wall time."""

    load: float
    prepare: float
    starved: float
    """The engine waited for input."""
    inference: float
    """At least one batch was running."""
    finish: float
    write: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What this run did in one step of a job of several."""

    name: str
    model: str
    loads: int
    """How often the model was loaded; 0 if the step was finished before."""
    records: int
    """Finished records, those of earlier runs and failed ones included."""
    failed: int
    """How many of them failed, in this step or before it."""
    load_s: float
    """Seconds until the first batch: loading the model, and choosing its dtype."""
    wall_s: float
    """Seconds of the whole step."""


@dataclass(frozen=True, slots=True)
class Report:
    """A job's results and timings."""

    state: State
    ok: int
    """Records written by this run, without failed ones."""
    failed: int
    skipped: int
    """Records that an earlier run had finished."""
    failures: Mapping[str, int]
    """Failed records by reason."""
    truncated: int
    split: int
    """Records longer than the model's maximum, that were computed in chunks."""
    chunks: int
    wall_s: float
    records_per_s: float
    """Of this run, including failed records."""
    tokens: int
    """Of successful records; 0 if cost is not in tokens."""
    tokens_per_s: float
    busy: float
    """Fraction of the wall time with a batch in the engine; the mean over several workers."""
    padding_efficiency: float
    """Real cost / computed cost; 1.0 if the engine does not pad."""
    batches: int
    mean_batch_size: float
    splits: int
    """Batches that were split and retried."""
    close_reasons: Mapping[CloseReason, int]
    times: StageTimes
    advice: str
    """One sentence of tuning advice."""
    damaged: tuple[PartDamaged, ...] = ()
    """Damaged parts of earlier runs. Their records were processed again, and count as ok or failed."""
    lanes: tuple[WorkerRow, ...] = ()
    """One per cluster worker; empty for a job in one process."""
    left_out: tuple[LeftOut, ...] = ()
    """Parts of the input that were not read, by reason."""
    nulled: int = 0
    """NaN and infinite values, which JSON lacks, written as null."""
    empty: int = 0
    """Records whose input is an empty text."""
    skipped_failed: int = 0
    """Number of skipped records that are dead letters."""
    model: str | None = None
    """The model as the user wrote it, with its commit, if it was downloaded."""
    precision: PrecisionChosen | None = None
    """The dtype that the model computed in, and why; None if the engine does not say."""
    budget: float | None = None
    """The last batch budget, in the engine's unit, if the job chose it; otherwise None."""
    memory: MemoryUsed | None = None
    """Peak memory of the process, if measured; otherwise None."""
    prefix_cache: PrefixCacheUsed | None = None
    """Prompt tokens, and how many came from the prefix cache; None if the engine has none."""
    causes: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds of the device by cause, the starting time included: see `headrace.observe.accounting.timeline.Cause`."""
    device: DeviceFigures | None = None
    """What the device did, if the engine measures it; otherwise None."""
    duplicates: int = 0
    """Records that got the answer of an equal one."""
    order: tuple[OrderChosen, ...] = ()
    """How many records were worked on in which order, and why; the first reason of each. Empty if it makes no
    difference."""
    advices: tuple[Advice, ...] = ()
    """Everything worth changing, what gains most first."""
    output: str | None = None
    """The file or folder of the job's output; None for an output of another kind."""
    errors: str | None = None
    """The file of the failed records beside it, if it has one."""
    steps: tuple[StepFigures, ...] = ()
    """For a job of several steps: each of them; all other figures are those of the last one that ran."""
    account: Account | None = field(default=None, repr=False)
    """Where the time went, in detail."""
    failed_records: tuple[RecordFailed, ...] = field(default=(), repr=False)
    """The first 1,000 failed records; the errors file has all of them."""

    def spoken(self) -> Report:
        """The report with its advice in the terms of the user's door; what is stored names flags."""
        advices = tuple(replace(one, text=spelled(one.text)) for one in self.advices)
        return replace(self, advice=spelled(self.advice), advices=advices)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        return notebook.as_html(self)

    def batches_table(self) -> pa.Table:
        """The first and the last 300 batches as an Arrow table; `.to_pandas()` makes a data frame of it.

        A log message says how many batches there were, if some are left out.
        """
        return notebook.batches_table(self.account, self.batches)

    def failures_table(self) -> pa.Table:
        """The first 1,000 failed records as an Arrow table: position, reason and message.

        A log message says how many failed, if some are left out; the errors file has each of them.
        """
        return notebook.failures_table(self.failed_records, self.failed)

    def records_table(self, most: int = 1_000) -> pa.Table:
        """Records as an Arrow table: the columns of the output, and the column `error`, which is null if none occurred.

        Reads the output as it is now: the first `most` finished records, and after them the first `most` failed ones.
        A log message says how many there are, if some are left out.

        Raises:
            ConfigError: the job has not finished, or its output is no file and no folder, or cannot be read.
        """
        if self.output is None or self.state != "finished":
            why = "its output is no file" if self.state == "finished" else f"the job was {self.state}"
            raise ConfigError(f"there is no table of records: {why}; run the job to its end, with a file as output")
        done = self.ok + self.failed + self.skipped
        return notebook.records_table(self.output, self.errors, most, done)

    def over_time_table(self) -> pa.Table:
        """Causes, records and cost over time as an Arrow table; `.to_pandas()` makes a data frame of it."""
        return notebook.over_time_table(self.account)


def both(one: PrefixCacheUsed, other: PrefixCacheUsed) -> PrefixCacheUsed:
    """The tokens of both together."""
    known = one.computed_s is not None and other.computed_s is not None
    return PrefixCacheUsed(
        one.queries + other.queries,
        one.hits + other.hits,
        one.computed + other.computed,
        other.at,
        one.generated + other.generated,
        (one.computed_s or 0.0) + (other.computed_s or 0.0) if known else None,
    )
