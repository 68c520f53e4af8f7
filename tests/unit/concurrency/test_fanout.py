"""One function over many items: how many at a time, in which order, how often, and how it ends."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace import map_concurrent
from headrace.errors import ConfigError, ProcessError


class Calls:
    """Sleeps for as many seconds as the item says."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.cancelled: list[Any] = []
        self.running = self.most = 0

    async def __call__(self, seconds: float) -> float:
        self.begun.append(seconds)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(seconds)
            raise
        finally:
            self.running -= 1
        return seconds


async def until_error(results: Any) -> tuple[list[Any], Exception]:
    """What came before the error, and the error."""
    taken: list[Any] = []
    try:
        async for result in results:
            taken.append(result)  # noqa: PERF401 - what has been taken must outlive the error
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return taken, error
    raise AssertionError(f"no error after {taken}")


def test_results_come_in_the_order_of_the_items_and_calls_overlap(virtual: VirtualTime) -> None:
    async def main() -> None:
        calls = Calls()
        assert await map_concurrent(calls, [3, 1, 2, 3], concurrency=2) == [3, 1, 2, 3]
        assert now() == 6  # 3 beside 1 and 2, then 3
        assert calls.most == 2

    virtual(main())


def test_unordered_results_come_as_they_complete(virtual: VirtualTime) -> None:
    async def main() -> None:
        seen = [(result, now()) async for result in map_concurrent(Calls(), [3, 1, 2], ordered=False)]
        assert seen == [(1, 1), (2, 2), (3, 3)]

    virtual(main())


@pytest.mark.parametrize("ordered", [True, False])
def test_a_slow_item_lets_no_more_than_the_look_ahead_pile_up(virtual: VirtualTime, ordered: bool) -> None:
    async def main() -> None:
        calls = Calls()
        items = itertools.chain([100], itertools.repeat(1, 50))
        results = map_concurrent(calls, items, concurrency=3, look_ahead=8, ordered=ordered)
        async for result in results:
            if ordered:
                assert (result, now()) == (100, 100)
                assert len(calls.begun) == 8
                break
            await asyncio.sleep(0)
        assert len(calls.begun) == (8 if ordered else 51)
        assert calls.most == 3

    virtual(main())


def test_a_generator_is_pulled_as_needed_and_may_be_endless(virtual: VirtualTime) -> None:
    async def main() -> None:
        pulled = itertools.count(1)
        taken: list[float] = []
        async for result in map_concurrent(Calls(), pulled, concurrency=2, look_ahead=4):
            taken.append(result)
            await asyncio.sleep(1000)  # all that may be begun is done by now
            if len(taken) == 5:
                break
        assert taken == [1, 2, 3, 4, 5]
        assert next(pulled) <= 5 + 4 + 1

    virtual(main())


