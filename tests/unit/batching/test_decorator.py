"""`@batched`: concurrent calls of a function of one item share batches."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from tests.unit.batching.doubles import Engine, double
from tests.unit.virtual_time import VirtualTime, now

import headrace
from headrace.errors import ConfigError


def test_concurrent_calls_share_a_batch(virtual: VirtualTime) -> None:
    engine = Engine()
    call = headrace.batched(max_batch_size=8)(engine)

    async def main() -> list[Any]:
        results = await asyncio.gather(*(call(number) for number in range(20)))
        await call.stop()
        return results

    assert virtual(main()) == [double(number) for number in range(20)]
    assert engine.sizes == [8, 8, 4]
    assert call.stats.total_completed == 20


def test_the_decorator_needs_no_parentheses_and_keeps_the_name() -> None:
    @headrace.batched
    def embed(texts: list[str]) -> list[int]:
        """Lengths."""
        return [len(text) for text in texts]

    assert (embed.__name__, embed.__doc__) == ("embed", "Lengths.")  # type: ignore[attr-defined]  # as functools does
    assert asyncio.run(embed("four")) == 4  # type: ignore[arg-type]  # a coroutine


def test_wrong_options_raise_where_they_are_written() -> None:
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        headrace.batched(max_batch_size=0)(lambda batch: batch)


def test_options_of_submit_go_along(virtual: VirtualTime) -> None:
    engine = Engine(seconds=1)
    call = headrace.batched(max_batch_size=1)(engine)

    async def main() -> None:
        await asyncio.gather(call(1), call(2), call(3, priority=1))

    virtual(main())
    assert engine.batches[0] == [3]


def test_a_call_after_stop_starts_anew(virtual: VirtualTime) -> None:
    call = headrace.batched(Engine())

    async def main() -> None:
        assert await call(1) == 2
        await call.stop()
        await call.stop()
        assert await call(2) == 4

    virtual(main())


def test_each_event_loop_has_a_batcher_and_none_outlives_its_loop(virtual: VirtualTime) -> None:
    call = headrace.batched(batch_timeout_s=0)(lambda batch: batch)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    threads = threading.active_count()

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await call(1)

    for _ in range(5):
        virtual(main())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1
    assert threading.active_count() == threads
    assert call.stats.total_completed == 5, "the counts of loops that are gone remain"


def test_calls_from_several_threads_use_a_batcher_each() -> None:
    call = headrace.batched(batch_timeout_s=0)(lambda batch: [double(record) for record in batch])
    results: dict[int, int] = {}

    def work(number: int) -> None:
        results[number] = asyncio.run(call(number))  # type: ignore[arg-type]  # a coroutine

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: 2 * number for number in range(8)}
    assert call.stats.total_completed == 8


def test_the_first_caller_waits_no_longer_than_the_timeout(virtual: VirtualTime) -> None:
    call = headrace.batched(batch_timeout_s=7)(Engine())

    async def main() -> float:
        await call(1)
        return now()

    assert virtual(main()) == 7
