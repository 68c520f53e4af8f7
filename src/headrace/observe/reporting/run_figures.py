"""The figures of a run, each declared once: `Report` is their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.events import (
    CloseReason,
    EndpointUsed,
    MemoryUsed,
    OrderChosen,
    PartDamaged,
    PrecisionChosen,
    PrefixCacheUsed,
    PromptsCompared,
    RecordFailed,
    StepSizeChanged,
)
from headrace.observe.accounting.accountant import NO_ACCOUNT, Account
from headrace.observe.accounting.device_limit import DeviceFigures, device_figures
from headrace.observe.accounting.input_size import NO_PROGRESS, StageProgress
from headrace.observe.accounting.timeline import Cause
from headrace.observe.reporting import lines, notebook
from headrace.observe.reporting.figure import figure
from headrace.observe.reporting.run_facts import Advice, RunFacts, WorkerRow
from headrace.records import LeftOut
from headrace.wording import spelled

if TYPE_CHECKING:
    import pyarrow as pa

State: TypeAlias = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds spent in each step, summed over workers. Steps overlap, so the sum exceeds the wall time."""

    load: float = 0.0
    prepare: float = 0.0
    starved: float = 0.0
    """The engine waited for input."""
    inference: float = 0.0
    """At least one batch was running."""
    finish: float = 0.0
    write: float = 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A job's results and timings; the formulas of its figures read `event_sums.Sums`.

    The order of the figures is that of their lines. A field without `figure` is filled in by a later step.
    """

    state: State = figure(
        "interrupted", "how the run ended", of=lambda run: run.ended.state if run.ended is not None else "interrupted"
    )
    ok: int = figure(
        0,
        "records of this run that are in the output (`ok`) or failed, and those that earlier runs had done",
        unit="records",
        of=lambda run: run.committed,
        adds="sum",
        required=True,
        label="records",
        text=lines.records,
        always=True,
    )
    """Records written by this run, without failed ones."""
    failed: int = figure(
        0,
        "records of this run that failed",
        unit="records",
        of=lambda run: run.failures.total(),
        adds="sum",
        required=True,
    )
    skipped: int = figure(0, "records that an earlier run had finished", unit="records", adds="sum", required=True)
    skipped_failed: int = figure(
        0,
        "how many of them are dead letters",
        unit="records",
        of=lambda run: run.started.failed_done if run.started else 0,
    )
    failures: Mapping[str, int] = figure(
        dict,
        "failed records by reason",
        unit="records",
        of=lambda run: dict(run.failures.most_common()),
        adds="sum",
        required=True,
        label="failed because",
        text=lambda found: lines.counted(found.failures),
    )
    left_out: tuple[LeftOut, ...] = figure(
        (),
        "what the job did not read, and why",
        of=lambda run: tuple(run.left_out.values()),
        label="left out of input",
        lines=lambda found: [("left out of input", str(one)) for one in found.left_out],
    )
    damaged: tuple[PartDamaged, ...] = figure(
        (),
        "records of damaged parts, which this run computed again",
        of=lambda run: tuple(run.damaged),
        label="recomputed",
        text=lines.damaged,
    )
    """Damaged parts of earlier runs. Their records were processed again, and count as ok or failed."""
    truncated: int = figure(
        0,
        "records longer than the model's maximum length, which were cut",
        unit="records",
        of=lambda run: run.stages["prepare"]["truncated"],
        adds="sum",
        required=True,
        label="truncated",
        text=lambda found: f"{lines.count(found.truncated, 'record')} cut to the model's maximum length",
    )
    split: int = figure(
        0,
        "records longer than the model's maximum length, which were computed in chunks",
        unit="records",
        of=lambda run: run.stages["prepare"]["split"],
        label="split",
        text=lines.split,
    )
    chunks: int = figure(0, "the chunks of these", unit="chunks", of=lambda run: run.stages["prepare"]["chunks"])
    empty: int = figure(
        0,
        "records whose input is an empty text",
        unit="records",
        of=lambda run: run.stages["prepare"]["empty"],
        label="empty",
        text=lambda found: f"{lines.count(found.empty, 'record')} with an empty text; ``on_empty=error`` fails them",
    )
    nulled: int = figure(
        0,
        "numbers that JSON cannot hold: NaN and infinities",
        of=lambda run: run.stages["write"]["nulled"],
        label="written as null",
        text=lambda found: f"{found.nulled:,} numbers that are NaN or infinite",
    )
    order: tuple[OrderChosen, ...] = figure(
        (),
        "how many records were worked on in which order, and why",
        of=lambda run: tuple(run.orders.values()),
        kept=True,
        label="order of work",
        lines=lines.order,
    )
    """How many records were worked on in which order, and why; the first reason of each. Empty if it makes no
    difference."""
    duplicates: int = figure(
        0,
        "records that got the answer of an equal one",
        unit="records",
        kept=True,
        label="duplicates",
        text=lambda found: f"{lines.count(found.duplicates, 'record')} with the answer of an equal one",
    )
    prefix_cache: PrefixCacheUsed | None = figure(
        None,
        "tokens of all prompts, those that the model computed, and those that came from the prefix cache",
        unit="tokens",
        kept=True,
        label="prompt tokens",
        text=lines.prompt_tokens,
    )
    """Prompt tokens, and how many came from the prefix cache; None if the engine has none."""
    wall_s: float = figure(
        0.0,
        "time from the first read to the end, without loading the model; records per second, failed ones included",
        unit="seconds",
        adds="sum",
        required=True,
        label="wall",
        text=lambda found: f"{lines.seconds(found.wall_s)}   {found.records_per_s:,.1f} records/s",
        always=True,
    )
    records_per_s: float = figure(
        0.0, "records by the wall time", unit="per second", of=lambda run: run.per_second(run.records)
    )
    tokens: int = figure(
        0,
        "tokens of successful records, and tokens per second",
        unit="tokens",
        adds="sum",
        required=True,
        label="tokens",
        text=lambda found: f"{found.tokens:,}   {found.tokens_per_s:,.0f} tokens/s",
    )
    """Tokens of successful records; 0 if cost is not in tokens."""
    tokens_per_s: float = figure(
        0.0, "tokens by the wall time", unit="per second", of=lambda run: run.per_second(run.tokens)
    )
    model: str | None = figure(
        None,
        "the model as you named it, with its commit if it was downloaded",
        label="model",
        text=lambda found: found.model,
    )
    precision: PrecisionChosen | None = figure(
        None,
        "the data type that the model computed in, and why: [tuning.md](tuning.md)",
        kept=True,
        label="precision",
        text=lambda found: f"{found.precision.dtype}: {found.precision.detail}",
    )
    budget: float | None = figure(
        None,
        "the cost of a batch that the job found to be fastest: [tuning.md](tuning.md)",
        of=lambda run: run.budget.budget if run.budget else None,
        kept=True,
        label="batch budget",
        text=lambda found: f"{found.budget:,.0f} tokens, found while the job ran",
    )
    """The last batch budget, in the engine's unit, if the job chose it; otherwise None."""
    step_size: StepSizeChanged | None = figure(
        None,
        "the most answers and tokens in a step of a language model that the job found to be fastest: "
        "[tuning.md](tuning.md)",
        kept=True,
        label="step size",
        text=lambda found: f"{found.step_size.answers:,} answers, {found.step_size.tokens:,} tokens",
    )
    memory: MemoryUsed | None = figure(
        None,
        "the most memory that the process or its GPU held, and of what",
        unit="bytes",
        adds="highest",
        required=True,
        label="memory",
        text=lines.memory,
    )
    busy: float = figure(
        0.0,
        "share of the wall time with a batch in the engine",
        unit="fraction",
        of=lambda run: run.busy_share,
        kept=True,
        label="engine busy",
        text=lambda found: f"{found.busy:.1%}" if found.batches else "",
        always=True,
    )
    """Fraction of the wall time with a batch in the engine; the mean over several workers."""
    device: DeviceFigures | None = figure(
        None,
        "what the device did, if the engine measures it",
        kept=True,
        of=lambda run: device_figures(run.device, run.wall_s, run.records, run.account.fixed_s, run.batches),
        lines=lambda found: lines.device(found.device) if found.batches else [],
        meanings=lines.DEVICE,
    )
    padding_efficiency: float = figure(
        1.0,
        "share of what was computed that is not padding",
        unit="fraction",
        of=lambda run: run.cost / run.padded_cost if run.padded_cost > 0 else 1.0,
        kept=True,
        label="padding efficiency",
        text=lambda found: f"{found.padding_efficiency:.1%}" if found.close_reasons else "",
        always=True,
    )
    """Real cost / computed cost; 1.0 if the engine does not pad."""
    batches: int = figure(
        0,
        "how many batches or steps, and their mean size",
        unit="batches",
        adds="sum",
        required=True,
        lines=lines.batches,
        meanings=lines.BATCHES,
    )
    mean_batch_size: float = figure(
        0.0, "records of a batch or step", unit="records", of=lambda run: run.per_batch(run.batched)
    )
    close_reasons: Mapping[CloseReason, int] = figure(
        dict,
        "batches by what ended them",
        unit="batches",
        of=lambda run: dict(run.reasons.most_common()),
        adds="sum",
        required=True,
    )
    splits: int = figure(
        0,
        "batches that failed or did not fit in memory",
        unit="batches",
        adds="sum",
        required=True,
        label="run again in halves",
        text=lambda found: lines.count(found.splits, "batch", "batches"),
    )
    lanes: tuple[WorkerRow, ...] = figure(
        (),
        "the records, batches and busy share of each worker",
        of=lambda run: run.worker_rows,
        required=True,
        lines=lambda found: [lines.worker(one) for one in found.lanes],
        label="worker 1",
    )
    times: StageTimes = figure(
        StageTimes,
        "seconds of work by stage",
        unit="seconds",
        adds="sum",
        required=True,
        of=lambda run: StageTimes(
            **{stage: run.stages[stage]["duration_s"] + 0.0 for stage in ("load", "prepare", "finish", "write")},
            starved=run.starved_s,
            inference=run.busy.seconds,
        ),
        lines=lines.times,
        meanings=lines.TIMES,
    )
    advice: str = figure("", "the most important thing to change, as one sentence", required=True)
    advices: tuple[Advice, ...] = figure((), "everything worth changing, what gains most first", required=True)
    causes: Mapping[Cause, float] = figure(
        dict,
        "seconds of the device by cause, the starting time included",
        unit="seconds",
        of=lambda run: run.account.causes,
    )
    """Seconds of the device by cause, the starting time included: see `headrace.observe.accounting.timeline.Cause`."""
    account: Account = figure(NO_ACCOUNT, "where the time went, in detail", in_repr=False)
    progress: StageProgress = figure(NO_PROGRESS, "how far the records have come", in_repr=False)
    failed_records: tuple[RecordFailed, ...] = figure(
        (), "the first 1,000 failed records", in_repr=False, of=lambda run: tuple(run.failed_records)
    )

    # What the rules of advice read besides.
    retry: bool = figure(
        False,
        "all records of this run had failed before",
        in_repr=False,
        of=lambda run: run.started is not None and run.started.retry,
    )
    fixed_s: float | None = figure(
        None,
        "what a batch takes beside what grows with its cost",
        in_repr=False,
        unit="seconds",
        of=lambda run: run.account.fixed_s,
    )
    fill_s: float = figure(
        0.0,
        "from the start of the job to its first batch",
        in_repr=False,
        unit="seconds",
        of=lambda run: run.account.fill_s,
    )
    mean_cost: float = figure(
        0.0, "cost of a batch, padding included", in_repr=False, of=lambda run: run.per_batch(run.padded_cost)
    )
    out_of_memory: int = figure(
        0, "batches that ran out of memory and ran again in halves", in_repr=False, unit="batches"
    )
    fitted: tuple[float, float] = figure(
        (0.0, 0.0), "records and computed cost of the largest batch that fitted", in_repr=False
    )
    prepared_chunks: int = figure(
        0,
        "chunks of records that were prepared, each by one worker",
        in_repr=False,
        unit="chunks",
        of=lambda run: run.stages["prepare"]["events"],
    )
    prepare_cpu_s: float | None = figure(None, "seconds of a core that preparing took", in_repr=False, unit="seconds")
    repeated: float = figure(
        0.0,
        "fraction of the compared records that are equal to an earlier one",
        in_repr=False,
        unit="fraction",
        of=lambda run: run.stages["prepare"]["repeated"] / max(run.stages["prepare"]["compared"], 1),
    )
    slots_full: float = figure(
        0.0,
        "fraction of the steps with all slots taken",
        in_repr=False,
        unit="fraction",
        of=lambda run: run.per_batch(run.full_steps),
    )
    prompts: PromptsCompared | None = figure(None, "what the first prompts have in common", in_repr=False)
    endpoint: EndpointUsed | None = figure(None, "what became of the requests to servers", in_repr=False)
    host: RunFacts = figure(RunFacts, "what the run had for its host stages", in_repr=False)

    output: str | None = None
    """The file or folder of the job's output; None for an output of another kind."""
    errors: str | None = None
    """The file of the failed records beside it, if it has one."""
    steps: tuple[StepFigures, ...] = ()
    """For a job of several steps: each of them; all other figures are those of the last one that ran."""

    @property
    def records(self) -> int:
        """Finished records of this run, failed ones included."""
        return self.ok + self.failed

    def spoken(self) -> Report:
        """The report with its advice with settings named as the user gives them; what is stored names flags."""
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
