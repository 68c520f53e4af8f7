"""Measure a language model at several sizes of its steps, for `headrace tune`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from headrace.app.jobs.budgets import find_key, kept_steps, vllm_key, with_steps
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
from headrace.jobs.pipeline.infer import in_order, streamed
from headrace.jobs.pipeline.job import BatcherPort, StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.survey import survey
from headrace.jobs.settings import JobSettings

_OF_VLLM = [64, 128, 256, 512], [1_024, 2_048, 4_096, 8_192]
"""Answers and tokens that are tried with vLLM, which starts anew for each."""
_AS_GOOD = 0.97
"""The first size stays if it has this share of the best one's speed: less may be noise."""
_RECORDS = 256
"""Records of the sample, each of which every size answers."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one size does."""

    size: StepSize
    tokens_per_s: float
    """Prompts and answers together, what was found in the prefix cache included."""
    records_per_s: float
    step_s: float | None
    """Seconds of a step, on average; None if the engine does not tell."""
    took_s: float


@dataclass(frozen=True, slots=True)
class StepGrid:
    """All measurements, and the best."""

    rows: tuple[StepRow, ...]
    chosen: StepRow
    cpu: str


_SPEED = operator.attrgetter("records_per_s")


def measure_steps(settings: JobSettings, seconds: float) -> StepGrid:
    """Answer a sample of the input at each size: first with more and fewer answers, then with more and fewer tokens.

    Blocks. The best size is stored for later jobs on this machine.

    Args:
        settings: of a job with a language model, of Headrace's own or on vLLM.
        seconds: of answering, after which no size is tried but for the first two.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used, or the engine has no steps to tune.
        JobError: the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    with check(settings) as plan:
        if plan.settings.config.engine == "vllm":
            grid = _searched(StepSize(128, 2_048), _OF_VLLM, seconds, functools.partial(_restarted, plan))
            return _kept(grid, vllm_key(plan.settings.config))
        with contextlib.closing(load_engine(plan.settings.config)) as engine:
            return _measured(plan, engine, seconds)


def _measured(plan: Plan, engine: Engine, seconds: float) -> StepGrid:
    stepping = STEPPING.of(engine)
    batcher, work = _sample(plan, engine)
    if stepping is None or not isinstance(batcher, ContinuousBatcher):
        raise ConfigError(
            f"task {plan.settings.config.task!r} has no steps to tune: its engine has none, or ``max_num_seqs`` and "
            "``max_num_batched_tokens`` are set"
        )

    def row(size: StepSize) -> StepRow:
        stepping.steps = StepTuner(size, size)
        stepping.forget()
        batcher.set_max_slots(size.answers)
        return _row(batcher, size, work)

    tuner = stepping.steps
    tuner.begin(None)
    first = tuner.best  # a job's, if it knows of no other
    asyncio.run(_answered(batcher, work[:8]))  # the first steps of a shape are slower
    grid = _searched(first, tuner.choices, seconds, row)
    return _kept(grid, find_key(stepping, plan.settings.config.task or ""))


def _kept(grid: StepGrid, key: Mapping[str, object]) -> StepGrid:
    TuningCache().write(key, kept_steps(grid.chosen.size))
    return grid


def _restarted(plan: Plan, size: StepSize) -> StepRow:
    """What vLLM does at a size, which it takes when it starts."""
    config = with_steps(plan.settings.config, size)
    with contextlib.closing(load_engine(config)) as engine:
        batcher, work = _sample(replace(plan, settings=replace(plan.settings, config=config)), engine)
        asyncio.run(_answered(batcher, work[:8]))
        return _row(batcher, size, work)


def _searched(
    first: StepSize, choices: tuple[list[int], list[int]], seconds: float, row: Callable[[StepSize], StepRow]
) -> StepGrid:
    """All numbers of answers with the first number of tokens, and then all numbers of tokens with the best of those.

    The first size and a faster one are measured again before that replaces it, and the faster measurement counts.
    Whatever `row` takes beside answering, such as vLLM's start, is not part of the seconds.
    """
    rows: dict[StepSize, StepRow] = {}

    def best_of(sizes: list[StepSize]) -> StepSize:
        for size in sizes:
            if size not in rows and (len(rows) < 2 or sum(one.took_s for one in rows.values()) < seconds):
                rows[size] = row(size)
        return max(rows.values(), key=_SPEED).size

    best = best_of([first, *(StepSize(count, first.tokens) for count in choices[0])])
    best = best_of([StepSize(best.answers, tokens) for tokens in choices[1]])

    def stays() -> bool:
        return rows[first].records_per_s >= _AS_GOOD * rows[best].records_per_s

    if not stays():  # other work makes an answer later, never earlier
        for size in (first, best):
            rows[size] = max(rows[size], row(size), key=_SPEED)
    ordered = sorted(rows.values(), key=lambda one: (one.size.tokens, one.size.answers))
    return StepGrid(tuple(ordered), rows[first if stays() else best], described_cpu())


def _sample(plan: Plan, engine: Engine) -> tuple[BatcherPort, list[Work]]:
    job = build(plan, engine, StopRequest(), Broadcast(()))
    found = survey(job, spread=True).work
    if not found:
        raise ConfigError(f"{plan.settings.source} has no record that the model takes")
    return job.batcher, list(found[:: max(1, len(found) // _RECORDS)])


def _row(batcher: BatcherPort, size: StepSize, work: list[Work]) -> StepRow:
    stepping = batcher if isinstance(batcher, ContinuousBatcher) else None
    before, started = stepping.stats.total_batches if stepping else 0, time.perf_counter()
    tokens = asyncio.run(_answered(batcher, work))
    took = time.perf_counter() - started
    step_s = took / max(stepping.stats.total_batches - before, 1) if stepping else None
    return StepRow(size, tokens / took, len(work) / took, step_s, took)


async def _answered(batcher: BatcherPort, work: list[Work]) -> float:
    """Answer these; how many tokens they and their answers have."""
    tokens = 0.0
    async with batcher, aclosing(answers(batcher, streamed(in_order(work)))) as results:
        async for run, outputs, _ in results:
            tokens += sum(item.cost for item in run)
            tokens += sum(one["completion_tokens"] for one in outputs if isinstance(one, dict))
    return tokens
