"""Start, stop and everything in between: whatever ends a batcher, nobody is left waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.shown import shown
from tests.unit.batching.doubles import FOREVER, Engine, double, outcomes
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.errors import AlreadyRunningError, ConfigError, NotRunningError, StoppedError

TINY: dict[str, Any] = {"max_batch_size": 1, "max_queue_size": 1, "prefetch_batches": 0}
"""Two may wait, one runs."""


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def stubborn(batch: list[Any]) -> list[Any]:
    """Never returns, and does not agree to be cancelled the first time."""
    try:
        await forever()
    except asyncio.CancelledError:
        await forever()
    return batch


def test_a_second_start_is_refused(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine()) as batcher:
            assert batcher.is_running
            with pytest.raises(AlreadyRunningError, match="DynamicBatcher is already running"):
                await batcher.start()
        assert not batcher.is_running

    virtual(main())


def test_stop_processes_what_waits_and_refuses_what_comes(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=10), **TINY)
        await batcher.start()
        futures = await batcher.submit_batch([0, 1, 2])
        waiters = [asyncio.ensure_future(batcher.submit(number)) for number in (3, 4)]
        await asyncio.sleep(1)
        stopping = asyncio.ensure_future(batcher.stop())
        await asyncio.sleep(1)
        with pytest.raises(NotRunningError, match="not running any more: it accepts no new records"):
            await batcher.submit(5)
        await stopping
        assert now() == 50
        assert await outcomes(futures) == [0, 2, 4]
        assert await outcomes([await waiter for waiter in waiters]) == [6, 8]
        await batcher.stop()  # when stopped, it does nothing

    virtual(main())


def test_stop_without_drain_fails_what_is_not_in_a_batch(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=10), **TINY)
        await batcher.start()
        futures = await batcher.submit_batch([0, 1, 2])
        waiters = [asyncio.ensure_future(batcher.submit(number)) for number in (3, 4)]
        await asyncio.sleep(1)
        await batcher.stop(drain=False)
        assert now() == 10
        results = await outcomes([*futures, *waiters])
        assert results[0] == 0
        assert [type(result) for result in results[1:]] == [StoppedError] * 4
        assert len({id(result) for result in results}) == 5
        assert batcher.stats.total_submitted == 3

    virtual(main())


@pytest.mark.parametrize("process", [Engine(seconds=FOREVER), stubborn], ids=["waits", "is stubborn"])
def test_stop_with_a_limit_fails_whoever_waits_for_a_stuck_engine(
    virtual: VirtualTime, process: Callable[[list[Any]], Any]
) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(process, **TINY)
        await batcher.start()
        futures = await batcher.submit_batch([0, 1, 2])
        waiter = asyncio.ensure_future(batcher.submit(3))
        await asyncio.sleep(1)
        await batcher.stop(timeout=7)
        assert now() == 8
        assert not batcher.is_running
        for result in await outcomes([*futures, waiter]):
            assert isinstance(result, StoppedError)
            assert "stopped before this record was processed" in str(result)
        stats = batcher.stats
        assert (stats.total_submitted, stats.waiting, stats.in_flight) == (3, 0, 0)
        assert stats.busy_time_s == 8
        await asyncio.sleep(100)
        assert batcher.stats == stats, "what was left behind counts no more"

    virtual(main())


def test_a_blocking_function_that_is_stuck_does_not_keep_stop_waiting(virtual: VirtualTime) -> None:
    let_go, stuck = threading.Event(), threading.Event()

    def process(batch: list[int]) -> list[int]:
        stuck.set()
        assert let_go.wait(60)
        return batch

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        batcher = DynamicBatcher(process, batch_timeout_s=0)
        await batcher.start()
        future = await batcher.submit(1)
        await asyncio.to_thread(stuck.wait)
        loop.awaited.clear()  # time goes on, although that thread does not
        await batcher.stop(timeout=7)
        assert now() == 7
        assert isinstance((await outcomes([future]))[0], StoppedError)
        let_go.set()

    virtual(main())


def test_two_stops_end_together_and_a_cancelled_one_goes_on(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=10))
        await batcher.start()
        future = await batcher.submit(4)
        stops = [asyncio.ensure_future(batcher.stop()) for _ in range(3)]
        await asyncio.sleep(1)
        stops[0].cancel()
        await asyncio.sleep(1)
        assert stops[0].cancelled()
        assert batcher.is_running
        await asyncio.gather(*stops[1:])
        assert now() == 10
        assert not batcher.is_running
        assert await future == 8

    virtual(main())


@pytest.mark.parametrize("options", [{"timeout": 5}, {"drain": False, "timeout": 5}])
def test_a_later_stop_may_be_stricter_than_the_first(virtual: VirtualTime, options: dict[str, Any]) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=FOREVER), **TINY)
        await batcher.start()
        futures = await batcher.submit_batch([1, 2])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher.stop(), 20)
        await batcher.stop(**options)
        assert now() == 25
        assert [type(result) for result in await outcomes(futures)] == [StoppedError] * 2

    virtual(main())


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "long"])
def test_a_limit_that_is_none_is_refused_and_nothing_is_stopped(virtual: VirtualTime, timeout: Any) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine()) as batcher:
            with pytest.raises(ConfigError, match="timeout is"):
                await batcher.stop(timeout=timeout)
            assert await (await batcher.submit(1)) == 2

    virtual(main())


def test_a_restart_begins_anew_and_goes_on_counting(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=10), batch_timeout_s=0)
        for life in range(1, 4):
            async with batcher:
                assert await (await batcher.submit(life)) == double(life)
            await asyncio.sleep(90)
            assert batcher.stats.total_completed == life
            assert batcher.stats.busy_time_s == 10 * life
            assert batcher.stats.idle_time_s == 0, "time between two lives counts for neither"

    virtual(main())


def test_an_exception_inside_async_with_does_not_run_what_is_queued(virtual: VirtualTime) -> None:
    engine = Engine(seconds=0.5)
    futures: list[asyncio.Future[int]] = []

    async def fail_midway() -> None:
        async with DynamicBatcher(engine, max_batch_size=1) as batcher:
            futures.extend(await batcher.submit_batch(range(5)))
            await asyncio.sleep(0.1)
            raise OSError("elsewhere")

    async def main() -> None:
        with pytest.raises(OSError, match="elsewhere"):
            await fail_midway()
        assert now() == 0.5
        assert [type(result) for result in await outcomes(futures)] == [int] + [StoppedError] * 4

    virtual(main())
    assert engine.batches == [[0]]


def test_an_exception_inside_async_with_waits_a_moment_only_for_what_runs(virtual: VirtualTime) -> None:
    futures: list[asyncio.Future[int]] = []

    async def fail_while_stopping() -> None:
        async with DynamicBatcher(Engine(seconds=FOREVER)) as batcher:
            futures.append(await batcher.submit(1))
            await asyncio.wait_for(batcher.stop(), 20)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await fail_while_stopping()
        assert now() == 21
        assert isinstance((await outcomes(futures))[0], StoppedError)

    virtual(main())


@pytest.mark.parametrize("process", [Engine(seconds=FOREVER), stubborn, lambda batch: batch], ids=shown)
def test_a_loop_that_ends_without_stop_ends_its_waiters_and_another_loop_begins_anew(
    virtual: VirtualTime, process: Callable[[list[Any]], Any]
) -> None:
    ended: list[Any] = []
    batcher = DynamicBatcher(process, **TINY)

    async def wait(number: int) -> None:
        try:
            await (await batcher.submit(number))
        finally:
            ended.append(number)

    async def first() -> None:
        await batcher.start()
        waiters = [asyncio.ensure_future(wait(number)) for number in range(6)]
        await asyncio.sleep(0)
        del waiters

    async def second() -> None:
        assert not batcher.is_running
        with pytest.raises(NotRunningError):
            await batcher.submit(1)
        async with batcher:
            future = await batcher.submit(7)
            await asyncio.sleep(1)
            assert batcher.stats.in_flight <= 1
            if future.done():
                assert await future == 7
            else:
                await batcher.stop(timeout=1)
                await outcomes([future])

    virtual(first())
    assert sorted(ended) == [0, 1, 2, 3, 4, 5]
    virtual(second())


def test_a_loop_that_was_closed_under_the_batcher_is_noticed(virtual: VirtualTime) -> None:
    """Not by `asyncio.run`, which cancels what is left: by a hand that simply closes it."""
    engine = Engine(seconds=1)
    batcher = DynamicBatcher(engine, **TINY)
    loop = virtual.new_loop()

    async def leave_running() -> None:
        await batcher.start()
        await batcher.submit_batch([0, 1])
        await asyncio.sleep(0.5)

    async def main() -> None:
        assert not batcher.is_running
        with pytest.raises(NotRunningError, match="not running"):
            await batcher.submit(2)
        async with batcher:
            assert await (await batcher.submit(3)) == 6
        assert batcher.stats.in_flight == 0
        assert batcher.stats.busy_time_s == pytest.approx(1.5)

    loop.run_until_complete(leave_running())
    loop.close()
    virtual(main())
    gc.collect()
    assert all("Task was destroyed but it is pending" in problem for problem in virtual.problems)
    virtual.problems.clear()


def test_threads_end_with_the_batcher_and_with_its_loop(virtual: VirtualTime) -> None:
    async def main(stop: bool) -> None:
        batcher = DynamicBatcher(lambda batch: batch, max_batch_size=1, max_concurrent_batches=2)
        await batcher.start()
        await outcomes(await batcher.submit_batch([1, 2, 3, 4]))
        if stop:
            await batcher.stop()

    before = threading.active_count()
    for stop in (True, False, False):
        virtual(main(stop))
    assert threading.active_count() == before


def test_a_fault_of_the_batcher_itself_fails_every_waiter_with_its_cause(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=10), **TINY)
        await batcher.start()
        futures = await batcher.submit_batch([0, 1, 2])
        waiter = asyncio.ensure_future(batcher.submit(3))
        await asyncio.sleep(1)

        def broken(reason: str) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(batcher._submission.queue, "take", broken)  # type: ignore[union-attr]  # it runs
        results = await outcomes([*futures, waiter])
        assert results[0] == 0
        assert [type(result) for result in results[1:]] == [ZeroDivisionError] * 3
        assert len({id(result) for result in results}) == 4
        assert not batcher.is_running
        assert "DynamicBatcher failed; all its waiting records fail too" in caplog.text

    virtual(main())


def test_what_a_waiter_does_at_the_end_cannot_keep_the_batcher_from_ending(virtual: VirtualTime) -> None:
    """A submitter let in by the last batch leaves before it comes: the drain must not wait for it."""

    async def main() -> None:
        batcher = DynamicBatcher(Engine(seconds=10), max_concurrent_batches=2, max_batch_size=1, max_queue_cost=1)
        await batcher.start()
        await batcher.submit_batch([0, 1, 2])  # two run and end together, one waits
        leaving = asyncio.ensure_future(batcher.submit(3))
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(batcher.stop())
        submission: Any = batcher._submission
        admit_waiting = submission.admission.admit_waiting

        def let_in_and_leave() -> None:
            admit_waiting()
            leaving.cancel()

        submission.admission.admit_waiting = let_in_and_leave
        await stopping
        assert leaving.cancelled()

    virtual(main())
