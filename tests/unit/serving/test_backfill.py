"""Bulk work beside requests, in virtual time: an engine that takes 10 ms and 1 ms for each unit of cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.engines.base import Prepared
from headrace.errors import StoppedError
from headrace.events import Event, RequestDone
from headrace.serving.admission.backfill import Backfill
from headrace.testing import FakeEngine, FakeRequest, FakeStepEngine

BASE_S, UNIT_S = 0.010, 0.001


class Bench:
    """A batcher with bulk work and requests, and what was seen of both."""

    def __init__(self, target_s: float | None, budget: int = 100) -> None:
        self.engine = FakeEngine()
        self.engine.pads = False
        self.engine.default_batch_cost = budget
        self.batches: list[list[str]] = []
        self.online_s: list[float] = []
        self.held = 0
        self.batcher: DynamicBatcher[str, str] = DynamicBatcher(
            self._process, target_batch_cost=budget, batch_timeout_s=0, listener=self._listen
        )
        self.fill = Backfill(self.engine, self.batcher, target_s, lambda: self.held)

    def _listen(self, event: Event) -> None:
        self.fill.listen(event)

    async def _process(self, records: list[str]) -> list[str]:
        self.batches.append(records)
        await asyncio.sleep(BASE_S + UNIT_S * len(records))
        return records

    async def request(self) -> None:
        began = now()
        self.held += 1
        await (await self.batcher.submit("request", estimated_cost=1))
        self.held -= 1
        self.online_s.append(now() - began)

    async def bulk(self, count: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.fill.run(Prepared("bulk", 1), "job")) for _ in range(count)]


def play(virtual: VirtualTime, bench: Bench, main: Callable[[], Any]) -> None:
    async def run() -> None:
        async with bench.batcher:
            await main()

    virtual(run())


def test_without_a_target_batches_are_full(virtual: VirtualTime) -> None:
    bench = Bench(None)

    async def main() -> None:
        await asyncio.gather(*await bench.bulk(1000))

    play(virtual, bench, main)
    assert len(bench.batches) <= 12
    assert bench.fill.done == 1000


def test_a_target_keeps_requests_within_it_and_the_engine_busy(virtual: VirtualTime) -> None:
    bench = Bench(target_s=0.075)

    async def main() -> None:
        began = now()
        bulk = await bench.bulk(5000)
        for _ in range(40):
            await asyncio.sleep(0.037)
            await bench.request()
        spent = now() - began
        assert bench.batcher.stats.busy_time_s / spent > 0.95
        for task in bulk:
            task.cancel()

    play(virtual, bench, main)
    late = sorted(bench.online_s)[-5:]  # the first ones come before anything is learned
    assert late[0] <= 0.075
    assert bench.fill.done > 1500  # of the 3,400 or so that the engine alone could do


def test_a_target_that_cannot_be_kept_starves_no_bulk_work(virtual: VirtualTime) -> None:
    bench = Bench(target_s=0.001)

    async def main() -> None:
        await asyncio.gather(*await bench.bulk(20))

    play(virtual, bench, main)
    assert bench.fill.done == 20


def test_what_delays_requests_besides_batches_is_made_up_for(virtual: VirtualTime) -> None:
    """Each request takes 30 ms more than its batches: the plan learns it from those that come late."""
    bench = Bench(target_s=0.075)

    async def main() -> None:
        bulk = await bench.bulk(30_000)
        for number in range(600):
            await asyncio.sleep(0.020 + 0.0023 * (number % 13))  # at every moment of a batch
            await bench.request()
            bench.online_s[-1] += 0.030
            bench.fill.listen(RequestDone("/v1/embeddings", "POST", 200, bench.online_s[-1], now()))
            bench.fill.listen(RequestDone("/v1/files", "POST", 200, 60.0, now()))  # an upload is not what is promised
        for task in bulk:
            task.cancel()

    play(virtual, bench, main)
    settled = bench.online_s[100:]
    assert sum(took > 0.075 for took in settled) <= 0.02 * len(settled)
    assert bench.fill.done > 4_000


def test_a_request_that_waited_for_its_model_to_be_loaded_is_not_late() -> None:
    bench = Bench(target_s=0.075)
    before = bench.fill.margin.value
    bench.fill.listen(RequestDone("/v1/embeddings", "POST", 200, 20.05, 20.05, waited_s=20.0))
    assert bench.fill.margin.value >= before
    bench.fill.listen(RequestDone("/v1/embeddings", "POST", 200, 20.05, 20.05, waited_s=19.0))
    assert bench.fill.margin.value < before


def test_requests_go_first(virtual: VirtualTime) -> None:
    bench = Bench(None, budget=10)

    async def main() -> None:
        bulk = await bench.bulk(200)
        await asyncio.sleep(0.005)
        await bench.request()
        assert bench.online_s[0] < 0.06
        for task in bulk:
            task.cancel()

    play(virtual, bench, main)
    assert "request" in bench.batches[1]


def test_what_is_cancelled_leaves_no_trace(virtual: VirtualTime) -> None:
    bench = Bench(None, budget=10)

    async def main() -> None:
        bulk = await bench.bulk(100)
        await asyncio.sleep(0.001)
        for task in bulk:
            task.cancel()
        await asyncio.gather(*bulk, return_exceptions=True)
        assert not bench.fill._admitted
        await asyncio.gather(*await bench.bulk(10))

    play(virtual, bench, main)
    assert bench.fill.done == 10
    assert bench.fill.waiting == 0


def test_what_waits_is_refused_when_the_server_stops(virtual: VirtualTime) -> None:
    bench = Bench(None, budget=10)

    async def main() -> None:
        bulk = await bench.bulk(100)
        await asyncio.sleep(0)
        bench.fill.refuse()
        results = await asyncio.gather(*bulk, return_exceptions=True)
        assert any(isinstance(result, StoppedError) for result in results)

    play(virtual, bench, main)


@pytest.mark.parametrize(("target_s", "most"), [(None, 8), (1.0, 5)])
def test_slots_stay_free_for_as_many_requests_as_there_lately_were(
    virtual: VirtualTime, target_s: float | None, most: int
) -> None:
    engine = FakeStepEngine(max_slots=8)
    held = [2]

    async def main() -> None:
        batcher: ContinuousBatcher[Any, Any] = ContinuousBatcher(engine, max_slots=8)
        fill = Backfill(engine, batcher, target_s, lambda: held[0])
        async with batcher:
            asks = [Prepared(FakeRequest("one two three"), 3) for _ in range(40)]
            await asyncio.gather(*(fill.run(ask, "job") for ask in asks))

    virtual(main())
    assert max(map(len, engine.steps)) == most


def test_what_comes_after_the_batcher_has_stopped_is_for_the_next_server(virtual: VirtualTime) -> None:
    bench = Bench(None)

    async def run() -> None:
        async with bench.batcher:
            pass
        with pytest.raises(StoppedError):
            await bench.fill.run(Prepared("bulk", 1), "job")

    virtual(run())
