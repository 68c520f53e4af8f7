"""One function makes the batcher for every kind of engine, for jobs and servers alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime

from headrace.engines.base import Engine
from headrace.engines.profile import BatcherSettings, EngineProfile, PayloadCalls, profile_of
from headrace.events import BatchFormed, Event, StepDone
from headrace.testing import FakeEngine, FakeStepEngine, FakeStreamEngine

TEXTS = [" ".join(["word"] * (1 + number % 7)) for number in range(40)]


def run(virtual: VirtualTime, engine: Engine, profile: EngineProfile) -> tuple[list[Any], list[Event]]:
    """The outputs, in order, and what the batcher told."""
    events: list[Event] = []
    ready: list[Any] = engine.prepare(TEXTS)
    settings = BatcherSettings(events.append, cost_estimator=lambda payload: len(str(payload).split()))

    async def main() -> list[Any]:
        async with profile.kind.batcher(engine, profile, PayloadCalls(), settings) as batcher:
            return await asyncio.gather(*[await batcher.submit(one.payload) for one in ready])

    return virtual(main()), events


def test_batches_keep_to_budget_and_size(virtual: VirtualTime) -> None:
    engine = FakeEngine()
    outputs, events = run(virtual, engine, profile_of(engine).tuned(20, 5))
    assert outputs == [engine.vector(text) for text in TEXTS]
    formed = [event for event in events if isinstance(event, BatchFormed)]
    assert max(event.padded_cost for event in formed) <= 20
    assert max(event.size for event in formed) == 5


def test_steps_keep_to_slots_and_budget(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=5, max_cost=1_000, most=7)
    outputs, events = run(virtual, engine, profile_of(engine))
    assert outputs == TEXTS
    assert max(event.size for event in events if isinstance(event, StepDone)) == 5
    narrow = FakeStepEngine(max_slots=5, max_cost=1_000, most=7)
    _, events = run(virtual, narrow, profile_of(narrow).tuned(14))
    assert max(event.size for event in events if isinstance(event, StepDone)) < 5


def test_an_engine_that_batches_by_itself_is_kept_busy(virtual: VirtualTime) -> None:
    engine = FakeStreamEngine(max_in_flight=6, seconds=1.0)
    outputs, _ = run(virtual, engine, profile_of(engine))
    assert len(outputs) == len(TEXTS)
    assert engine.most_in_flight == 6


@pytest.mark.parametrize(
    ("engines_own", "asked", "waited_s"), [(None, None, 0.05), (0.3, None, 0.3), (0.3, 0.002, 0.002), (0.0, None, 0.0)]
)
def test_how_long_a_record_waits_for_others(
    virtual: VirtualTime, engines_own: float | None, asked: float | None, waited_s: float
) -> None:
    engine = FakeEngine()
    profile = replace(engine.profile, batch_delay_s=engines_own)
    settings = BatcherSettings(lambda event: None, batch_delay_s=asked)

    async def main() -> float:
        async with profile.kind.batcher(engine, profile, PayloadCalls(), settings) as batcher:
            started = asyncio.get_running_loop().time()
            await (await batcher.submit("alone"))
            return asyncio.get_running_loop().time() - started

    assert virtual(main()) == pytest.approx(waited_s, abs=1e-6)
