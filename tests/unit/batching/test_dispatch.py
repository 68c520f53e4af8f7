"""When a batch is closed, and why: late binding, the timeout of the oldest, and each close reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.batching.doubles import Engine, outcomes
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.events import BatchDone, BatchFormed, Event


async def submit_all(batcher: DynamicBatcher[Any, Any], records: range | list[Any], **options: Any) -> list[Any]:
    return [await batcher.submit(record, **options) for record in records]


def test_what_arrives_while_the_engine_works_joins_the_next_batch(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, batch_timeout_s=1, max_batch_size=50) as batcher:
            futures = [await batcher.submit(0)]
            for record in range(1, 40):
                await asyncio.sleep(0.3)
                futures.append(await batcher.submit(record))
            await outcomes(futures)

    virtual(main())
    assert engine.batches == [[0, 1, 2, 3], [*range(4, 37)], [37, 38, 39]]
    assert engine.started == [pytest.approx(1), pytest.approx(11), pytest.approx(21)]


def test_a_record_alone_waits_exactly_the_timeout(virtual: VirtualTime) -> None:
    async def main() -> float:
        async with DynamicBatcher(Engine(), batch_timeout_s=123) as batcher:
            await (await batcher.submit(1))
            return now()

    assert virtual(main()) == 123


def test_the_timeout_counts_from_the_oldest_arrival_and_does_not_restart(virtual: VirtualTime) -> None:
    engine = Engine()

    async def main() -> None:
        async with DynamicBatcher(engine, batch_timeout_s=10) as batcher:
            for record in range(5):
                await batcher.submit(record)
                await asyncio.sleep(4)

    virtual(main())
    assert engine.started[0] == 10
    assert engine.batches[0] == [0, 1, 2]


def test_one_that_waited_for_the_slot_does_not_wait_for_company_as_well(virtual: VirtualTime) -> None:
    engine = Engine(seconds=30)

    async def main() -> None:
        async with DynamicBatcher(engine, batch_timeout_s=10) as batcher:
            await batcher.submit(0)
            await asyncio.sleep(12)
            await batcher.submit(1)
            await asyncio.sleep(28)
            await batcher.submit(2)

    virtual(main())
    assert engine.started == [10, 40]
    assert engine.batches == [[0], [1, 2]]


def test_a_batch_is_closed_only_for_a_free_slot_and_each_slot_takes_one(virtual: VirtualTime) -> None:
    engine = Engine(seconds=5)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=2, max_concurrent_batches=3) as batcher:
            await submit_all(batcher, range(10))

    virtual(main())
    assert engine.started == [0, 0, 0, 5, 5]
    assert engine.sizes == [2] * 5


REASONS: list[tuple[str, dict[str, Any], list[float]]] = [
    ("full_size", {"max_batch_size": 3}, [1, 1, 1, 1]),
    ("full_cost", {"target_batch_cost": 10}, [4, 4, 4]),
    ("full_cost", {"target_batch_cost": 10}, [5, 5]),
    ("full_cost", {"target_batch_cost": 10, "padded": True}, [2, 2, 5, 1]),
    ("full_cost", {"target_batch_cost": 10}, [11]),
    ("boundary", {"length_bucketing": True, "padded": True, "target_batch_cost": 40}, [15, *[1] * 25]),
    ("timeout", {}, [1, 1]),
    ("idle", {"batch_timeout_s": 0}, [1, 1]),
    ("idle", {"max_queue_cost": 7}, [3, 3, 3]),
]


@pytest.mark.parametrize(("reason", "options", "costs"), REASONS)
def test_each_close_has_its_reason(
    virtual: VirtualTime, reason: str, options: dict[str, Any], costs: list[float]
) -> None:
    events: list[Event] = []

    async def main() -> None:
        async with DynamicBatcher(Engine(), **{"batch_timeout_s": 60, **options}, listener=events.append) as batcher:
            for cost in costs:
                await batcher.submit(1, estimated_cost=cost)
            await asyncio.sleep(100)

    virtual(main())
    first = next(event for event in events if isinstance(event, BatchFormed))
    assert first.reason == reason
    assert first.at == (60 if reason == "timeout" else 0)


def test_a_batch_closed_by_the_end_says_drain(virtual: VirtualTime) -> None:
    events: list[Event] = []

    async def main() -> float:
        async with DynamicBatcher(Engine(), batch_timeout_s=60, listener=events.append) as batcher:
            await batcher.submit(1)
        return now()

    assert virtual(main()) == 0
    assert [event.reason for event in events if isinstance(event, BatchFormed)] == ["drain"]


def test_a_mapped_input_that_has_ended_waits_for_no_company_and_hurries_nobody_after_it(virtual: VirtualTime) -> None:
    events: list[Event] = []

    async def main() -> float:
        async with DynamicBatcher(Engine(), batch_timeout_s=60, listener=events.append) as batcher:
            assert [result async for result in batcher.map([1, 2, 3])] == [2, 4, 6]
            assert now() == 0
            async for _ in batcher.map([1] * 5000):
                break  # what is left behind must not hurry anybody either
            await asyncio.sleep(1)
            start = now()
            await (await batcher.submit(4))
            return now() - start

    assert virtual(main()) == 60
    assert events[0].reason == "drain"  # type: ignore[union-attr]  # the first event of a batcher is BatchFormed


def test_an_oversized_record_goes_alone_or_is_refused(virtual: VirtualTime) -> None:
    engine = Engine()

    async def main() -> None:
        async with DynamicBatcher(engine, target_batch_cost=10) as batcher:
            for cost in (3, 11, 3):
                await batcher.submit(cost, estimated_cost=cost)

    virtual(main())
    assert engine.batches == [[3], [11], [3]]


def test_late_arrivals_of_like_length_are_batched_with_their_like(virtual: VirtualTime) -> None:
    engine = Engine(seconds=1)

    async def main() -> float:
        options: dict[str, Any] = {"target_batch_cost": 64, "padded": True, "length_bucketing": True}
        async with DynamicBatcher(engine, cost_estimator=lambda record: record, **options) as batcher:
            await submit_all(batcher, [1, 32, 2, 31, 4, 30, 1, 2] * 8)
        return batcher.stats.padding_efficiency

    assert virtual(main()) > 0.9
    assert all(max(batch) <= 2 * min(batch) for batch in engine.batches[:-1])


def test_events_tell_of_each_batch_and_of_the_time_the_slot_stood_free(virtual: VirtualTime) -> None:
    events: list[Event] = []

    async def main() -> None:
        engine = Engine(seconds=2, refuses=[3])
        async with DynamicBatcher(engine, max_batch_size=2, padded=True, listener=events.append) as batcher:
            await asyncio.sleep(7)
            futures = [await batcher.submit(record, estimated_cost=record) for record in (1, 4, 3, 2)]
            await outcomes(futures)

    virtual(main())
    assert events == [
        BatchFormed(0, size=2, cost=5, padded_cost=8, reason="full_size", starved_s=7, at=7),
        BatchDone(0, size=2, failed=0, cost=5, padded_cost=8, duration_s=2, at=9),
        BatchFormed(1, size=2, cost=5, padded_cost=6, reason="full_size", starved_s=0, at=9, waited_s=2),
        BatchDone(1, size=2, failed=2, cost=5, padded_cost=6, duration_s=2, at=11),
    ]


def test_events_tell_how_long_records_were_held_back_for_company(virtual: VirtualTime) -> None:
    """Not the time in which there was none, nor that in which the engine worked."""
    events: list[Event] = []

    async def main() -> None:
        async with DynamicBatcher(Engine(seconds=2), batch_timeout_s=5, listener=events.append) as batcher:
            await asyncio.sleep(7)
            first = await batcher.submit(1)
            await asyncio.sleep(1)
            await asyncio.gather(first, await batcher.submit(2))

    virtual(main())
    assert events[0] == BatchFormed(0, 2, 2, 2, "timeout", starved_s=12, at=12, company_s=5, waited_s=5)


@pytest.mark.parametrize("bad", [BatchFormed, BatchDone])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_listener_that_raises_is_reported_and_stops_nothing(
    virtual: VirtualTime, bad: type[Event], mapped: bool
) -> None:
    def listener(event: Event) -> None:
        if isinstance(event, bad) and event.batch == 0:  # type: ignore[union-attr]  # of these two each has one
            raise OSError("disk full")

    async def first_two(batcher: DynamicBatcher[int, int]) -> list[Any]:
        if mapped:
            return [result async for result in batcher.map([1, 2], return_exceptions=True)]
        return await outcomes(await batcher.submit_batch([1, 2]))

    async def main() -> tuple[list[Any], int]:
        async with DynamicBatcher(Engine(), listener=listener) as batcher:
            return await first_two(batcher), await (await batcher.submit(5))

    results, later = virtual(main())
    assert later == 10
    assert results == [2, 4]
    assert "disk full" in virtual.problems.pop()


def test_a_full_room_is_not_waited_with_though_the_batch_is_not_full(virtual: VirtualTime) -> None:
    """The one for whom there is no room comes while the dispatcher already waits for company."""
    engine = Engine()

    async def main() -> None:
        async with DynamicBatcher(engine, batch_timeout_s=60, max_queue_cost=5) as batcher:
            await batcher.submit(1, estimated_cost=4)
            await asyncio.sleep(3)
            await batcher.submit(2, estimated_cost=4)
            await asyncio.sleep(1000)

    virtual(main())
    assert engine.started == [3, 63]


def count_calls(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return fn(*args)

    return counted, calls


def test_the_dispatcher_sleeps_while_nothing_can_change(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arrival that does not fill the batch costs no look at all the others: 1,000 of them, a few looks."""

    async def main() -> int:
        async with DynamicBatcher(Engine(), batch_timeout_s=60, max_batch_size=2000) as batcher:
            queue = batcher._submission.queue  # type: ignore[union-attr]  # it runs
            counted, looks = count_calls(queue.oldest_arrival)
            monkeypatch.setattr(queue, "oldest_arrival", counted)
            for record in range(1000):
                await batcher.submit(record)
                await asyncio.sleep(0.01)
            return len(looks)

    assert virtual(main()) <= 2
