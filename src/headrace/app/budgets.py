"""Lets the batches of a job follow what is found out about them while it runs, and keeps that for the next job."""

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
"""How many times smaller and larger than the engine's own the budget may become."""
_PEAKS = 4
"""Batches that must have taken new memory before a bound is reckoned from them."""
_NOISE = 1 << 20
"""Bytes: a batch that needs less than this more than the process held before says nothing."""


def find_key(engine: TunableEngine, task: str) -> dict[str, Any]:
    """What a finding about this model on this machine depends on."""
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
    """What to let hear the job's events; None where the user set the budget, or the engine batches otherwise."""
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
    """What the first batches of a job may cost: what an earlier job has found, or else the engine's own."""
    own = profile.batch_cost
    if not _is_followed(config, engine):
        return own
    assert can_be_tuned(engine), "that is one of the conditions"
    kept = budget_in((cache or TuningCache()).read(find_key(engine, config.task or "")))
    return min(max(kept or own, own / _RANGE[0]), own * _RANGE[1])


def _is_followed(config: EngineConfig, engine: AnyEngine) -> bool:
    """Whether the budget is to be found: one of tokens, of a model of Headrace's own, that the user did not set."""
    if config.batch_tokens is not None or config.batch_size is not None:
        return False
    if not can_be_tuned(engine) or engine.describe().get("model_digest") is None:
        return False
    profile = profile_of(engine)
    return profile.counts_tokens and profile.pads


def budget_in(found: Mapping[str, Any] | None) -> float | None:
    """The budget that was found before; None where none was."""
    kept = (found or {}).get("budget")
    good = isinstance(kept, (int, float)) and math.isfinite(kept) and kept >= 1
    return float(kept) if kept is not None and good else None


class MemoryWatch:
    """Learns from the batches that run how much memory a larger one would take.

    Args:
        limit: what the process may use.
        meter: measures what it used; None where the batches run in other memory.
    """

    def __init__(self, limit: MemoryLimit, meter: PeakMeter | None) -> None:
        self.limit = limit
        self._meter = meter if meter is not None and meter.restart() else None
        self._peaks: list[Peak] = []
        self._highest = 0.0
        self._longest = 0.0

    @property
    def highest(self) -> int:
        """The most that was held, in bytes; 0 where that is not known."""
        return round(self._highest)

    def ran(self, size: int, computed: float) -> float | None:
        """A batch of so many records and so much cost has run; the budget that would fill the memory, once known."""
        peak = self._meter.peak() if self._meter is not None and size else None
        if peak is None:
            return None
        length = computed / size
        self._longest = max(self._longest, length)
        if self._highest and peak > self._highest + _NOISE:  # else it ran in what an earlier one had left
            self._peaks.append(Peak(computed, length, peak))
        self._highest = max(self._highest, peak)
        if len(self._peaks) < _PEAKS:
            return None
        return fit(self._peaks).largest_budget(TARGET_SHARE * self.limit.bytes, self._longest)


class BudgetListener:
    """Hears how long batches take, and sets what the next may cost. It is called on the batcher's event loop.

    Args:
        batcher: whose budget it sets.
        tuner: the policy.
        memory: bounds the budget.
        tell: hears of each budget that was found.
        keep: where the last one is kept, and under which key.
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
        if event.batch in self._split:  # its time is that of its parts
            self._split.discard(event.batch)
        elif not event.failed:
            self._tuner.ran(event.padded_cost, event.cost, event.duration_s)
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
