"""Choose the dtype and batch budget of a served model when it is loaded, by trying made-up texts."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.app.jobs.budgets import budget_in, find_key
from headrace.app.jobs.tuning import batches_of, exact, in_dtype, is_auto, is_int8, none_faster, try_faster
from headrace.batching.policy.cost import BatchCost, BatchLimits, batch_cost
from headrace.device.budget import Measured, knee
from headrace.device.cache import TuningCache
from headrace.device.memory import MemoryWatch
from headrace.engines.base import BatchEngine, Engine, Prepared
from headrace.engines.capabilities import BATCHES, TUNING, TunableEngine, memory_of
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import ConfigError, EngineError, EngineOutOfMemoryError
from headrace.jobs.pipeline.chunks import parts_of
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.measuring import fastest, timed
from headrace.records import Record

logger = logging.getLogger("headrace")

_WORDS = tuple("a canal feeds the mill whose wheel turns while water flows past locks and weirs to 3 ponds".split())  # noqa: SIM905
_LENGTHS = (3, 8, 12, 20, 35, 60, 90, 180)
"""In words: titles, queries, sentences and paragraphs."""
_TEXTS = 96
_PRECISION_S = 2.0
_BUDGETS_S = 4.0
_RUNS = 3
"""Runs of a budget's batch, of which the fastest counts."""
_FACTORS = (0.5, 1, 2, 4, 8)
"""The budgets that are tried, as multiples of the engine's own."""
_LEAST_FACTOR = 1 / 64
"""The least of those tried where larger ones run out of memory."""


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """How a served model runs."""

    engine: Engine
    budget: float | None
    """The most a batch may cost; None for the engine's default."""
    detail: str
    """What was found, in one line; empty if nothing was tried."""
    per_s: float | None = None
    """Measured cost per second; None if nothing was tried."""

    @property
    def tokens(self) -> int | None:
        """The budget in whole tokens."""
        return None if self.budget is None else round(self.budget)


def warm_up(config: EngineConfig, latency_target_s: float | None, cache: TuningCache | None = None) -> WarmedUp:
    """Load the model, choose what the user has not set, and measure the throughput.

    The choice is cached for the next start. The throughput is not: what else runs on the machine changes it.

    Args:
        latency_target_s: maximum seconds of a request; None for no target.
        cache: where choices are kept; None for the user's cache.

    Raises:
        ConfigError, EngineError: the model cannot be loaded.
    """
    engine = load_engine(exact(config))
    profile, tunable = profile_of(engine), TUNING.of(engine)
    if tunable is None or not (profile.pads and profile.counts_tokens):
        return WarmedUp(engine, None, "")
    cache = cache or TuningCache()
    fixed = {
        "dtype": (not is_auto(config), is_int8(config)),
        "batch_tokens": config.batch_tokens,
        "batch_size": config.batch_size,
    }
    key = {**find_key(tunable, config.task or ""), "served": {"latency_target_s": latency_target_s, **fixed}}
    kept = cache.read(key)
    if kept is None:
        engine, kept = _find(tunable, config, latency_target_s)
        cache.write(key, kept)
    elif isinstance(dtype := kept.get("dtype"), str) and dtype != engine.describe().get("dtype", ""):
        engine = _reloaded(tunable, config, dtype)
    budget = budget_in(kept)
    tuned = profile_of(engine).tuned(
        config.batch_tokens or (None if budget is None else round(budget)), config.batch_size
    )
    return WarmedUp(engine, budget, str(kept.get("detail", "")), _throughput(_batching(engine), tuned))


def _find(engine: TunableEngine, config: EngineConfig, target_s: float | None) -> tuple[Engine, dict[str, object]]:
    """The engine in the best dtype, and what was found."""
    chosen: Engine = engine
    profile = profile_of(engine)
    work, detail = _work(engine), ""
    is_open = is_auto(config) or is_int8(config)
    if work and is_open and engine.describe().get("dtype") == "float32" and not none_faster(engine, config):
        tuned = try_faster(engine, config, batches_of(work, profile), _PRECISION_S)
        chosen = tuned.engine
        if tuned.precision is not None:
            detail = f"{tuned.precision.dtype}: {tuned.precision.detail}"
    fixed = config.batch_tokens is not None or config.batch_size is not None
    budget = None if fixed or not work else _best_budget(_batching(chosen), work, profile.batch_cost, target_s)
    return chosen, {"dtype": chosen.describe().get("dtype", ""), "detail": detail, "budget": budget}


