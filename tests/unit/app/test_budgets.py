"""A job's batches follow what is measured, within the memory there is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.app.jobs.budgets import (
    BudgetListener,
    StepListener,
    follow,
    steps_in,
)
from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.device.budget import BudgetTuner
from headrace.device.cache import TuningCache
from headrace.device.memory import AvailableMemory, MemoryModel, MemoryWatch, PeakMeter
from headrace.device.step_sizes import StepSize, StepTuner
from headrace.engines.choosing.config import EngineConfig
from headrace.events import BatchDone, BudgetChanged, Event, JobDone, StepDone, StepSizeChanged
from headrace.testing import FakeEngine

SETTINGS = EngineConfig(task="embed")


class TunableFake(FakeEngine):
    """One whose budget may be followed."""

    default_batch_cost = 1_024

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "model_digest": self._model}

    def hardware(self) -> Mapping[str, Any]:
        return {"device": "fake"}

    def dtype_speeds(self) -> Mapping[str, float]:
        return {}

    def forward_meter(self) -> None:
        pass


class SimulatedMemory(PeakMeter):
    """What a device of this model would have held."""

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self.held = model.fixed

    def restart(self) -> bool:
        return True

    def peak(self) -> int | None:
        return int(self.held)

    def run(self, tokens: float, length: float) -> float:
        needs = self._model.peak(tokens, length)
        self.held = max(self.held, needs)  # freed memory stays with the process
        return needs


def batcher(budget: float = 1_024) -> DynamicBatcher[Any, Any]:
    return DynamicBatcher(lambda batch: batch, target_batch_cost=budget, padded=True)


def done(number: int, size: int, computed: float, seconds: float) -> BatchDone:
    return BatchDone(number, size, 0, computed, computed, seconds, 0.0)


def run_batches(
    listener: BudgetListener, target: DynamicBatcher[Any, Any], count: int, seconds_per_token: float
) -> None:
    """Batches of which twice as large ones always pay."""
    for number in range(count):
        computed = target.target_batch_cost
        listener(done(number, 8, computed, 0.1 + computed * seconds_per_token))


def test_the_budget_follows_and_is_kept_for_the_next_job(tmp_path: Path) -> None:
    cache, told, target = TuningCache(tmp_path), list[Event](), batcher()
    listener = follow(SETTINGS, TunableFake(), target, told.append, cache)
    assert listener is not None
    run_batches(listener, target, 200, seconds_per_token=1e-6)
    assert target.target_batch_cost > 8_000
    assert isinstance(told[-1], BudgetChanged)
    listener(JobDone("finished", 0.0))
    later = batcher()
    assert follow(SETTINGS, TunableFake(), later, told.append, cache) is not None
    assert later.target_batch_cost >= told[-1].budget, "it begins where the other ended"
    other = batcher()
    follow(SETTINGS, TunableFake("another model"), other, told.append, cache)
    assert other.target_batch_cost <= 2_048


def test_what_the_user_set_is_left_alone() -> None:
    for settings in (EngineConfig(batch_tokens=512), EngineConfig(batch_size=4)):
        assert follow(settings, TunableFake(), batcher(), lambda event: None) is None
    assert follow(SETTINGS, FakeEngine(), batcher(), lambda event: None) is None


@pytest.mark.parametrize(
    ("start", "model", "limit"),
    [
        (256, MemoryModel(400e6, 60_000, 150), 2e9),  # a CPU
        (65_536, MemoryModel(1e9, 150_000, 0), 80e9),  # a GPU: the budget may grow eightfold
        (65_536, MemoryModel(1e9, 150_000, 0), 16e9),  # it is nearly there
        (65_536, MemoryModel(14e9, 400_000, 500), 80e9),  # a large model whose scores of attention are stored
    ],
)
def test_a_simulated_memory_is_filled_to_four_fifths_and_never_overflows(
    start: float, model: MemoryModel, limit: float, tmp_path: Path
) -> None:
    """10,000 mixed batches; larger ones always pay, so that nothing but the memory stops the budget."""
    chance = random.Random(3)
    device = SimulatedMemory(model)
    target = batcher(start)
    tuner = BudgetTuner(start, start / 4, 1e7)
    watch = MemoryWatch(AvailableMemory(int(limit), "a test"), device)
    listener = BudgetListener(target, tuner, watch, lambda event: None, (TuningCache(tmp_path), {}))
    worst = 0.0
    for number in range(10_000):
        length = (
            256 if number < 2 else min(round(chance.lognormvariate(4, 0.7)) + 4, 256)
        )  # a job begins with the longest
        size = max(1, int(target.target_batch_cost // length))
        needs = device.run(size * length, length) * chance.uniform(0.98, 1)  # room that is taken and not used
        worst = max(worst, device.held / limit)
        listener(done(number, size, size * length, 0.1 + size * length * 1e-9))
        assert needs <= limit
    assert 0.75 <= worst <= 0.85
    assert 0.75 <= model.peak(target.target_batch_cost, 256) / limit <= 0.85


def test_a_job_whose_first_budget_is_four_times_too_large_finishes(tmp_path: Path) -> None:
    room = 512
    sizes: list[int] = []

    def engine(batch: Sequence[int]) -> Sequence[int]:
        cost = len(batch) * max(batch)
        if cost > room:
            raise MemoryError(f"{cost} does not fit")
        sizes.append(cost)
        return batch

    async def work() -> list[int]:
        target = DynamicBatcher[int, int](
            engine,
            cost_estimator=lambda length: length,
            target_batch_cost=4 * room,
            padded=True,
            length_bucketing=True,
            listener=lambda event: listener(event),  # noqa: PLW0108 - it is made below
        )
        tuner = BudgetTuner(4 * room, 64, 64 * room)
        watch = MemoryWatch(AvailableMemory(1 << 40, "a test"), PeakMeter(tmp_path))
        listener = BudgetListener(target, tuner, watch, lambda event: None, (TuningCache(tmp_path), {}))

        async with target:
            found = [result async for _, result in target.as_completed(lengths())]
        assert target.target_batch_cost <= room
        return found

    async def lengths() -> Any:
        for number in range(5_000):
            yield number * 7919 % 60 + 1

    assert len(asyncio.run(work())) == 5_000
    assert max(sizes) <= room and sum(sizes) / len(sizes) > room / 4


class TwoSizes(StepTuner):
    """Finds what the test says."""

    slots = 64
    best = StepSize(64, 512)
    has_compared = True


def test_as_many_answers_join_as_steps_may_have_and_the_size_is_kept(tmp_path: Path) -> None:
    told: list[Event] = []
    cache, key = TuningCache(tmp_path), {"model": "m"}
    batcher: ContinuousBatcher[Any, Any] = ContinuousBatcher(lambda states: states, max_slots=9)
    tuner = TwoSizes(StepSize(64, 512), StepSize(256, 4_096))
    listener = StepListener(batcher, tuner, told.append, (cache, key))
    step = StepDone(0, 64, 1, 1, 0, 0, 1.0, 0.1, 0.0, 1.0)
    listener(step)
    assert batcher.stats.max_batch_size == 64 and told == []
    tuner.slots, tuner.best = 128, StepSize(128, 512)
    listener(step)
    listener(JobDone("finished", 1.0))
    [event] = told
    assert isinstance(event, StepSizeChanged) and (event.answers, event.tokens) == (128, 512)
    assert batcher.stats.max_batch_size == 128
    assert steps_in(cache.read(key)) == StepSize(128, 512)


@pytest.mark.parametrize("found", [None, {}, {"step_answers": 0, "step_tokens": 5}, {"step_answers": "8"}])
def test_a_size_that_nobody_wrote_is_ignored(found: Any) -> None:
    assert steps_in(found) is None
