"""The budget of a batch can be changed while a batcher runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.errors import ConfigError
from headrace.events import BatchFormed, Event


async def ones(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def test_the_next_batch_has_the_new_budget(virtual: VirtualTime) -> None:
    sizes: list[int] = []

    async def process(batch: list[int]) -> list[int]:
        sizes.append(len(batch))
        if len(sizes) == 2:
            batcher.set_target_batch_cost(8)
        return batch

    batcher = DynamicBatcher[int, int](process, target_batch_cost=4, max_queue_size=1_000)
    assert batcher.target_batch_cost == 4

    async def work() -> None:
        async with batcher:
            assert [result async for result in batcher.map(ones(40))] == list(range(40))
        assert batcher.target_batch_cost == 8

    virtual(work())
    assert sizes == [4, 4, 8, 8, 8, 8]


def test_it_is_never_more_than_what_ran_out_of_memory_left(virtual: VirtualTime) -> None:
    largest = 0

    async def process(batch: list[int]) -> list[int]:
        nonlocal largest
        if len(batch) > 5:
            raise MemoryError(f"{len(batch)} do not fit")
        largest = max(largest, len(batch))
        batcher.set_target_batch_cost(100)
        return batch

    batcher = DynamicBatcher[int, int](process, target_batch_cost=16, max_queue_size=1_000)

    async def work() -> None:
        async with batcher:
            assert [result async for result in batcher.map(ones(100))] == list(range(100))
            assert batcher.target_batch_cost == 4

    virtual(work())
    assert largest == 4


def test_it_can_be_set_before_the_start(virtual: VirtualTime) -> None:
    sizes: list[int] = []

    async def process(batch: list[int]) -> list[int]:
        sizes.append(len(batch))
        return batch

    async def work() -> None:
        batcher = DynamicBatcher[int, int](process, target_batch_cost=4, max_queue_size=1_000)
        batcher.set_target_batch_cost(10)
        assert batcher.target_batch_cost == 10
        async with batcher:
            assert len([result async for result in batcher.map(ones(20))]) == 20

    virtual(work())
    assert sizes == [10, 10]


def test_batches_beside_others_run_while_they_do_and_count_with_them(virtual: VirtualTime) -> None:
    formed: list[int] = []

    async def process(batch: list[int]) -> list[int]:
        await asyncio.sleep(len(batch))
        return batch

    def heard(event: Event) -> None:
        if isinstance(event, BatchFormed):
            formed.append(event.batch)

    large = DynamicBatcher[int, int](process, target_batch_cost=100, batch_timeout_s=0, listener=heard)
    short = large.beside(2, heard)

    async def work() -> None:
        async with large, short:
            first = [await large.submit(number) for number in range(100)]
            await asyncio.sleep(1)
            assert await asyncio.gather(*[await short.submit(number) for number in range(2)]) == [0, 1]
            assert now() == 3
            assert not first[0].done()
        assert now() == 100

    virtual(work())
    assert formed == [0, 1]
    stats = large.stats
    assert (stats.total_batches, stats.total_completed, stats.busy_time_s) == (2, 102, 100)


@pytest.mark.parametrize("cost", [0, -1, math.inf, math.nan, "8", None])
def test_a_budget_that_is_none_is_refused(cost: object) -> None:
    batcher = DynamicBatcher[int, int](lambda batch: batch)
    with pytest.raises(ConfigError, match="target_batch_cost is"):
        batcher.set_target_batch_cost(cost)  # type: ignore[arg-type]
    assert batcher.target_batch_cost == 32_000
