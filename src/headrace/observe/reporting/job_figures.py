"""The figures of the report page and of its JSON, from the summaries of a job's runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from headrace.events import CloseReason
from headrace.observe.accounting.histogram import Buckets, mean, merge_histograms, percentile
from headrace.observe.accounting.timeline import CAUSES, COMPUTING, Cause
from headrace.observe.reporting.figure import figure
from headrace.observe.reporting.formats import number, percent, seconds
from headrace.observe.reporting.summary import RunSummary, peak_of

T = TypeVar("T", bound=str)

_COLUMNS = 300
_STAGES = ("load", "prepare", "inference", "finish", "write")
_PERCENTILES = {
    "batch size (records)": "size",
    "batch cost": "cost",
    "batch duration (s)": "duration",
    "queue wait of the oldest record (s)": "waited",
    "request duration (s)": "request",
}
_SHARES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "highest": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """What the time of a device cost, in the unit of the price."""

    total: float = figure(
        0.0,
        "wall time at ``gpu_hour_price``; the table of causes says what each of them cost",
        label="cost of the run, per million records, per million tokens",
        what_to_do="change what costs most first",
    )
    per_million_records: float | None = None
    per_million_tokens: float | None = None
    causes: Mapping[Cause, float] = field(default_factory=dict)
    sequential: float = 0.0
    """What a loop would have cost that reads, prepares, computes, finishes and writes one after the other."""


@dataclass(frozen=True, slots=True)
class Held:
    """The records that an output holds now. The runs may have done more: what was damaged, retried or not committed."""

    ok: int
    failed: int
    failures: Mapping[str, int]
    """Failed records by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """What all runs of a job did together, and what its output holds; times in seconds. `figures` has the formulas.

    A page compares the figures that have a label; those with lines are at its top, each as its value and a label.
    """

    records_per_s: float = figure(
        0.0,
        "records of the runs, failed ones included, by the time without loading and tuning",
        unit="per second",
        always=True,
        label="records/s after the start",
        what_to_do="compare it between runs",
        text=lambda job: number(job.records_per_s, 1),
        lines=lambda job: [(number(job.records_per_s, 1), "records/s after the start")],
    )
    busy: float = figure(
        0.0,
        "fraction of that time with a batch on the device; in brackets, of all time",
        unit="fraction",
        always=True,
        label="device busy after the start",
        what_to_do="below 95 % in a long run: read the advice and the causes",
        text=lambda job: percent(job.busy),
        lines=lambda job: [
            (
                percent(job.busy),
                "device busy after the start"
                + (f" ({percent(job.busy_of_all)} of all time)" if job.causes["starting"] > 0.02 * job.wall_s else ""),
            )
        ],
    )
    padding: float = figure(
        0.0,
        "fraction of the computed cost that was padding",
        unit="fraction",
        always=True,
        label="padding in what was computed",
        what_to_do="above 15 %: let more records wait, see [tuning.md](tuning.md)",
        text=lambda job: percent(job.padding),
        lines=lambda job: [(percent(job.padding), "padding in what was computed")],
    )
    wall_s: float = figure(
        0.0,
        "all time, from before the model was loaded to the end",
        always=True,
        label="wall time",
        text=lambda job: seconds(job.wall_s),
        lines=lambda job: [(seconds(job.wall_s), "wall time")],
    )
    ok: int = figure(
        0,
        "records in the output now, and how many are among the dead letters",
        unit="records",
        always=True,
        label="records ok",
        what_to_do="read the errors file if many failed",
        text=lambda job: number(job.ok),
        lines=lambda job: [(number(job.ok), "records ok" + (f", {number(job.failed)} failed" if job.failed else ""))],
    )
    failed: int = figure(
        0,
        "records among the dead letters now",
        unit="records",
        label="records failed",
        lines=lambda _: [],
        text=lambda job: number(job.failed),
    )
    tokens_per_s: float = figure(
        0.0,
        "tokens of successful records by the time without loading and tuning, and all of "
        "them; for engines that count tokens",
        unit="per second",
        label="tokens/s after the start",
        what_to_do="compare it between jobs whose texts differ in length",
        text=lambda job: number(job.tokens_per_s),
        lines=lambda job: [(number(job.tokens_per_s), f"tokens/s, {number(job.tokens)} in all")] if job.tokens else [],
    )
    sequential_s: float = figure(
        0.0,
        "how many times as long a loop would have taken that reads, prepares, computes, "
        "finishes and writes in turn, from the measured times of the stages",
        unit="seconds",
        always=True,
        what_to_do="near 1: the job is limited by one stage, which overlapping cannot help",
        label="as long, one stage after the other",
        lines=lambda job: [
            (f"{number(job.times_slower, 2)} ×", f"as long, one stage after the other ({seconds(job.sequential_s)})")
        ],
    )
    runs: int = figure(0, "runs of the job")
    causes: Mapping[Cause, float] = figure(dict, "seconds of the device by cause")
    tokens: int = figure(0, "tokens of successful records", unit="tokens")
    busy_of_all: float = figure(0.0, "the same, of the whole wall time", unit="fraction")
    batches: int = figure(0, "batches or steps", unit="batches")
    mean_batch_size: float = figure(0.0, "records of a batch or step", unit="records")
    splits: int = figure(0, "batches that ran again in halves", unit="batches")
    peak_memory: float = figure(0.0, "the most bytes that the process held", unit="bytes")
    close_reasons: Mapping[CloseReason, int] = figure(dict, "batches by what ended them", unit="batches")
    failures: Mapping[str, int] = figure(dict, "failed records by reason", unit="records")
    percentiles: Mapping[str, Mapping[str, float]] = figure(
        dict, "of batch sizes, costs, durations and queue waits, and of a server's requests"
    )
    stages: Mapping[str, float] = figure(dict, "seconds of work by stage", unit="seconds")

    @property
    def times_slower(self) -> float:
        """How many times as long one stage after the other would have taken."""
        return self.sequential_s / self.wall_s if self.wall_s > 0 else 0.0

    def money(self, price: float) -> Money:
        """What it cost at `price` per hour of the device."""
        each = price / 3600
        total = self.wall_s * each
        return Money(
            total=total,
            per_million_records=total / self.ok * 1e6 if self.ok else None,
            per_million_tokens=total / self.tokens * 1e6 if self.tokens else None,
            causes={cause: spent * each for cause, spent in self.causes.items()},
            sequential=self.sequential_s * each,
        )