def _reloaded(engine: BatchEngine, config: EngineConfig, dtype: str) -> Engine:
    try:
        other = load_engine(in_dtype(config, dtype))
    except (EngineError, ConfigError) as error:  # the file may name anything
        logger.warning("%s was chosen for this model before, and cannot be loaded now: %s", dtype, error)
        return engine
    engine.close()
    return other


def _work(engine: BatchEngine) -> list[Work]:
    """Made-up texts, or pairs of them if the model takes pairs; empty if it takes neither."""
    texts = [
        " ".join(_WORDS[(number + place * 7) % len(_WORDS)] for place in range(_LENGTHS[number % len(_LENGTHS)]))
        for number in range(_TEXTS)
    ]
    for inputs in (texts, [(text, text) for text in texts]):
        ready = [one for one in engine.prepare(inputs) if isinstance(one, Prepared)]
        if ready:
            work = [Work(Record(n, str(n), {}), {}, one.payload, one.cost) for n, one in enumerate(ready)]
            return list(parts_of(work))
    return []


def _best_budget(engine: BatchEngine, work: Sequence[Work], own: float, target_s: float | None) -> float | None:
    """The knee of throughput over the budgets that leave some memory free; None if there was time for only one."""
    ends = time.perf_counter() + _BUDGETS_S
    points: list[Measured] = []
    watch = MemoryWatch(*memory_of(engine))
    # A request may wait for two batches: its own and the one before.
    most_s = None if target_s is None else target_s / 2
    full = math.inf
    factors = sorted(_FACTORS, key=lambda factor: abs(factor - 1))
    for factor in factors:
        if time.perf_counter() > ends:
            break
        if own * factor >= full or own * factor > (watch.bound or math.inf):
            continue
        batch = _full_batch(work, own * factor)
        try:
            timed(engine, batch)  # the first one of a shape is slower
            seconds = fastest(engine, batch, runs=_RUNS, ends=ends)
        except EngineOutOfMemoryError:
            full = own * factor
            if _LEAST_FACTOR < factor <= min(_FACTORS):
                factors.append(factor / 2)
            continue
        costs: list[float] = [item.cost for item in batch]
        watch.ran(len(batch), batch_cost(costs, padded=True))
        points.append(Measured(own * factor, sum(costs) / seconds, seconds))
    fitting = [point for point in points if point.budget <= (watch.bound or math.inf)]
    if not fitting:
        return watch.bound
    return knee(fitting, most_s).budget if len(points) > 1 or full < math.inf else None


def _batching(engine: Engine) -> BatchEngine:
    batching = BATCHES.of(engine)
    assert batching is not None, "it can be tuned, or is loaded as one that can"
    return batching


def _throughput(engine: BatchEngine, profile: EngineProfile) -> float | None:
    """Cost per second of a full batch; None if it could not be measured."""
    if not (work := _work(engine)):
        return None
    batch = _full_batch(work, profile.batch_cost)[: profile.batch_size]
    try:
        timed(engine, batch)  # the first one of a shape is slower
        _, seconds = timed(engine, batch)
    except EngineOutOfMemoryError:  # the batcher will split such batches
        return None
    return sum(item.cost for item in batch) / seconds


def _full_batch(work: Sequence[Work], budget: float) -> list[Work]:
    """Records of similar length, repeated until the budget is full."""
    ordered = sorted(work, key=lambda item: item.cost)
    middle = ordered[len(ordered) // 3 : 2 * len(ordered) // 3]
    size = BatchCost(BatchLimits(budget, sys.maxsize, padded=True)).fill(itertools.cycle(item.cost for item in middle))
    return list(itertools.islice(itertools.cycle(middle), size))
