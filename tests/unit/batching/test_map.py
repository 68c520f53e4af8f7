"""Streams of records through a batcher: order, bounded look-ahead, errors, and turning away."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.batching.doubles import Engine, double
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.errors import ConfigError, NotRunningError, StoppedError

SMALL: dict[str, Any] = {"max_batch_size": 4, "max_queue_size": 4, "prefetch_batches": 0}
"""Eight may wait."""


async def every(results: AsyncIterator[Any]) -> list[Any]:
    return [result async for result in results]


async def read_into(seen: list[Any], results: AsyncIterator[Any]) -> None:
    async for result in results:
        seen.append(result)  # noqa: PERF401  # `extend` would keep nothing if `results` raised


def counting(upto: int | None = None) -> tuple[Iterator[int], list[int]]:
    """An iterator of 0, 1, 2, ..., and what has been read of it."""
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in itertools.count() if upto is None else range(upto):
            read.append(number)
            yield number

    return numbers(), read


@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 70), st.integers(1, 3), st.booleans(), st.booleans())
def test_results_come_in_input_order(costs: list[int], size: int, slots: int, bucketing: bool, estimated: bool) -> None:
    engine = Engine(seconds=1)

    async def main() -> list[int]:
        estimator = (lambda record: record % 10) if estimated else None
        options: dict[str, Any] = {"max_batch_size": size, "max_concurrent_batches": slots, "max_queue_size": 5}
        async with DynamicBatcher(engine, cost_estimator=estimator, length_bucketing=bucketing, **options) as batcher:
            return await every(batcher.map(records))

    records = [number * 10 + cost for number, cost in enumerate(costs)]
    assert VirtualTime()(main()) == [double(record) for record in records]
    assert sorted(itertools.chain(*engine.batches)) == records


def test_in_completion_order_a_slow_batch_holds_up_nobody(virtual: VirtualTime) -> None:
    async def process(batch: list[int]) -> list[int]:
        await asyncio.sleep(10 if 0 in batch else 1)
        return batch

    async def main() -> tuple[list[int], list[int]]:
        async with DynamicBatcher(process, max_batch_size=2, max_concurrent_batches=2) as batcher:
            unordered = await every(batcher.map(range(6), ordered=False))
            pairs = await every(batcher.as_completed(range(6)))
            assert all(record == result for record, result in pairs)
            return unordered, [record for record, _ in pairs]

    assert virtual(main()) == ([2, 3, 4, 5, 0, 1], [2, 3, 4, 5, 0, 1])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("estimated", [True, False])
def test_an_endless_input_is_read_only_as_far_as_there_is_room(
    virtual: VirtualTime, ordered: bool, estimated: bool
) -> None:
    async def main() -> None:
        records, read = counting()
        estimator = (lambda record: 1) if estimated else None
        async with DynamicBatcher(Engine(seconds=1), cost_estimator=estimator, **SMALL) as batcher:
            results = batcher.map(records, ordered=ordered)
            for taken in range(1, 200):
                await anext(results)
                await asyncio.sleep(10)  # a slow consumer
                assert len(read) <= taken + 8 + 4 + 3 * 64  # waiting, running, and runs on their way in and out
                assert batcher.stats.waiting <= 8
            await results.aclose()

    virtual(main())


@pytest.mark.parametrize("ordered", [True, False])
def test_the_input_s_own_error_comes_after_the_results_of_what_came_before_it(
    virtual: VirtualTime, ordered: bool
) -> None:
    def records() -> Iterator[int]:
        yield from range(100)
        raise OSError("the disk is gone")

    async def main() -> list[int]:
        seen: list[int] = []
        async with DynamicBatcher(Engine(seconds=1), **SMALL) as batcher:
            with pytest.raises(OSError, match="the disk is gone"):
                await read_into(seen, batcher.map(records(), ordered=ordered))
        return seen

    assert sorted(virtual(main())) == [double(record) for record in range(100)]


def test_a_bad_record_stands_in_its_place_or_is_raised(virtual: VirtualTime) -> None:
    engine = Engine(refuses=[5, 7])

    async def main() -> None:
        async with DynamicBatcher(engine, on_error="isolate") as batcher:
            results = await every(batcher.map(range(20), return_exceptions=True))
            assert [number for number, result in enumerate(results) if isinstance(result, ValueError)] == [5, 7]
            pairs = await every(batcher.as_completed(range(20)))
            assert {record for record, result in pairs if isinstance(result, ValueError)} == {5, 7}
            seen: list[int] = []
            with pytest.raises(ValueError, match=r"cannot process \[5\]"):
                await read_into(seen, batcher.map(range(20)))
            assert seen == [0, 2, 4, 6, 8]

    virtual(main())


def test_a_record_whose_cost_cannot_be_told_fails_alone(virtual: VirtualTime) -> None:
    def cost(record: Any) -> int:
        return 1 // record if record == 0 else record  # type: ignore[no-any-return]

    async def main() -> list[Any]:
        async with DynamicBatcher(Engine(), cost_estimator=cost, target_batch_cost=9, oversized="reject") as batcher:
            return await every(batcher.map([1, 0, -1, 2, 10, 3, float("nan")], return_exceptions=True))

    kinds = [type(result).__name__ for result in virtual(main())]
    assert kinds == ["int", "ZeroDivisionError", "CostError", "int", "RecordTooLargeError", "int", "CostError"]


@pytest.mark.parametrize("ordered", [True, False])
def test_turning_away_gives_every_place_back_and_runs_nothing_more(virtual: VirtualTime, ordered: bool) -> None:
    engine = Engine(seconds=1)

    async def main() -> None:
        records, read = counting()
        async with DynamicBatcher(engine, **SMALL) as batcher:
            async for _ in batcher.map(records, ordered=ordered):
                break
            await asyncio.sleep(0.1)
            assert batcher.stats.waiting == 0
            running = len(engine.batches)
            await asyncio.sleep(50)
            assert len(engine.batches) == running
            assert len(read) < 200
            assert await (await batcher.submit(3)) == 6

    virtual(main())


def test_turning_away_from_an_input_that_has_failed_leaves_no_error_behind(virtual: VirtualTime) -> None:
    def records() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    async def main() -> None:
        async with DynamicBatcher(Engine(), max_batch_size=1) as batcher:
            results = batcher.map(records())
            assert await anext(results) == 2
            await asyncio.sleep(1)
            await results.aclose()

    virtual(main())


def test_a_slow_async_input_is_batched_by_the_timeout(virtual: VirtualTime) -> None:
    engine = Engine()

    async def records() -> AsyncIterator[int]:
        for number in range(6):
            yield number
            await asyncio.sleep(2)

    async def main() -> list[int]:
        async with DynamicBatcher(engine, batch_timeout_s=5) as batcher:
            return await every(batcher.map(records()))

    assert virtual(main()) == [0, 2, 4, 6, 8, 10]
    assert engine.batches == [[0, 1, 2], [3, 4, 5]]
    assert engine.started == [5, 11]


def test_a_fast_input_fills_whole_batches(virtual: VirtualTime) -> None:
    engine = Engine(seconds=1)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=100) as batcher:
            await every(batcher.map(range(1000)))

    virtual(main())
    assert engine.sizes == [100] * 10


def test_two_streams_share_the_engine(virtual: VirtualTime) -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        async def consume(name: str, count: int) -> None:
            await every(batcher.map(range(count)))
            ended.append(name)

        async with DynamicBatcher(Engine(seconds=1), max_batch_size=10, max_queue_size=100) as batcher:
            await asyncio.gather(consume("long", 1000), consume("short", 20))
        return ended

    assert virtual(main()) == ["short", "long"]


def test_priority_puts_a_stream_before_another(virtual: VirtualTime) -> None:
    engine = Engine(seconds=1)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=10, max_queue_size=1000) as batcher:
            await asyncio.gather(every(batcher.map(range(50))), every(batcher.map(range(100, 150), priority=1)))

    virtual(main())
    first = [record >= 100 for batch in engine.batches[1:] for record in batch]
    assert first == sorted(first, reverse=True)


@pytest.mark.parametrize("records", [5, None])
def test_what_is_no_iterable_is_named(virtual: VirtualTime, records: Any) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine()) as batcher:
            with pytest.raises(ConfigError, match=f"records is a {type(records).__name__}"):
                await every(batcher.map(records))

    virtual(main())


def test_mapping_over_a_batcher_that_does_not_run_is_refused(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine())
        with pytest.raises(NotRunningError):
            await every(batcher.map([1]))
        async with batcher:
            pass
        with pytest.raises(NotRunningError):
            await every(batcher.map([1] * 100))

    virtual(main())


@pytest.mark.parametrize("estimated", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("drain", [True, False])
def test_a_stop_in_the_middle_ends_a_stream_with_an_error(
    virtual: VirtualTime, estimated: bool, ordered: bool, drain: bool
) -> None:
    """Nothing that was read is passed over in silence: each record has its result or its error, then comes the end."""

    async def main() -> list[Any]:
        records, read = counting(1000)
        estimator = (lambda record: 1) if estimated else None
        batcher = DynamicBatcher(Engine(seconds=1), cost_estimator=estimator, **SMALL)
        await batcher.start()
        asyncio.get_running_loop().call_later(
            5.5, lambda: stops.append(asyncio.ensure_future(batcher.stop(drain=drain)))
        )
        stops: list[asyncio.Future[None]] = []
        seen: list[Any] = []
        with pytest.raises((NotRunningError, StoppedError)):
            await read_into(seen, batcher.map(records, ordered=ordered, return_exceptions=True))
        await stops[0]
        assert len(seen) == len(read) < 1000
        return seen

    seen = virtual(main())
    results = [result for result in seen if isinstance(result, int)]
    assert len(results) >= 20
    assert sorted(results) == [double(number) for number in range(len(results))]
    assert all(isinstance(result, (int, StoppedError, NotRunningError)) for result in seen)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_whose_batch_is_being_split_ends_with_the_batcher(virtual: VirtualTime, ordered: bool) -> None:
    async def process(batch: list[int]) -> list[int]:
        if len(batch) > 3:
            raise ValueError("too many")
        if 0 in batch:
            await asyncio.sleep(10**9)
        return batch

    async def main() -> list[Any]:
        batcher = DynamicBatcher(process, on_error="isolate", max_batch_size=10)
        await batcher.start()
        reading = asyncio.ensure_future(every(batcher.map(range(10), ordered=ordered, return_exceptions=True)))
        await asyncio.sleep(1)
        await batcher.stop(timeout=3)
        assert now() == 4
        return await reading

    results = virtual(main())
    assert len(results) == 10
    assert all(isinstance(result, StoppedError) for result in results)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_engine_that_answers_after_all_has_been_given_up_changes_no_result(
    virtual: VirtualTime, ordered: bool
) -> None:
    async def stubborn(batch: list[int]) -> list[int]:
        try:
            await asyncio.sleep(0 if 0 in batch else 100)
        except asyncio.CancelledError:
            await asyncio.sleep(5)  # it does not agree
        return batch

    async def main() -> list[Any]:
        batcher = DynamicBatcher(stubborn, max_batch_size=1)
        await batcher.start()
        reading = batcher.map(range(3), ordered=ordered, return_exceptions=True)
        results = [await anext(reading)]
        await asyncio.sleep(1)
        await batcher.stop(timeout=1)
        await asyncio.sleep(50)  # the reader comes back when the answer has come too
        return results + await every(reading)

    assert [type(result) for result in virtual(main())] == [int, StoppedError, StoppedError]


def test_an_empty_run_says_that_nobody_need_wait_for_more(virtual: VirtualTime) -> None:
    """Here the last run exists only once the others have results, as with a second attempt."""
    engine = Engine()

    async def main() -> None:
        answered = asyncio.Event()

        async def runs() -> AsyncIterator[list[int]]:
            yield [1, 2]
            yield [3]
            yield []
            await answered.wait()
            yield [4]

        seen: list[int] = []
        async with DynamicBatcher[int, int](engine, max_batch_size=8, batch_timeout_s=60) as batcher:
            async for _, results, _ in batcher.runs_as_completed(runs()):
                seen += results
                if len(seen) == 3:
                    answered.set()
        assert seen == [2, 4, 6, 8]
        assert now() == 0

    virtual(main())
    assert engine.batches == [[1, 2, 3], [4]]