def histogram(runs: Sequence[RunSummary], name: str) -> Buckets:
    """A histogram of all runs."""
    return merge_histograms(run.account.histograms.get(name, ()) for run in runs)


def figures(runs: Sequence[RunSummary], held: Held | None = None) -> JobFigures:
    """The figures of a job with at least one run; without `held`, its records are those that the runs have done."""
    reports = [run.figures for run in runs]
    held = held or Held(
        sum(one.ok for one in reports),
        sum(one.failed for one in reports),
        _counted(one.failures for one in reports),
    )
    wall_s = sum(run.account.wall_s for run in runs)
    causes = {name: sum(run.account.causes.get(name, 0.0) for run in runs) for name in CAUSES}
    started = wall_s - causes["starting"]
    computing = sum(causes[name] for name in COMPUTING)
    useful = causes["real"] + causes["padding"]
    tokens = sum(one.tokens for one in reports)
    stages = {name: sum(float(getattr(one.times, name)) for one in reports) for name in _STAGES}
    return JobFigures(
        records_per_s=sum(one.records for one in reports) / started if started > 0 else 0.0,
        busy=min(computing / started, 1.0) if started > 0 else 0.0,
        padding=causes["padding"] / useful if useful > 0 else 0.0,
        wall_s=wall_s,
        ok=held.ok,
        failed=held.failed,
        tokens_per_s=tokens / started if started > 0 else 0.0,
        sequential_s=causes["starting"] + sum(stages.values()),
        runs=sum(run.runs for run in runs),
        causes=causes,
        tokens=tokens,
        busy_of_all=computing / wall_s if wall_s > 0 else 0.0,
        batches=sum(one.batches for one in reports),
        mean_batch_size=mean(histogram(runs, "size")),
        splits=sum(one.splits for one in reports),
        peak_memory=max(map(peak_of, runs)),
        close_reasons=_counted(one.close_reasons for one in reports),
        failures=held.failures,
        percentiles={
            words: {label: percentile(buckets, share) for label, share in _SHARES.items()}
            for words, name in _PERCENTILES.items()
            if (buckets := histogram(runs, name))
        },
        stages=stages,
    )


def _counted(every: Iterable[Mapping[T, int]]) -> dict[T, int]:
    counts: Counter[T] = Counter()
    for one in every:
        counts.update(one)
    return dict(counts.most_common())


def series(runs: Sequence[RunSummary]) -> tuple[float, list[dict[str, float]]]:
    """The bins of all runs one after the other, few enough for a picture: their width, and the sums of each."""
    width = max(run.account.bin_s for run in runs)
    while sum(run.account.wall_s for run in runs) / width > _COLUMNS:
        width *= 2
    rows: list[dict[str, float]] = []
    for run in runs:
        factor = round(width / run.account.bin_s)  # widths double, so that one is a multiple of the other
        length = max((len(row) for row in run.account.bins.values()), default=0)
        rows += [
            {name: _sum(name, row[start : start + factor]) for name, row in run.account.bins.items()}
            for start in range(0, length, factor)
        ]
    return width, rows


def _sum(name: str, values: Sequence[float]) -> float:
    return max(values, default=0.0) if name.startswith("max ") else sum(values)


def in_json(runs: Sequence[RunSummary], price: float | None, held: Held | None = None) -> dict[str, object]:
    """The figures as JSON; with a price also what they cost. The advice is that of the last run."""
    found = figures(runs, held)
    last = runs[-1].figures
    plain: dict[str, object] = {"advice": last.advice, "advices": [asdict(one) for one in last.advices]}
    plain |= {name: getattr(found, name) for name in JobFigures.__dataclass_fields__}
    if price is None:
        return plain
    money = found.money(price)
    return {**plain, "cost": {name: getattr(money, name) for name in Money.__dataclass_fields__}}