def test_a_failed_call_is_tried_again_after_waits_that_grow(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.retry.random.random", lambda: 1.0)  # the longest wait there may be
    tries = itertools.count(1)

    async def flaky(item: str) -> str:
        if next(tries) < 10:
            raise OSError("not yet")
        return item

    async def main() -> None:
        assert await map_concurrent(flaky, ["a"], retries=9, backoff_s=1) == ["a"]
        assert now() == sum((1, 2, 4, 8, 16, 32, 60, 60, 60))

    virtual(main())


def test_only_what_is_asked_for_is_tried_again(virtual: VirtualTime) -> None:
    seen: list[str] = []

    async def fails(item: str) -> str:
        seen.append(item)
        raise KeyError(item) if item == "lasting" else OSError(item)

    async def main() -> None:
        given = map_concurrent(fails, ["lasting", "passing"], retries=2, retry_on=OSError, return_exceptions=True)
        results = await given
        assert [type(result) for result in results] == [KeyError, OSError]
        assert seen.count("lasting") == 1
        assert seen.count("passing") == 3

    virtual(main())


def test_a_try_that_takes_too_long_is_cancelled_and_may_be_repeated(virtual: VirtualTime) -> None:
    async def main() -> None:
        calls = Calls()
        results = await map_concurrent(calls, [1, 50], timeout_s=10, retries=1, backoff_s=0, return_exceptions=True)
        assert results[0] == 1
        assert isinstance(results[1], TimeoutError)
        assert calls.cancelled == [50, 50]
        assert now() == 20

    virtual(main())


def test_an_error_comes_at_its_turn_and_ends_what_runs(virtual: VirtualTime) -> None:
    calls = Calls()

    async def picky(item: float) -> float:
        if item == 2:
            await asyncio.sleep(1)
            raise ValueError("two")
        return await calls(item)

    async def main() -> None:
        taken, error = await until_error(map_concurrent(picky, [5, 2, 90, 91, 92, 93], concurrency=3))
        assert (taken, str(error)) == ([5], "two")
        assert now() == 5
        assert calls.cancelled == [90]  # and nothing was begun once it had failed
        assert calls.begun == [5, 90]

    virtual(main())


def test_leaving_the_loop_cancels_what_runs(virtual: VirtualTime) -> None:
    async def main() -> None:
        calls = Calls()
        async for _ in map_concurrent(calls, [1, 70, 80], ordered=False):
            break
        for _ in range(5):
            await asyncio.sleep(0)
        assert sorted(calls.cancelled) == [70, 80]
        assert now() == 1

    virtual(main())


def test_cancelling_the_caller_reaches_what_runs_and_what_waits_to_be_tried_again(virtual: VirtualTime) -> None:
    async def main() -> None:
        calls = Calls()

        async def failing(item: float) -> float:
            if item == 0:
                raise OSError
            return await calls(item)

        task = asyncio.create_task(map_concurrent(failing, [0, 60], retries=9, backoff_s=1e9)._collect())
        await asyncio.sleep(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.cancelled == [60]
        assert now() == 5
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "headrace-map"] == []

    virtual(main())


def test_a_call_that_cancels_itself_has_failed_and_nobody_hangs(virtual: VirtualTime) -> None:
    async def leaves(item: int) -> int:
        if item == 1:
            raise asyncio.CancelledError
        return item

    async def main() -> None:
        results = await map_concurrent(leaves, range(3), return_exceptions=True)
        assert results[0] == 0
        assert isinstance(results[1], ProcessError)
        assert results[2] == 2

    virtual(main())


def test_an_error_of_the_items_is_raised_after_what_came_before(virtual: VirtualTime) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the list ends in the middle")

    async def main() -> None:
        taken, error = await until_error(map_concurrent(Calls(), items(), return_exceptions=True))
        assert (taken, str(error)) == ([1, 2], "the list ends in the middle")

    virtual(main())


def test_asynchronous_items_are_asked_one_at_a_time_and_closed(virtual: VirtualTime) -> None:
    closed = []

    async def items() -> AsyncIterator[int]:
        try:
            for item in itertools.count(1):
                await asyncio.sleep(1)
                yield item
        finally:
            closed.append(True)

    async def main() -> None:
        taken: list[float] = []
        async for result in map_concurrent(Calls(), items(), concurrency=4):
            taken.append(result)
            if len(taken) == 3:
                break
        assert taken == [1, 2, 3]
        assert now() == 6
        for _ in range(5):
            await asyncio.sleep(0)
        assert closed == [True]

    virtual(main())


def test_asynchronous_items_are_closed_though_nobody_asks_for_one_just_then(virtual: VirtualTime) -> None:
    closed = []

    async def items() -> AsyncIterator[int]:
        try:
            for item in (1, 500, 600, 700):
                yield item
        finally:
            closed.append(True)

    async def main() -> None:
        source = items()  # held here: else the event loop would close what it sees dropped
        async for _ in map_concurrent(Calls(), source, concurrency=2, look_ahead=2):
            break
        for _ in range(5):
            await asyncio.sleep(0)
        assert closed == [True]
        await source.aclose()  # type: ignore[attr-defined]

    virtual(main())


def test_the_context_is_that_of_the_caller(virtual: VirtualTime) -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def look(_: int) -> str:
        return variable.get()

    async def main() -> None:
        calls = map_concurrent(look, [1])
        for name in ("first", "second"):
            variable.set(name)
            assert await calls == [name]

    virtual(main())
    variable.set("blocking")
    assert list(map_concurrent(look, [1])) == ["blocking"]
    assert list(map_concurrent(lambda _: variable.get(), [1])) == ["blocking"]


def test_a_plain_function_runs_on_as_many_threads_as_calls_are_allowed() -> None:
    together = threading.Barrier(4, timeout=60)

    def meet(item: int) -> int:
        together.wait()  # passes only if four run at once
        return item * 2

    assert list(map_concurrent(meet, range(8), concurrency=4)) == [item * 2 for item in range(8)]


def test_what_a_plain_function_returns_is_awaited() -> None:
    calls = Calls()
    assert list(map_concurrent(lambda item: [calls(item)][0], [0, 0])) == [0, 0]
    assert calls.begun == [0, 0]


def test_a_plain_function_may_raise_stop_iteration() -> None:
    results = list(map_concurrent(lambda item: next(iter(item)), ["a", ""], return_exceptions=True))
    assert results[0] == "a"
    assert isinstance(results[1], RuntimeError)


def test_the_blocking_form_works_within_a_running_event_loop() -> None:
    async def main() -> list[float]:
        return list(map_concurrent(Calls(), [0, 0, 0]))

    assert asyncio.run(main()) == [0, 0, 0]


def test_leaving_the_blocking_loop_cancels_what_runs_and_ends_the_thread() -> None:
    calls = Calls()
    for result in map_concurrent(calls, [0, 3600, 3601]):
        assert result == 0
        break
    assert set(calls.begun) - {0} == set(calls.cancelled)
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-map-loop"]


def test_the_blocking_form_raises_the_call_s_own_error_and_reads_no_further_than_allowed() -> None:
    pulled = itertools.count()

    async def seven(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        return item

    results = iter(map_concurrent(seven, pulled, concurrency=2, look_ahead=3))
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)
    assert next(pulled) <= 7 + 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"backoff_s": -0.5}, "backoff_s is -0.5"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"look_ahead": 0}, "look_ahead is 0"),
        ({"items": 5}, "items is 5"),
        ({"fn": "name"}, "fn is 'name'"),
    ],
)
def test_wrong_parameters_are_named_at_the_call(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        map_concurrent(**({"fn": Calls(), "items": [1]} | wrong))


def test_a_call_that_ends_an_iteration_fails_alone() -> None:
    async def ends(item: int) -> int:
        if item == 1:
            raise StopAsyncIteration
        return item

    results = list(map_concurrent(ends, range(3), return_exceptions=True))
    assert results[::2] == [0, 2]
    assert isinstance(results[1], StopAsyncIteration)
