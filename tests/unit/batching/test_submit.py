"""Every way in: submit and its twins, deadlines, priorities, callers, cancelling."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.batching.doubles import FOREVER, Engine, outcomes
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.errors import (
    ConfigError,
    DeadlineExceededError,
    NotRunningError,
    RecordTooLargeError,
    StoppedError,
)


def test_submit_batch_gives_futures_in_order_with_costs_of_their_own(virtual: VirtualTime) -> None:
    engine = Engine()

    async def main() -> list[Any]:
        async with DynamicBatcher(engine, target_batch_cost=10) as batcher:
            with pytest.raises(ConfigError, match="estimated_cost has 1 entries for 3 records"):
                await batcher.submit_batch([1, 2, 3], estimated_cost=[1])
            return await outcomes(await batcher.submit_batch(iter([1, 2, 3]), estimated_cost=[8, 8, 2]))

    assert virtual(main()) == [2, 4, 6]
    assert engine.batches == [[1], [2, 3]]


def test_a_submit_batch_that_fails_midway_takes_back_what_it_had_submitted(virtual: VirtualTime) -> None:
    engine = Engine()

    async def main() -> None:
        async with DynamicBatcher(engine, target_batch_cost=10, oversized="reject") as batcher:
            with pytest.raises(RecordTooLargeError, match="costs 11, more than the budget of a batch, 10"):
                await batcher.submit_batch([1, 2, 3], estimated_cost=[1, 11, 1])
            assert batcher.stats.waiting == 0

    virtual(main())
    assert engine.batches == []


def test_a_higher_priority_is_processed_first(virtual: VirtualTime) -> None:
    engine = Engine(seconds=1)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=2) as batcher:
            for number in range(6):
                await batcher.submit(number)
            await asyncio.sleep(0.5)
            await batcher.submit("request", priority=1)

    virtual(main())
    assert engine.batches == [[0, 1], ["request", 2], [3, 4], [5]]


def test_each_task_is_a_caller_unless_it_says_otherwise(virtual: VirtualTime) -> None:
    async def order(caller: Any) -> list[Any]:
        engine = Engine(seconds=1)

        async def one() -> None:
            await batcher.submit("one", caller=caller)

        async with DynamicBatcher(engine, max_batch_size=4) as batcher:
            await asyncio.create_task(batcher.submit("first"))
            await asyncio.sleep(0.5)
            for number in range(40):
                await batcher.submit(number, caller=caller)
            await asyncio.create_task(one())
        return [index for index, batch in enumerate(engine.batches) if "one" in batch]

    assert virtual(order(caller=None))[0] <= 3
    assert virtual(order(caller="the same")) == [11]


@pytest.mark.parametrize("way", ["submit", "submit_nowait"])
def test_a_record_that_is_late_is_not_run(virtual: VirtualTime, way: str) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=1) as batcher:

            async def submit(record: int, deadline_s: float) -> Any:
                future = getattr(batcher, way)(record, deadline_s=deadline_s)
                return await future if way == "submit" else future

            futures = [await submit(1, 5), await submit(2, 5), await submit(3, 25)]
            results = await outcomes(futures)
            assert results[0] == 2
            assert isinstance(results[1], DeadlineExceededError)
            assert results[2] == 6

    virtual(main())
    assert engine.batches == [[1], [3]]


def test_a_deadline_passes_in_the_queue_for_room_too(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(
            Engine(seconds=10), max_batch_size=1, max_queue_size=1, prefetch_batches=0
        ) as batcher:
            await batcher.submit_batch([0, 1, 2])
            with pytest.raises(DeadlineExceededError, match=r"no room .* deadline of 7 s"):
                await batcher.submit(3, deadline_s=7)
            assert now() == 7

    virtual(main())


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), "soon"])
@pytest.mark.parametrize("way", ["submit", "submit_nowait"])
def test_a_deadline_that_is_none_leaves_no_record_behind(virtual: VirtualTime, way: str, deadline: Any) -> None:
    engine = Engine()

    async def main() -> None:
        async with DynamicBatcher(engine) as batcher:
            with pytest.raises(ConfigError, match="deadline_s is"):
                await getattr(batcher, way)(1, deadline_s=deadline)

    virtual(main())
    assert engine.batches == []


@pytest.mark.parametrize("how", ["cancel", "cancel the task", "time out"])
def test_a_record_that_nobody_waits_for_gives_its_place_back_at_once_and_is_not_run(
    virtual: VirtualTime, how: str
) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=1, max_queue_size=1, prefetch_batches=0) as batcher:
            await batcher.submit(0)
            await asyncio.sleep(1)
            future, last = await batcher.submit(1), await batcher.submit(2)
            waiting = asyncio.ensure_future(asyncio.wait_for(future, 5))
            late = asyncio.ensure_future(batcher.submit(3))
            await asyncio.sleep(1)
            assert not late.done()
            if how == "cancel":
                future.cancel()
            elif how == "cancel the task":
                waiting.cancel()
            await outcomes([waiting])
            await late
            assert now() == (6 if how == "time out" else 2)
            assert await last == 4

    virtual(main())
    assert engine.batches == [[0], [2], [3]]


def test_cancelling_a_record_that_is_being_processed_harms_no_neighbour(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=3) as batcher:
            futures = await batcher.submit_batch([0, 1, 2])
            await asyncio.sleep(1)
            assert futures[1].cancel()
            assert await outcomes(futures[::2]) == [0, 4]
            stats = batcher.stats
            assert (stats.total_completed, stats.total_failed, stats.total_batched) == (2, 0, 3)

    virtual(main())


def test_a_whole_line_of_waiting_records_can_leave(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=1) as batcher:
            futures = await batcher.submit_batch(range(1000))
            await asyncio.sleep(1)
            for future in futures[1:]:
                future.cancel()
            assert (batcher.stats.waiting, batcher.stats.waiting_cost) == (0, 0)
            assert batcher.stats.total_submitted == 1000

    virtual(main())
    assert engine.batches == [[0]]


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` on a thread, in which there is no event loop, while virtual time waits for it."""
    return asyncio.to_thread(work)


