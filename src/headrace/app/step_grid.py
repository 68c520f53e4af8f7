"""Measure a language model at several sizes of its steps, for `headrace tune`."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import time
from contextlib import aclosing
from dataclasses import dataclass

from headrace.app.jobs.budgets import find_key, kept_steps
from headrace.app.jobs.job import Broadcast, build, check
from headrace.app.jobs.plan import Plan
from headrace.batching.continuous import ContinuousBatcher
from headrace.device.cache import TuningCache, described_cpu
from headrace.device.step_sizes import StepSize, StepTuner
from headrace.engines.base import Engine
from headrace.engines.capabilities import STEPPING
from headrace.engines.choosing.loading import load_engine
from headrace.errors import ConfigError
from headrace.jobs.pipeline.chunks import answers
from headrace.jobs.pipeline.infer import stream_in_order
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.survey import survey
from headrace.jobs.settings import JobSettings

_RECORDS = 256
"""Of the sample, each of which every size answers."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one size does."""

    size: StepSize
    tokens_per_s: float
    """Of prompts and answers, those that were found in the prefix cache included."""
    records_per_s: float
    step_s: float
    """Seconds of a step, on average."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """All measurements, and the best."""

    rows: tuple[StepRow, ...]
    chosen: StepRow
    cpu: str


def measure_steps(settings: JobSettings, seconds: float) -> StepGrid:
    """Answer a sample of the input at each size: first with more and fewer answers, then with more and fewer tokens.

    Blocks. The best size is stored for later jobs on this machine.

    Args:
        settings: of a job with a language model of Headrace's own.
        seconds: no size is tried after these, but for the first two.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used, or the engine has no steps to tune.
        JobError: the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    with check(settings) as plan, contextlib.closing(load_engine(plan.settings.config)) as engine:
        return _measured(plan, engine, seconds)


def _measured(plan: Plan, engine: Engine, seconds: float) -> StepGrid:
    stepping = STEPPING.of(engine)
    job = build(plan, engine, StopRequest(), Broadcast(()))
    batcher = job.batcher
    if stepping is None or not isinstance(batcher, ContinuousBatcher):
        raise ConfigError(
            f"task {plan.settings.config.task!r} has no steps to tune: its engine has none, or ``max_num_seqs`` and "
            "``max_num_batched_tokens`` are set"
        )
    found = survey(job, spread=True).work
    work = list(found[:: max(1, len(found) // _RECORDS)])
    if not work:
        raise ConfigError(f"{plan.settings.source} has no record that the model takes")
    ends = time.perf_counter() + seconds
    rows: dict[StepSize, StepRow] = {}

    def measured(sizes: list[StepSize]) -> StepSize:
        for size in sizes:
            if size not in rows and (len(rows) < 2 or time.perf_counter() < ends):
                stepping.steps = StepTuner(size, size)
                stepping.forget()
                batcher.set_max_slots(size.answers)
                rows[size] = _row(batcher, size, work)
        return max(rows.values(), key=operator.attrgetter("records_per_s")).size

    tuner, (counts, lengths) = stepping.steps, stepping.steps.choices
    asyncio.run(_answered(batcher, work[:8]))  # the first steps of a shape are slower
    first = tuner.next
    best = measured([first, *(StepSize(n, first.tokens) for n in counts)])
    best = measured([StepSize(best.answers, n) for n in lengths])
    TuningCache().write(find_key(stepping, plan.settings.config.task or ""), kept_steps(best))
    return StepGrid(
        tuple(sorted(rows.values(), key=lambda row: (row.size.tokens, row.size.answers))), rows[best], described_cpu()
    )


def _row(batcher: ContinuousBatcher[Work, object], size: StepSize, work: list[Work]) -> StepRow:
    steps, started = batcher.stats.total_batches, time.perf_counter()
    tokens = asyncio.run(_answered(batcher, work))
    took = time.perf_counter() - started
    return StepRow(size, tokens / took, len(work) / took, took / max(batcher.stats.total_batches - steps, 1))


async def _answered(batcher: ContinuousBatcher[Work, object], work: list[Work]) -> float:
    """Answer these; how many tokens they and their answers have."""
    tokens = 0.0
    async with batcher, aclosing(answers(batcher, stream_in_order(work))) as results:
        async for run, outputs, _ in results:
            tokens += sum(item.cost for item in run)
            tokens += sum(one["completion_tokens"] for one in outputs if isinstance(one, dict))
    return tokens
