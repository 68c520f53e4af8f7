"""What becomes of a failed batch: who fails, who does not, and how many calls that costs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.batching.doubles import Engine, double, outcomes
from tests.unit.virtual_time import VirtualTime

from headrace import DynamicBatcher
from headrace.batching.dispatch.isolation import LargestFit
from headrace.errors import EngineDeadError, EngineOutOfMemoryError
from headrace.events import BatchFormed, BatchSplit, Event


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


async def process_all(engine: Engine, records: list[int], *, mapped: bool, **options: Any) -> list[Any]:
    """Each record's result or exception, all of them in one batch at first."""
    async with DynamicBatcher(engine, max_batch_size=len(records), **options) as batcher:
        if mapped:
            return [result async for result in batcher.map(records, return_exceptions=True)]
        return await outcomes(await batcher.submit_batch(records))


@given(st.integers(1, 64), st.data(), st.booleans())
def test_isolation_fails_the_bad_records_alone_within_twice_log2_extra_calls_each(
    size: int, data: st.DataObject, mapped: bool
) -> None:
    bad = data.draw(st.sets(st.integers(0, size - 1), max_size=4))
    engine = Engine(seconds=1, refuses=bad)
    results = VirtualTime()(process_all(engine, list(range(size)), mapped=mapped, on_error="isolate"))
    for number, result in enumerate(results):
        if number in bad:
            assert isinstance(result, ValueError)
            assert str(result) == f"cannot process [{number}]"
        else:
            assert result == double(number)
    assert len(engine.batches) <= 1 + len(bad) * 2 * math.ceil(math.log2(size))


def test_by_default_a_failed_batch_fails_its_records_and_no_others(virtual: VirtualTime) -> None:
    engine = Engine(refuses=[2])

    async def main() -> list[Any]:
        async with DynamicBatcher(engine, max_batch_size=3) as batcher:
            return await outcomes(await batcher.submit_batch(range(6)))

    results = virtual(main())
    assert [type(result) for result in results] == [ValueError] * 3 + [int] * 3
    assert engine.batches == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("on_error", ["fail", "isolate"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("error", [MemoryError, EngineOutOfMemoryError, OutOfMemoryError])
def test_out_of_memory_splits_the_batch_whatever_is_set_and_its_size_is_remembered(
    virtual: VirtualTime, on_error: Any, mapped: bool, error: type[Exception]
) -> None:
    events: list[Event] = []
    sizes: list[int] = []

    async def process(batch: list[int]) -> list[int]:
        sizes.append(len(batch))
        await asyncio.sleep(len(batch))
        if len(batch) > 10:
            raise error("no room")
        return [double(record) for record in batch]

    async def main() -> None:
        async with DynamicBatcher(process, max_batch_size=32, on_error=on_error, listener=events.append) as batcher:
            for _ in range(2):
                if mapped:
                    assert [result async for result in batcher.map(range(32))] == [2 * n for n in range(32)]
                else:
                    assert await outcomes(await batcher.submit_batch(range(32))) == [2 * n for n in range(32)]

    virtual(main())
    assert sizes == [32, 16, 8, 8, 16, 8, 8] + [8] * 4
    splits = [event for event in events if isinstance(event, BatchSplit)]
    assert [(split.size, split.out_of_memory) for split in splits] == [(32, True), (16, True), (16, True)]
    assert [split.duration_s for split in splits] == [32, 16, 16]  # of the call that failed
    assert [event.reason for event in events if isinstance(event, BatchFormed)][1:] == ["full_cost"] * 4


def test_the_remembered_size_is_in_padded_cost_where_the_engine_pads(virtual: VirtualTime) -> None:
    shapes: list[tuple[int, int]] = []

    async def process(batch: list[int]) -> list[int]:
        shapes.append((len(batch), max(batch)))
        if len(batch) * max(batch) > 40:
            raise MemoryError
        return batch

    async def main() -> None:
        async with DynamicBatcher(process, cost_estimator=lambda n: n, max_batch_size=8, padded=True) as batcher:
            await outcomes(await batcher.submit_batch([1, 1, 1, 1, 1, 1, 1, 10]))
            await outcomes(await batcher.submit_batch([1, 1, 1, 1, 1, 1, 1, 10]))

    virtual(main())
    assert shapes == [(8, 10), (4, 1), (4, 10), (7, 1), (1, 10)]


def test_one_record_that_is_too_large_for_the_device_fails_alone(virtual: VirtualTime) -> None:
    engine = Engine(refuses=[3], error=lambda bad: MemoryError("no room"))
    results = virtual(process_all(engine, list(range(8)), mapped=False))
    assert [isinstance(result, MemoryError) for result in results] == [n == 3 for n in range(8)]


class WordlessError(Exception):
    """Cannot say what it is, nor be copied."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __copy__(self) -> Any:
        raise SystemExit(1)


@pytest.mark.parametrize(
    "kind",
    [
        StopIteration,
        StopAsyncIteration,
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        asyncio.CancelledError,
        BaseException,
        lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()]),
        lambda: ExceptionGroup("several", [ValueError()]),
        WordlessError,
    ],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("on_loop", [False, True])
def test_whatever_an_engine_raises_only_its_record_fails(
    virtual: VirtualTime, kind: Callable[[], BaseException], on_loop: bool
) -> None:
    def process(batch: list[int]) -> list[int]:
        if 3 in batch:
            raise kind()
        return batch

    async def process_on_loop(batch: list[int]) -> list[int]:
        return process(batch)

    results = virtual(
        process_all(process_on_loop if on_loop else process, list(range(32)), mapped=False, on_error="isolate")
    )
    assert [isinstance(result, Exception) for result in results] == [n == 3 for n in range(32)]


def test_what_no_split_can_mend_is_not_split(virtual: VirtualTime) -> None:
    engine = Engine(refuses=[3], error=lambda _: EngineDeadError("gone"))
    results = virtual(process_all(engine, list(range(8)), mapped=False, on_error="isolate"))
    assert all(isinstance(result, Exception) for result in results)
    assert len(engine.batches) == 1


@pytest.mark.parametrize("mapped", [False, True])
def test_those_who_left_are_not_run_again(virtual: VirtualTime, mapped: bool) -> None:
    engine = Engine(seconds=1, refuses=[0])

    async def main() -> None:
        async with DynamicBatcher(engine, on_error="isolate", max_batch_size=8) as batcher:
            if mapped:
                results = batcher.map(range(8))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await anext(results)
            else:
                futures = await batcher.submit_batch(range(8))
                await asyncio.sleep(0.5)
                for future in futures[1:]:
                    future.cancel()
                await outcomes(futures)

    virtual(main())
    assert engine.batches == ([[*range(8)]] if mapped else [[*range(8)], [0]])


def test_a_memory_limit_halves_but_not_below_what_is_known_to_fit() -> None:
    limit = LargestFit()
    limit.succeeded(70)
    limit.failed(100)
    assert limit.cost == 70
    limit.succeeded(60)
    limit.failed(70)  # fitted once, no more
    assert limit.cost == 35
