"""`BatchStats`: true at any moment, a frozen snapshot, and the sum of several is that of all."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.batching.doubles import Engine, outcomes
from tests.unit.virtual_time import VirtualTime

from headrace import BatchStats, DynamicBatcher
from headrace.batching.stats import WINDOW_S, BatchMeter, Durations


def test_counts_are_true_during_the_first_long_batch(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(seconds=1000), max_batch_size=2) as batcher:
            assert batcher.stats == BatchStats(max_batch_size=2)
            await asyncio.sleep(100)
            for record in range(5):
                await batcher.submit(record, estimated_cost=3)
            await asyncio.sleep(100)
            stats = batcher.stats
            assert (stats.total_submitted, stats.total_batches, stats.total_completed) == (5, 1, 0)
            assert (stats.in_flight, stats.waiting, stats.waiting_cost) == (2, 3, 9)
            assert (stats.busy_time_s, stats.idle_time_s) == (100, 100)
            assert stats.utilization == 0.5
            assert stats.window_utilization == 1
            assert (stats.avg_batch_size, stats.avg_batch_cost) == (2, 6)
            assert stats.batch_utilization == 1
            assert stats.close_reasons == {"full_size": 1}

    virtual(main())


def test_counts_are_true_when_idle(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(seconds=30), batch_timeout_s=0) as batcher:
            await (await batcher.submit(1))
            assert (batcher.stats.utilization, batcher.stats.window_utilization) == (1, 1)
            await asyncio.sleep(45)
            assert batcher.stats.utilization == 30 / 75
            assert batcher.stats.window_utilization == pytest.approx(15 / 60)
            await asyncio.sleep(225)
            assert batcher.stats.utilization == 0.1
            assert batcher.stats.window_utilization == 0
            await batcher.submit(1)
            await asyncio.sleep(15)
            assert batcher.stats.window_utilization == pytest.approx(15 / 60)

    virtual(main())


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_busy_seconds_of_the_window_are_those_of_the_last_minute(chance: random.Random) -> None:
    """Against every second counted one by one."""
    meter = BatchMeter()
    meter.start(0)
    running: list[int] = []
    busy: list[bool] = []
    for second in range(200):
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            meter.began(second, 0, 0, 0, "idle", ())
            running.append(second)
        for start in [start for start in running if chance.random() < 0.1]:
            running.remove(start)
            meter.ended(second, 0, 0, 0, second - start)
        busy.append(bool(running))
        stats = meter.snapshot(second + 1, 0, 0, 1)
        assert stats.busy_time_s == pytest.approx(sum(busy))
        assert stats.idle_time_s == pytest.approx(len(busy) - sum(busy))
        assert stats.window_s == min(second + 1, WINDOW_S)
        assert stats.window_busy_s == pytest.approx(sum(busy[-60:]))


def test_slots_that_overlap_count_once(virtual: VirtualTime) -> None:
    async def main() -> BatchStats:
        async with DynamicBatcher(Engine(seconds=10), max_batch_size=1, max_concurrent_batches=4) as batcher:
            await outcomes(await batcher.submit_batch(range(8)))
            return batcher.stats

    stats = virtual(main())
    assert (stats.busy_time_s, stats.idle_time_s, stats.total_batches) == (20, 0, 8)


def test_failures_and_those_who_left_are_no_completions(virtual: VirtualTime) -> None:
    async def main() -> BatchStats:
        engine = Engine(seconds=1, refuses=[0, 1])
        async with DynamicBatcher(engine, max_batch_size=4, on_error="isolate") as batcher:
            futures = await batcher.submit_batch(range(9))
            futures[8].cancel()  # while it waits
            await asyncio.sleep(0.5)
            futures[3].cancel()  # while it is processed
            await outcomes(futures)
            return batcher.stats

    stats = virtual(main())
    assert (stats.total_submitted, stats.total_batched) == (9, 8)
    assert (stats.total_failed, stats.total_completed) == (2, 5)


@pytest.mark.parametrize("bad", [set(), {2, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("on_error", ["fail", "isolate"])
def test_every_record_of_a_batch_is_counted_once_or_not_at_all(
    virtual: VirtualTime, bad: set[int], in_place: bool, on_error: Any
) -> None:
    """Two callers and a stream share batches; some leave while they are processed, some of these would have failed."""

    async def process(batch: list[int]) -> list[Any]:
        await asyncio.sleep(1)
        if not in_place and bad & set(batch):
            raise ValueError("bad")
        return [ValueError("bad") if record in bad else record for record in batch]

    async def main() -> None:
        async with DynamicBatcher(process, max_batch_size=8, on_error=on_error) as batcher:
            futures = await batcher.submit_batch(range(4))
            reading = asyncio.ensure_future(anext(batcher.map(range(4), return_exceptions=True)))
            await asyncio.sleep(0.5)
            futures[0].cancel()
            futures[2].cancel()
            reading.cancel()
            got = await outcomes(futures[1::2])
            await batcher.stop()
            stats = batcher.stats
            assert stats.total_batched == 8
            assert stats.total_completed == sum(isinstance(result, int) for result in got)
            assert stats.total_failed == sum(isinstance(result, ValueError) for result in got)

    virtual(main())


def test_padding_efficiency_is_real_over_padded_cost(virtual: VirtualTime) -> None:
    async def main(padded: bool) -> float:
        async with DynamicBatcher(Engine(), cost_estimator=lambda cost: cost, padded=padded) as batcher:
            assert batcher.stats.padding_efficiency == 1
            await outcomes(await batcher.submit_batch([1, 2, 3, 10]))
            return batcher.stats.padding_efficiency

    assert virtual(main(padded=True)) == 16 / 40
    assert virtual(main(padded=False)) == 1


def test_percentiles_of_waiting_and_of_processing(virtual: VirtualTime) -> None:
    async def main() -> BatchStats:
        async with DynamicBatcher(Engine(seconds=2), max_batch_size=1) as batcher:
            await outcomes(await batcher.submit_batch(range(100)))
            return batcher.stats

    stats = virtual(main())
    for share, seconds in [("p50", 98), ("p95", 188), ("p99", 196)]:  # the n-th waited 2 (n - 1) seconds
        assert seconds <= getattr(stats.queue_times, share) <= seconds * 1.2
        assert 2 <= getattr(stats.process_times, share) <= 2.4


@given(st.lists(st.floats(1e-6, 1800), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_is_at_most_a_fifth_too_high(durations: list[float], share: float) -> None:
    meter = BatchMeter()
    for duration in durations:
        meter.began(0, 0, 0, 0, "idle", ())
        meter.ended(duration, 0, 0, 0, duration)
    exact = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert exact * 0.999 <= meter.snapshot(0, 0, 0, 1).process_times.percentile(share) <= exact * 1.2


def test_no_durations_no_percentile() -> None:
    assert Durations().p99 == 0


def some_stats(virtual: VirtualTime, records: int, size: int) -> BatchStats:
    async def main() -> BatchStats:
        engine = Engine(seconds=records, refuses=[0])
        async with DynamicBatcher(engine, max_batch_size=size) as batcher:
            await outcomes(await batcher.submit_batch(range(records)))
            await asyncio.sleep(5)
            return batcher.stats

    return virtual(main())


def test_snapshots_of_replicas_add_up(virtual: VirtualTime) -> None:
    one, other = some_stats(virtual, 10, size=4), some_stats(virtual, 30, size=8)
    both = BatchStats.merge([one, other])
    for field in dataclasses.fields(BatchStats):
        value = getattr(both, field.name)
        if isinstance(value, int | float) and not field.name.startswith(("avg", "max")):
            assert value == getattr(one, field.name) + getattr(other, field.name), field.name
    assert both.max_batch_size == 8
    assert both.avg_batch_size == pytest.approx(40 / 7)
    assert both.avg_batch_cost == pytest.approx(40 / 7)
    assert both.utilization == pytest.approx((30 + 120) / (35 + 125))
    assert both.close_reasons["full_size"] == 2 + 3
    assert sum(both.process_times.counts) == 7
    assert BatchStats.merge([both]) == both
    assert BatchStats.merge([]) == BatchStats()


def test_a_snapshot_is_frozen_stays_as_it_is_and_can_be_sent(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(), max_batch_size=1) as batcher:
            await (await batcher.submit(1))
            stats = batcher.stats
            before: Any = dataclasses.replace(stats)
            await (await batcher.submit(2))
            assert stats == before != batcher.stats
            assert pickle.loads(pickle.dumps(stats)) == stats
            with pytest.raises(dataclasses.FrozenInstanceError):
                stats.total_completed = 7  # type: ignore[misc]

    virtual(main())


def test_the_recent_past_takes_bounded_memory() -> None:
    meter = BatchMeter()
    meter.start(0)
    for step in range(100_000):
        meter.began(step * 0.01, 0, 0, 0, "idle", ())
        meter.ended(step * 0.01 + 0.005, 0, 0, 0, 0.005)
    assert len(meter._past) <= 602
    assert meter.snapshot(1000, 0, 0, 1).window_utilization == pytest.approx(0.5, abs=0.01)
