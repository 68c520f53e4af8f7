"""Adjusts the batch budget of a running job to measurements and out-of-memory errors, and stores it for the next."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from importlib.metadata import version

from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.device.budget import BudgetTuner
from headrace.device.cache import TuningCache, cpu_facts
from headrace.device.memory import MemoryWatch
from headrace.device.step_sizes import StepSize, StepTuner
from headrace.engines.base import Engine
from headrace.engines.capabilities import STEPPING, TUNING, SteppingEngine, TunableEngine, memory_of
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.profile import EngineProfile, profile_of
from headrace.events import (
    BatchDone,
    BatchSplit,
    BudgetChanged,
    Event,
    JobDone,
    Listener,
    MemoryUsed,
    StepDone,
    StepSizeChanged,
)

_RANGE = (4, 32)
"""How many times smaller and larger the budget may become than the engine's default."""
_START = 4
"""On a CPU, a job begins with this multiple of the engine's default, which must also suit requests of a server."""


def find_key(engine: TunableEngine | SteppingEngine, task: str) -> dict[str, object]:
    """What a tuning result of this model on this machine depends on."""
    facts = engine.describe()
    return {
        "task": task,
        "model_digest": facts.get("model_digest"),
        "dtype": facts.get("dtype", ""),
        "headrace": own_version(),
        **cpu_facts(),
        **engine.hardware(),
    }


@functools.cache
def own_version() -> str:
    """The version of Headrace, whose results another version does not use."""
    return version("headrace")


def follow(
    config: EngineConfig, engine: Engine, batcher: object, tell: Listener, cache: TuningCache | None = None
) -> BudgetListener | None:
    """A listener that adjusts the budget; None if the user set it, or if the engine does not batch by tokens."""
    tunable = _followed(config, engine)
    if tunable is None or not isinstance(batcher, DynamicBatcher):
        return None
    cache = cache or TuningCache()
    own = batcher.target_batch_cost
    least, most = own / _RANGE[0], own * _RANGE[1]
    profile = profile_of(engine)
    start = starting_budget(config, engine, profile, cache)
    tuner = BudgetTuner(start, max(least, profile.max_model_len or least), most)
    watch = MemoryWatch(*memory_of(engine))
    keep = (cache, find_key(tunable, config.task or ""))
    return BudgetListener(batcher, tuner, watch, tell, keep)


def starting_budget(
    config: EngineConfig, engine: Engine, profile: EngineProfile, cache: TuningCache | None = None
) -> float:
    """The budget of a job's first batches: the result of an earlier job, or else the engine's default."""
    own = profile.batch_cost
    tunable = _followed(config, engine)
    if tunable is None:
        return own
    kept = budget_in((cache or TuningCache()).read(find_key(tunable, config.task or "")))
    first = own * _START if tunable.hardware().get("device", "cpu") == "cpu" else own
    return min(max(kept or first, own / _RANGE[0]), own * _RANGE[1])


def _followed(config: EngineConfig, engine: Engine) -> TunableEngine | None:
    """The engine, if its budget is adjusted: its model is known, and the user has not set a budget."""
    if config.batch_tokens is not None or config.batch_size is not None:
        return None
    profile = profile_of(engine)
    varies = profile.uniform or (profile.counts_tokens and profile.pads)
    if not varies or engine.describe().get("model_digest") is None:
        return None
    return TUNING.of(engine)


def budget_in(found: Mapping[str, object] | None) -> float | None:
    """The budget in a tuning result; None if there is none."""
    kept = (found or {}).get("budget")
    return float(kept) if isinstance(kept, (int, float)) and math.isfinite(kept) and kept >= 1 else None


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
        batcher: DynamicBatcher[object, object],
        tuner: BudgetTuner,
        memory: MemoryWatch,
        tell: Listener,
        keep: tuple[TuningCache, Mapping[str, object]],
    ) -> None:
        self._batcher = batcher
        self._tuner = tuner
        self._memory = memory
        self._tell = tell
        self._cache, self._key = keep
        self._split: set[int] = set()
        self._told = batcher.target_batch_cost
        self._told_memory = 0
        self._kept: float | None = None
        batcher.set_target_batch_cost(tuner.budget)

    def __call__(self, event: Event) -> None:
        match event:
            case BatchSplit():
                self._split.add(event.batch)
                if event.out_of_memory:
                    self._tuner.limit(self._batcher.target_batch_cost)
            case BatchDone():
                self._ran(event)
            case JobDone():
                self.tell()

    def _ran(self, event: BatchDone) -> None:
        if event.batch in self._split:  # its duration is that of its parts together
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

    def tell(self) -> None:
        """Tell how much memory was used, and keep the budget, where they have changed since the last time."""
        limit = self._memory.limit
        if self._memory.highest > self._told_memory:
            self._told_memory = self._memory.highest
            self._tell(
                MemoryUsed(
                    self._memory.highest,
                    limit.bytes,
                    limit.source,
                    time.monotonic(),
                    self._tuner.is_largest if self._tuner.has_compared else None,
                )
            )
        if self._tuner.has_compared and self._tuner.best != self._kept:
            self._kept = self._tuner.best
            self._cache.write(self._key, {"budget": self._tuner.best})


def follow_steps(
    config: EngineConfig, engine: Engine, batcher: object, tell: Listener, cache: TuningCache | None = None
) -> StepListener | None:
    """A listener that finds the size of steps; None for an engine without steps of its own."""
    stepping = STEPPING.of(engine)
    if stepping is None or not isinstance(batcher, ContinuousBatcher):
        return None
    cache, key = cache or TuningCache(), find_key(stepping, config.task or "")
    stepping.steps.begin(steps_in(cache.read(key)))
    return StepListener(batcher, stepping.steps, tell, (cache, key))


def steps_in(found: Mapping[str, object] | None) -> StepSize | None:
    """The size of steps in a tuning result; None if there is none."""
    answers, tokens = ((found or {}).get(name) for name in ("step_answers", "step_tokens"))
    if not (isinstance(answers, int) and isinstance(tokens, int) and min(answers, tokens) > 0):
        return None
    return StepSize(answers, tokens)


def kept_steps(size: StepSize) -> dict[str, object]:
    return {"step_answers": size.answers, "step_tokens": size.tokens}


class StepListener:
    """Lets as many answers into the engine as its steps may have, and keeps the size that was found.

    Called on the batcher's event loop.

    Args:
        batcher: of the engine.
        tuner: of the engine; it sees the steps itself.
        tell: receives an event for each new size.
        keep: the cache for the last size, and its key.
    """

    def __init__(
        self,
        batcher: ContinuousBatcher[object, object],
        tuner: StepTuner,
        tell: Listener,
        keep: tuple[TuningCache, Mapping[str, object]],
    ) -> None:
        self._batcher = batcher
        self._tuner = tuner
        self._tell = tell
        self._cache, self._key = keep
        self._slots = tuner.slots
        self._told = tuner.best
        batcher.set_max_slots(self._slots)

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobDone):
            self.keep()
        if not isinstance(event, StepDone):
            return
        if (slots := self._tuner.slots) != self._slots:
            self._slots = slots
            self._batcher.set_max_slots(slots)
        if (best := self._tuner.best) != self._told:
            self._told = best
            self._tell(StepSizeChanged(best.answers, best.tokens, time.monotonic()))

    def keep(self) -> None:
        """Keep the size for the next job, if others were tried."""
        if self._tuner.has_compared:
            self._cache.write(self._key, kept_steps(self._tuner.best))
