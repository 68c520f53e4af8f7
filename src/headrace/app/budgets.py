"""Adjusts the batch budget of a running job to measurements, and stores the result for the next job."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from headrace.batching.dynamic import DynamicBatcher
from headrace.device.budget import BudgetTuner
from headrace.device.cache import TuningCache, cpu_facts
from headrace.device.memory import TARGET_SHARE, MemoryLimit, Peak, PeakMeter, fit, memory_limit
from headrace.engines.base import AnyEngine, TunableEngine, can_be_tuned
from headrace.engines.config import EngineConfig
from headrace.engines.profile import EngineProfile, profile_of
from headrace.events import BatchDone, BatchSplit, BudgetChanged, Event, JobDone, Listener, MemoryUsed

_RANGE = (4, 32)
"""How many times smaller and larger the budget may become than the engine's default."""
_PEAKS = 4
"""Batches that must have raised the peak before a bound is estimated from them."""
_NOISE = 1 << 20
"""Bytes: a smaller rise of the peak does not count."""


def find_key(engine: TunableEngine, task: str) -> dict[str, Any]:
    """What a tuning result of this model on this machine depends on."""
    facts = engine.describe()
    return {
        "task": task,
        "model_digest": facts.get("model_digest"),
        "dtype": facts.get("dtype", ""),
        "headrace": version("headrace"),
        **cpu_facts(),
        **engine.hardware(),
    }


def follow(
    config: EngineConfig, engine: AnyEngine, batcher: object, tell: Listener, cache: TuningCache | None = None
) -> BudgetListener | None:
    """A listener that adjusts the budget; None if the user set it, or if the engine does not batch by tokens."""
    if not isinstance(batcher, DynamicBatcher) or not _is_followed(config, engine):
        return None
    assert can_be_tuned(engine), "that is one of the conditions"
    cache = cache or TuningCache()
    own = batcher.target_batch_cost
    least, most = own / _RANGE[0], own * _RANGE[1]
    profile = profile_of(engine)
    start = starting_budget(config, engine, profile, cache)
    tuner = BudgetTuner(start, max(least, profile.max_model_len or least), most)
    on_cpu = engine.hardware().get("device", "cpu") == "cpu"
    watch = MemoryWatch(memory_limit(), PeakMeter() if on_cpu else None)
    keep = (cache, find_key(engine, config.task or ""))
    return BudgetListener(batcher, tuner, watch, tell, keep)


def starting_budget(
    config: EngineConfig, engine: AnyEngine, profile: EngineProfile, cache: TuningCache | None = None
) -> float:
    """The budget of a job's first batches: the result of an earlier job, or else the engine's default."""
    own = profile.batch_cost
    if not _is_followed(config, engine):
        return own
    assert can_be_tuned(engine), "that is one of the conditions"
    kept = budget_in((cache or TuningCache()).read(find_key(engine, config.task or "")))
    return min(max(kept or own, own / _RANGE[0]), own * _RANGE[1])


def _is_followed(config: EngineConfig, engine: AnyEngine) -> bool:
    """Whether the budget is adjusted: in tokens, for one of Headrace's own engines, and not set by the user."""
    if config.batch_tokens is not None or config.batch_size is not None:
        return False
    if not can_be_tuned(engine) or engine.describe().get("model_digest") is None:
        return False
    profile = profile_of(engine)
    return profile.counts_tokens and profile.pads


def budget_in(found: Mapping[str, Any] | None) -> float | None:
    """The budget in a tuning result; None if there is none."""
    kept = (found or {}).get("budget")
    good = isinstance(kept, (int, float)) and math.isfinite(kept) and kept >= 1
    return float(kept) if kept is not None and good else None


class MemoryWatch:
    """Estimates from measured batches how much memory a larger one would take.

    Args:
        limit: the memory that the process may use.
        meter: measures the peak; None if batches run in a device's memory.
    """

    def __init__(self, limit: MemoryLimit, meter: PeakMeter | None) -> None:
        self.limit = limit
        self._meter = meter if meter is not None and meter.restart() else None
        self._peaks: list[Peak] = []
        self._highest = 0.0
        self._longest = 0.0

    @property
    def highest(self) -> int:
        """The highest peak in bytes; 0 if unknown."""
        return round(self._highest)

    def ran(self, size: int, computed: float) -> float | None:
        """Count a batch; returns the budget that would fill the memory, once known."""
        peak = self._meter.peak() if self._meter is not None and size else None
        if peak is None:
            return None
        length = computed / size
        self._longest = max(self._longest, length)
        if self._highest and peak > self._highest + _NOISE:  # otherwise it used memory that an earlier one had left
            self._peaks.append(Peak(computed, length, peak))
        self._highest = max(self._highest, peak)
        if len(self._peaks) < _PEAKS:
            return None
        return fit(self._peaks).largest_budget(TARGET_SHARE * self.limit.bytes, self._longest)


class BudgetListener:
    """Sets the budget of the next batches from the durations of earlier ones. Called on the batcher's event loop.

    Args:
        batcher: has the budget.
        tuner: the policy.
        memory: bounds the budget.
        tell: receives an event for each new budget.
        keep: the cache for the last budget, and its key.
    """

    def __init__(
        self,
        batcher: DynamicBatcher[Any, Any],
        tuner: BudgetTuner,
        memory: MemoryWatch,
        tell: Listener,
        keep: tuple[TuningCache, Mapping[str, Any]],
    ) -> None:
        self._batcher = batcher
        self._tuner = tuner
        self._memory = memory
        self._tell = tell
        self._cache, self._key = keep
        self._split: set[int] = set()
        self._last_done = 0.0
        self._told = batcher.target_batch_cost
        batcher.set_target_batch_cost(tuner.budget)

    def __call__(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case BatchSplit():
                self._split.add(event.batch)
                if event.out_of_memory:
                    self._tuner.limit(self._batcher.target_batch_cost)
            case BatchDone():
                self._ran(event)
            case JobDone():
                self._end()
            case _:
                pass

    def _ran(self, event: BatchDone) -> None:
        # While the batch before it was computed, this one only waited.
        took_s = min(event.duration_s, event.at - self._last_done)
        self._last_done = event.at
        if event.batch in self._split:  # its duration is that of its parts together
            self._split.discard(event.batch)
        elif not event.failed:
            self._tuner.ran(event.padded_cost, event.cost, took_s)
            bound = self._memory.ran(event.size, event.padded_cost)
            if bound is not None:
                self._tuner.bound(bound)
        budget = self._tuner.budget
        if budget != self._batcher.target_batch_cost:
            self._batcher.set_target_batch_cost(budget)
        if self._tuner.best != self._told:
            self._told = self._tuner.best
            self._tell(BudgetChanged(self._told, time.monotonic()))

    def _end(self) -> None:
        limit = self._memory.limit
        if self._memory.highest:
            self._tell(MemoryUsed(self._memory.highest, limit.bytes, limit.source, time.monotonic()))
        if self._tuner.has_compared:
            self._cache.write(self._key, {"budget": self._tuner.best})
