"""Measure a language model at several sizes of its steps, for `headrace tune`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from headrace.app.jobs.budgets import find_key, kept_steps
from headrace.app.jobs.job import Broadcast, build, check
from headrace.app.jobs.plan import Plan
from headrace.app.jobs.vllm_arguments import ADDITIONS, as_arguments, keep, with_arguments
from headrace.batching.continuous import ContinuousBatcher
from headrace.device.cache import TuningCache, described_cpu
from headrace.device.step_sizes import StepSize, StepTuner
from headrace.engines.base import Engine
from headrace.engines.capabilities import STEPPING
from headrace.engines.choosing.loading import load_engine
from headrace.errors import ConfigError, EngineError
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
_OTHER_ANSWERS = 0.01
"""An addition may change this share of the answers more than another size of the steps does."""


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
    texts: Mapping[int, object] = field(default_factory=dict, repr=False)
    """The answers, by the positions of the records; None for one that failed."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What another argument of vLLM does at the best size."""

    name: str
    arguments: Mapping[str, object]
    speed: float
    """Times as many records a second as without it; 0 if vLLM refuses it."""
    same: float
    """Share of the answers that are the same as without it."""
    stays: bool
    why_not: str


@dataclass(frozen=True, slots=True)
class StepGrid:
    """All measurements, and the best."""

    rows: tuple[StepRow, ...]
    chosen: StepRow
    cpu: str
    additions: tuple[Addition, ...] = ()

    @property
    def arguments(self) -> dict[str, object]:
        """Those of the additions that stay."""
        stay = [addition.arguments for addition in self.additions if addition.stays]
        return {name: value for arguments in stay for name, value in arguments.items()}


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
            config, row = plan.settings.config, functools.partial(_restarted, plan)
            grid = _searched(StepSize(128, 2_048), _OF_VLLM, seconds, row)
            if not config.engine_options.get("temperature"):  # drawn answers are others with speculation
                grid = _with_additions(grid, config.engine_options, row)
            keep(config, grid.chosen.size, grid.arguments)
            return grid
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
    TuningCache().write(find_key(stepping, plan.settings.config.task or ""), kept_steps(grid.chosen.size))
    return grid


def _restarted(plan: Plan, size: StepSize, additions: Mapping[str, object] = MappingProxyType({})) -> StepRow:
    """What vLLM does with a size and other arguments, which it takes when it starts."""
    config = with_arguments(plan.settings.config, {**as_arguments(size), **additions})
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


def _with_additions(grid: StepGrid, options: Mapping[str, object], row: Callable[..., StepRow]) -> StepGrid:
    """Try one after the other what else may make vLLM faster at the chosen size.

    An addition stays if it is clearly faster and changes no more answers than another size does.

    Args:
        options: of the user, whose own arguments stay as they are.
        row: what vLLM does with a size and more arguments.
    """
    size, base = grid.chosen.size, grid.chosen
    others = [_same(base, other) for other in grid.rows if other is not base]
    usual = sum(others) / len(others) if others else 1.0
    for name, arguments in ADDITIONS.items():
        if any(options.get(argument) is not None for argument in arguments):
            continue
        try:
            found = row(size, {**grid.arguments, **arguments})
            if _AS_GOOD * found.records_per_s > base.records_per_s:  # other work may have slowed it
                base = max(base, row(size, grid.arguments), key=_SPEED)
        except (ConfigError, EngineError) as error:
            addition = Addition(name, arguments, 0.0, 0.0, stays=False, why_not=str(error))
        else:
            speed, same = found.records_per_s / base.records_per_s, _same(base, found)
            slow, differs = _AS_GOOD * speed <= 1, same < usual - _OTHER_ANSWERS
            why_not = "other answers" if differs else "no faster" if slow else ""
            addition = Addition(name, arguments, speed, same, not why_not, why_not)
            base = found if addition.stays else base
        grid = replace(grid, additions=(*grid.additions, addition))
    return grid


def _same(one: StepRow, other: StepRow) -> float:
    """The share of the answers of `one` that `other` has too."""
    return sum(other.texts.get(position) == text for position, text in one.texts.items()) / max(len(one.texts), 1)


def _sample(plan: Plan, engine: Engine) -> tuple[BatcherPort, list[Work]]:
    job = build(plan, engine, StopRequest(), Broadcast(()))
    found = survey(job, spread=True).work
    if not found:
        raise ConfigError(f"{plan.settings.source} has no record that the model takes")
    return job.batcher, list(found[:: max(1, len(found) // _RECORDS)])


def _row(batcher: BatcherPort, size: StepSize, work: list[Work]) -> StepRow:
    stepping = batcher if isinstance(batcher, ContinuousBatcher) else None
    before, started = stepping.stats.total_batches if stepping else 0, time.perf_counter()
    texts: dict[int, object] = {}
    tokens = asyncio.run(_answered(batcher, work, texts))
    took = time.perf_counter() - started
    step_s = took / max(stepping.stats.total_batches - before, 1) if stepping else None
    return StepRow(size, tokens / took, len(work) / took, step_s, took, texts)


async def _answered(batcher: BatcherPort, work: list[Work], texts: dict[int, object] | None = None) -> float:
    """Answer these, and put the answers into `texts`; how many tokens they and their answers have."""
    tokens, texts = 0.0, {} if texts is None else texts
    async with batcher, aclosing(answers(batcher, streamed(in_order(work)))) as results:
        async for run, outputs, _ in results:
            tokens += sum(item.cost for item in run)
            for item, one in zip(run, outputs, strict=True):
                answer = one if isinstance(one, dict) else {}
                tokens += answer.get("completion_tokens", 0)
                texts[item.record.position] = answer.get("text")
    return tokens
