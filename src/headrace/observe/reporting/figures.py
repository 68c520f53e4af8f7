"""The figures of a report, from the summaries of a job's runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from headrace.events import CloseReason
from headrace.observe.accounting.histogram import Buckets, mean, merge_histograms, percentile
from headrace.observe.accounting.timeline import CAUSES, COMPUTING, Cause
from headrace.observe.reporting.summary import RunSummary, peak_of

T = TypeVar("T", bound=str)

_SHARES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "highest": 1.0}


@dataclass(frozen=True, slots=True)
class Money:
    """What the time of a device cost, in the unit of the price."""

    total: float
    per_million_records: float | None
    per_million_tokens: float | None
    causes: Mapping[Cause, float]
    sequential: float
    """What a loop would have cost that reads, prepares, computes, finishes and writes one after the other."""


@dataclass(frozen=True, slots=True)
class Held:
    """The records that an output holds now. The runs may have done more: what was damaged, retried or not committed."""

    ok: int
    failed: int
    failures: Mapping[str, int]
    """Failed records by reason."""


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What all runs of a job did together, and what its output holds; times in seconds."""

    runs: int
    wall_s: float
    causes: Mapping[Cause, float]
    ok: int
    """Records in the output now, as are the failed ones."""
    failed: int
    records_per_s: float
    """Records that the runs have done, after the start, as are the next rates: without the time in which the model was
    loaded and tuned."""
    tokens: int
    tokens_per_s: float
    busy: float
    """Fraction of the time after the start with a batch in the engine."""
    busy_of_all: float
    """The same, of the whole wall time."""
    padding: float
    """Fraction of what was computed that was padding."""
    batches: int
    mean_batch_size: float
    splits: int
    sequential_s: float
    """What a loop would have taken that runs the stages one after the other, by their measured times."""
    peak_memory: float
    close_reasons: Mapping[CloseReason, int]
    failures: Mapping[str, int]
    percentiles: Mapping[str, Mapping[str, float]]
    """By what is counted: batch size, batch cost, batch seconds, queue seconds."""
    stages: Mapping[str, float]
    """Seconds of work by stage."""

    def money(self, price: float) -> Money:
        """What it cost at `price` per hour of the device."""
        each = price / 3600
        total = self.wall_s * each
        return Money(
            total,
            total / self.ok * 1e6 if self.ok else None,
            total / self.tokens * 1e6 if self.tokens else None,
            {cause: seconds * each for cause, seconds in self.causes.items()},
            self.sequential_s * each,
        )


def histogram(runs: Sequence[RunSummary], name: str) -> Buckets:
    """A histogram of all runs."""
    return merge_histograms(run.account.histograms.get(name, ()) for run in runs)


def figures(runs: Sequence[RunSummary], held: Held | None = None) -> JobFigures:
    """The figures of a job with at least one run; without `held`, its records are those that the runs have done."""
    causes: dict[Cause, float] = {name: sum(run.account.causes.get(name, 0.0) for run in runs) for name in CAUSES}
    wall = sum(run.account.wall_s for run in runs)
    computing = sum(causes[name] for name in COMPUTING)
    started = wall - causes["starting"]
    ok, failed, tokens, batches = (sum(getattr(run.figures, name) for run in runs) for name in _COUNTS)
    held = held or Held(ok, failed, _counted(run.figures.failures for run in runs))
    stages = {name: sum(float(getattr(run.figures.times, name)) for run in runs) for name in _STAGES}
    useful = causes["real"] + causes["padding"]
    sizes = histogram(runs, "size")
    return JobFigures(
        runs=sum(run.runs for run in runs),
        wall_s=wall,
        causes=causes,
        ok=held.ok,
        failed=held.failed,
        records_per_s=(ok + failed) / started if started > 0 else 0.0,
        tokens=tokens,
        tokens_per_s=tokens / started if started > 0 else 0.0,
        busy=min(computing / started, 1.0) if started > 0 else 0.0,
        busy_of_all=computing / wall if wall > 0 else 0.0,
        padding=causes["padding"] / useful if useful > 0 else 0.0,
        batches=batches,
        mean_batch_size=mean(sizes),
        splits=sum(run.figures.splits for run in runs),
        sequential_s=causes["starting"] + sum(stages.values()),
        peak_memory=max(map(peak_of, runs)),
        close_reasons=_counted(run.figures.close_reasons for run in runs),
        failures=held.failures,
        percentiles={
            words: {label: percentile(buckets, share) for label, share in _SHARES.items()}
            for words, buckets in (
                ("batch size (records)", sizes),
                ("batch cost", histogram(runs, "cost")),
                ("batch duration (s)", histogram(runs, "duration")),
                ("queue wait of the oldest record (s)", histogram(runs, "waited")),
                ("request duration (s)", histogram(runs, "request")),
            )
            if buckets
        },
        stages=stages,
    )


_COLUMNS = 300
_COUNTS = ("ok", "failed", "tokens", "batches")
_STAGES = ("load", "prepare", "inference", "finish", "write")


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