def test_threads_submit_through_the_twins(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(), batch_timeout_s=0) as batcher:
            assert await in_thread(lambda: batcher.submit_blocking(4)) == 8
            assert await in_thread(lambda: batcher.submit_threadsafe(5, priority=1).result(60)) == 10
            assert await in_thread(lambda: list(batcher.map_blocking(range(100)))) == [2 * n for n in range(100)]

    virtual(main())


def test_a_record_from_another_event_loop_comes_back_to_it(virtual: VirtualTime) -> None:
    async def elsewhere(batcher: DynamicBatcher[int, int]) -> int:
        with pytest.raises(ConfigError, match=r"another event loop: use submit_threadsafe\(\)"):
            await batcher.submit(1)
        with pytest.raises(ConfigError, match="another event loop"):
            await batcher.stop()
        return await asyncio.wrap_future(batcher.submit_threadsafe(7))

    async def main() -> None:
        async with DynamicBatcher(Engine(), batch_timeout_s=0) as batcher:
            assert await in_thread(lambda: asyncio.run(elsewhere(batcher))) == 14

    virtual(main())


def test_a_threadsafe_wait_can_be_cancelled(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=1) as batcher:
            await batcher.submit(0)
            await asyncio.sleep(1)
            future = batcher.submit_threadsafe(1)
            await asyncio.sleep(1)
            future.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert batcher.stats.waiting == 0

    virtual(main())
    assert engine.batches == [[0]]


def test_a_blocking_wait_ends_at_its_limit_and_the_record_is_not_run(virtual: VirtualTime) -> None:
    engine = Engine(seconds=FOREVER)

    async def main() -> None:
        batcher = DynamicBatcher(engine, max_batch_size=1)
        await batcher.start()
        running = await batcher.submit(0)
        await asyncio.sleep(1)

        def work() -> None:
            with pytest.raises(TimeoutError):
                batcher.submit_blocking(1, timeout=0.01)

        await in_thread(work)
        await batcher.stop(timeout=5)
        assert isinstance((await outcomes([running]))[0], StoppedError)

    virtual(main())
    assert engine.batches == [[0]]


@pytest.mark.parametrize("way", ["submit_blocking", "map_blocking"])
def test_blocking_the_batcher_s_own_loop_is_refused(virtual: VirtualTime, way: str) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine()) as batcher:
            with pytest.raises(ConfigError, match=rf"{way}\(\) would block the batcher's own event loop"):
                getattr(batcher, way)([1])

    virtual(main())


def test_a_batcher_that_does_not_run_refuses_in_every_way(virtual: VirtualTime) -> None:
    def refuses(batcher: DynamicBatcher[int, int]) -> None:
        for way in (batcher.submit_nowait, batcher.submit_threadsafe, batcher.submit_blocking):
            with pytest.raises(NotRunningError, match="not running"):
                way(1)
        with pytest.raises(NotRunningError, match="not running"):
            list(batcher.map_blocking([1]))

    async def main(batcher: DynamicBatcher[int, int]) -> None:
        with pytest.raises(NotRunningError, match=r"not running. Call start\(\) or use 'async with'"):
            await batcher.submit(1)
        await in_thread(lambda: refuses(batcher))
        async with batcher:
            pass
        with pytest.raises(NotRunningError, match="not running"):
            await batcher.submit(1)
        await in_thread(lambda: refuses(batcher))

    virtual(main(DynamicBatcher(Engine())))


def test_threads_that_wait_when_the_loop_ends_are_told(virtual: VirtualTime) -> None:
    ends: list[BaseException | None] = []
    threads: list[threading.Thread] = []

    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=FOREVER), max_batch_size=1, max_queue_size=1, prefetch_batches=0)
        await batcher.start()
        for number in range(6):  # running, waiting, waiting for room
            future = batcher.submit_threadsafe(number)
            threads.append(threading.Thread(target=lambda future=future: ends.append(future.exception(30))))
            threads[-1].start()
        await asyncio.sleep(1)

    def wait() -> None:
        for thread in threads:
            thread.join(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: ends.append(args.exc_value))
        virtual(main())
        wait()
    assert len(ends) == 6
    assert all(isinstance(end, (StoppedError, concurrent.futures.CancelledError)) for end in ends)
