"""Small requests beside large ones: batches are short while both come, and full otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.virtual_time import VirtualTime, now

from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.policy.waiting_queue import Share
from headrace.engines.base import Engine
from headrace.engines.capabilities import BESIDE
from headrace.engines.choosing.served import ServedModel
from headrace.events import Event
from headrace.serving.admission.batch_bound import BatchBound
from headrace.serving.limits import ServeLimits
from headrace.serving.service import Call, Service
from headrace.testing import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore::headrace.BlockedLoopWarning")  # on a busy machine

SLOPE_S, BASE_S = 42e-6, 3e-3
"""Of a batch of the default model on two cores of a CPU."""
FULL = 2048


async def receive() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("it never ends")


class BesideEngine(FakeEngine):
    """Computes short batches beside large ones."""

    beside_cost = FULL / 8
    leaves = False

    @property
    def beside(self) -> BesideEngine:
        return self

    def leave_room(self, leave: bool) -> None:
        self.leaves = leave


class Timed:
    """A service whose batches take as long as their padded cost tells, on two cores. With a `BesideEngine`, short ones
    take one of them, and so does a large one that leaves room."""

    def __init__(
        self, slope_s: float = SLOPE_S, base_s: float = BASE_S, measured: float = 1.0, engine: Engine | None = None
    ) -> None:
        self.durations: list[float] = []
        self.costs: list[int] = []
        self.slope_s, self.base_s = slope_s, base_s
        self.slower = 1.0
        """By how much other work on the machine delays batches."""
        self.batcher: DynamicBatcher[Any, Any] = DynamicBatcher(
            self._run,
            target_batch_cost=FULL,
            max_batch_size=256,
            batch_timeout_s=0.002,
            max_queue_size=1_000_000,
            prefetch_batches=0,
            padded=True,
            length_bucketing=2048,
            listener=self._heard,
        )
        self.engine = FakeEngine() if engine is None else engine
        beside = BESIDE.of(self.engine)
        self.express = None if beside is None else self.batcher.beside(beside.beside_cost, None)
        self.large = 0
        """Large batches that run now, with a `BesideEngine`."""
        model = ServedModel(("fake",))
        self.service = Service(model, "embed", self.engine, self.batcher, ServeLimits(), lambda: None, self.express)
        self.service.expect(measured * FULL / (slope_s * FULL + base_s))

    def _heard(self, event: Event) -> None:
        self.service.heard(event)

    async def _run(self, texts: list[str]) -> list[str]:
        self.costs.append(len(texts) * max(len(text.split()) for text in texts))
        short = self.express is not None and self.costs[-1] <= BesideEngine.beside_cost
        leaves = isinstance(self.engine, BesideEngine) and self.engine.leaves
        delayed = 1.5 if short and self.large and not leaves else 1.0  # three threads on two cores
        cores = 1 if short or leaves else 2
        self.durations.append(self.slower * delayed * (2 / cores * self.slope_s * self.costs[-1] + self.base_s))
        self.large += not short
        await asyncio.sleep(self.durations[-1])
        self.large -= not short
        return texts

    async def ask(self, texts: int, words: int, caller: Hashable, after_s: float = 0.0) -> float:
        """Seconds that a request takes."""
        await asyncio.sleep(after_s)
        began = now()
        await self.service.infer(["word " * words] * texts, texts * words, Call(receive, 300, caller))
        return now() - began


@pytest.mark.parametrize(("callers", "texts", "words"), [(8, 100, 256), (4, 1_000, 40), (40, 500, 40)])
def test_single_texts_wait_for_two_short_batches_at_most(
    virtual: VirtualTime, callers: int, texts: int, words: int
) -> None:
    async def main() -> list[float]:
        timed = Timed()
        async with timed.batcher:
            large = [asyncio.ensure_future(timed.ask(texts, words, f"large {n}")) for n in range(callers)]
            small = [timed.ask(1, 27, f"small {n % 8}", n * 0.02) for n in range(200)]
            found = await asyncio.gather(*small)
            for one in large:
                one.cancel()
        return sorted(found)

    assert virtual(main())[-10] < 0.075  # the first ones come before the durations are known


@pytest.mark.parametrize(("slope_s", "base_s"), [(1e-4, 0.009), (1.1e-4, 0.012), (1.2e-4, 0.014)])
@pytest.mark.parametrize(("callers", "texts"), [(4, 1_000), (40, 500)])
def test_beside_crowds_single_texts_take_three_times_as_long_as_alone(
    virtual: VirtualTime, callers: int, texts: int, slope_s: float, base_s: float
) -> None:
    """With batches as on two cores of a slow CPU, where 12 ms of a request are spent outside of the engine."""

    async def main() -> None:
        timed = Timed(slope_s, base_s)
        async with timed.batcher:
            alone = await asyncio.gather(*(timed.ask(1, 27, f"small {n % 16}", n * 0.02) for n in range(200)))
            large = [asyncio.ensure_future(timed.ask(texts, 40, f"large {n}")) for n in range(callers)]
            beside = await asyncio.gather(*(timed.ask(1, 27, f"small {n % 16}", n * 0.02) for n in range(200)))
            assert sorted(beside)[-3] + 0.012 < 3.3 * (sorted(alone)[-3] + 0.012)
            for one in large:
                one.cancel()

    virtual(main())


@pytest.mark.parametrize(("callers", "texts", "words"), [(8, 100, 256), (4, 1_000, 40), (40, 500, 40)])
def test_single_texts_overtake_crowds_where_the_engine_computes_both(
    virtual: VirtualTime, callers: int, texts: int, words: int
) -> None:
    async def main() -> None:
        engine = BesideEngine()
        timed = Timed(1.4e-4, 0.012, engine=engine)
        assert timed.express is not None
        async with timed.batcher, timed.express:
            alone = await asyncio.gather(*(timed.ask(1, 27, f"small {n % 16}", n * 0.02) for n in range(200)))
            timed.costs.clear()
            began = now()
            large = [asyncio.ensure_future(timed.ask(texts, words, f"large {n}")) for n in range(callers)]
            beside = await asyncio.gather(*(timed.ask(1, 27, f"small {n % 16}", n * 0.02) for n in range(200)))
            assert sorted(beside)[-3] + 0.012 < 3 * (sorted(alone)[-3] + 0.012)
            rate = sum(cost for cost in timed.costs if cost > BesideEngine.beside_cost) / (now() - began)
            assert rate > 0.45 * FULL / (1.4e-4 * FULL + 0.012), "half of the device, and full batches"
            assert engine.leaves
            await asyncio.sleep(2)
            await timed.ask(1, 27, "rare")
            assert not engine.leaves
            for one in large:
                one.cancel()

    virtual(main())


def test_keys_share_the_model_however_many_callers_each_has(virtual: VirtualTime) -> None:
    async def main() -> None:
        timed = Timed()
        async with timed.batcher:
            many = [asyncio.ensure_future(timed.ask(1_000, 40, Share("a", n))) for n in range(8)]
            small = [timed.ask(1, 27, Share("c", n % 4), 0.5 + n * 0.05) for n in range(40)]
            *found, _ = await asyncio.gather(*small, timed.ask(1_000, 40, Share("b", 0)))
            assert sum(timed.costs) < 3 * 40_000, "b has half, but every fourth batch is of those that waited longest"
            assert sorted(found)[-2] < 0.075
            for one in many:
                one.cancel()

    virtual(main())


def test_batches_are_full_without_small_requests_and_again_after_them(virtual: VirtualTime) -> None:
    async def main() -> None:
        timed = Timed()
        full_s = SLOPE_S * FULL + BASE_S
        async with timed.batcher:
            await asyncio.gather(*(timed.ask(200, 256, f"large {n}") for n in range(2)))
            assert min(timed.durations[:-1]) == pytest.approx(full_s)
            timed.durations.clear()
            large = asyncio.ensure_future(timed.ask(8_000, 256, "large"))
            await timed.ask(1, 27, "small", 0.5)
            await asyncio.sleep(1)
            assert timed.durations[-1] < 0.03
            await large
            assert timed.durations[-2] == pytest.approx(full_s)

    virtual(main())


@pytest.mark.parametrize(("measured", "slower"), [(1 / 4, 1.0), (1.0, 3.0)])  # at the warm-up, or from the crowd on
def test_other_work_on_the_machine_makes_no_tiny_batches(virtual: VirtualTime, measured: float, slower: float) -> None:
    async def main() -> None:
        timed = Timed(1.2e-4, 0.014, measured)
        async with timed.batcher:
            await asyncio.gather(*(timed.ask(1, 27, f"small {n}", n * 0.02) for n in range(20)))
            timed.slower = slower
            large = [asyncio.ensure_future(timed.ask(1_000, 40, f"large {n}")) for n in range(4)]
            await asyncio.gather(*(timed.ask(1, 27, f"small {n % 8}", n * 0.1) for n in range(100)))
            later = slice(len(timed.costs) // 3, None)
            share = sum(timed.costs[later]) / sum(timed.durations[later]) * slower * (1.2e-4 + 0.014 / FULL)
            assert 0.5 < share < 0.7
            for one in large:
                one.cancel()

    virtual(main())


def test_batches_that_gain_much_by_being_full_stay_nearly_full() -> None:
    bound = BatchBound(1_000)
    for cost in (10, 500, 1_000):
        bound.ran(cost, 1e-4 * cost + 0.1)
    bound.began(1_000, 0)
    bound.began(10, 0)
    most = bound.most(0)
    assert most / (1e-4 * most + 0.1) == pytest.approx(0.6 * 1_000 / 0.2)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 100)), max_size=20),
    st.floats(1, 1e6),
)
def test_whatever_was_seen_the_bound_lets_a_record_in(seen: list[tuple[float, float]], full: float) -> None:
    bound = BatchBound(full)
    for cost, duration_s in seen:
        bound.ran(cost, duration_s)
    bound.began(full, 0)
    bound.began(0, 0)
    assert 0 < bound.most(0) <= full
    bound.ended(full)
    assert bound.most(0) == full


def test_single_texts_that_came_before_a_crowd_do_not_share_a_batch_with_it(virtual: VirtualTime) -> None:
    async def main() -> None:
        timed = Timed(1.4e-4, 0.012, engine=BesideEngine())
        assert timed.express is not None
        async with timed.batcher, timed.express:
            small = [asyncio.ensure_future(timed.ask(1, 27, f"small {n}", n * 0.004)) for n in range(3)]
            large = asyncio.ensure_future(timed.ask(1_000, 27, "large", 0.010))
            assert max(await asyncio.gather(*small)) < 0.06  # a full batch takes 0.3 s
            assert timed.costs[0] == 27
            await large
            assert sum(timed.costs) == 1_003 * 27

    virtual(main())
