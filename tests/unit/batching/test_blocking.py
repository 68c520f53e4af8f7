"""Batching for code that is not asynchronous: `map_batches` and `map_blocking`. Threads and loops are real."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.batching.doubles import double

import headrace
from headrace.errors import ConfigError, CostError, NotRunningError, StoppedError


def doubled(batch: list[int]) -> list[int]:
    return [double(record) for record in batch]


async def doubled_async(batch: list[int]) -> list[int]:
    return doubled(batch)


@pytest.mark.parametrize("process", [doubled, doubled_async])
def test_map_batches_gives_results_in_input_order_and_fills_batches(process: Any) -> None:
    sizes: list[int] = []

    def counted(batch: list[int]) -> Any:
        sizes.append(len(batch))
        return process(batch)

    results = headrace.map_batches(counted, range(1000), max_batch_size=100, batch_timeout_s=30)
    assert list(results) == [2 * number for number in range(1000)]
    assert len(sizes) <= 12


def test_map_batches_works_inside_a_running_loop() -> None:
    async def main() -> list[int]:
        return list(headrace.map_batches(doubled, range(100)))

    assert asyncio.run(main()) == [2 * number for number in range(100)]


def test_map_batches_runs_the_function_off_the_calling_thread_and_reads_on_it() -> None:
    readers: set[int] = set()

    def records() -> Iterator[int]:
        readers.add(threading.get_ident())
        yield from range(10)

    workers = list(headrace.map_batches(lambda batch: [threading.get_ident()] * len(batch), records()))
    assert readers == {threading.get_ident()}
    assert threading.get_ident() not in workers
    assert len(set(workers)) == 1, "a model always meets the same thread"


def test_map_batches_reads_an_endless_input_only_as_far_as_there_is_room() -> None:
    read: list[int] = []

    def records() -> Iterator[int]:
        for number in itertools.count():
            read.append(number)
            yield number

    results = headrace.map_batches(doubled, records(), max_batch_size=10, max_queue_size=100, prefetch_batches=0)
    for taken, result in enumerate(results, 1):
        assert result == 2 * (taken - 1)
        assert len(read) <= taken + 110 + 10 + 3 * 64
        if taken == 2000:
            break


def test_leaving_map_batches_ends_its_thread_though_the_function_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.concurrency.map_batches.GRACE_S", 0.01)
    let_go = threading.Event()

    def stuck(batch: list[int]) -> list[int]:
        if 5 in batch:
            assert let_go.wait(60)
        return batch

    results = headrace.map_batches(stuck, itertools.count(), max_batch_size=1)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert "headrace-map-batches" not in {thread.name for thread in threading.enumerate()}
    let_go.set()


def test_map_batches_hands_out_what_came_before_the_input_s_own_error() -> None:
    def records() -> Iterator[int]:
        yield from range(100)
        raise OSError("the disk is gone")

    results = headrace.map_batches(doubled, records(), max_batch_size=7)
    assert list(itertools.islice(results, 100)) == [2 * number for number in range(100)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


def test_a_bad_record_of_map_batches_stands_in_its_place_or_is_raised() -> None:
    def refusing(batch: list[int]) -> list[Any]:
        return [ValueError("bad") if record == 70 else record for record in batch]

    def cost(record: int) -> float:
        return float("nan") if record == 3 else 1

    options: dict[str, Any] = {"cost_estimator": cost}
    results = list(headrace.map_batches(refusing, range(100), return_exceptions=True, **options))
    assert {n: type(result) for n, result in enumerate(results) if isinstance(result, Exception)} == {
        3: CostError,
        70: ValueError,
    }
    with pytest.raises(ValueError, match="bad"):
        list(headrace.map_batches(refusing, range(100)))


def test_map_batches_refuses_wrong_options_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        headrace.map_batches(doubled, [1], max_batch_size=0)


def test_nothing_in_nothing_out() -> None:
    assert list(headrace.map_batches(doubled, [])) == []


def test_a_blocking_stream_ends_with_the_batcher() -> None:
    """A stop in another thread: what was read has a result or an error, and the reader is not left waiting."""
    batcher = headrace.DynamicBatcher(doubled, max_batch_size=5, max_queue_size=5, prefetch_batches=0)
    seen: list[Any] = []
    reading = threading.Event()

    def read() -> None:
        for result in batcher.map_blocking(itertools.count(), return_exceptions=True):
            seen.append(result)
            reading.set()

    async def main() -> None:
        await batcher.start()
        thread = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.to_thread(reading.wait, 30)
        await batcher.stop()
        with pytest.raises((StoppedError, NotRunningError)):
            await thread

    asyncio.run(main())
    results = list(itertools.takewhile(lambda result: isinstance(result, int), seen))
    assert results == [2 * number for number in range(len(results))]
