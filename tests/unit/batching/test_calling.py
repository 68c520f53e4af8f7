"""How process_fn is called: on the loop or off it, in whose context, and what is said of one that blocks."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.batching.doubles import double, outcomes
from tests.unit.virtual_time import VirtualTime, now

from headrace import BlockedLoopWarning, DynamicBatcher
from headrace.batching.dispatch import offload
from headrace.errors import ProcessError


class AsyncCallable:
    async def __call__(self, batch: list[Any]) -> list[Any]:
        return [threading.current_thread().name for _ in batch]


async def on_loop(batch: list[Any], extra: int = 0) -> list[Any]:
    return [threading.current_thread().name for _ in batch]


def off_loop(batch: list[Any]) -> list[Any]:
    return [threading.current_thread().name for _ in batch]


MAIN = threading.current_thread().name
WORKER = "DynamicBatcher-worker-1"


@pytest.mark.parametrize(
    ("process", "offload", "where"),
    [
        (on_loop, False, MAIN),
        (functools.partial(on_loop, extra=1), False, MAIN),
        (AsyncCallable(), False, MAIN),
        (lambda batch: on_loop(batch, 1), False, MAIN),
        (off_loop, False, WORKER),
        (on_loop, True, WORKER),
        (lambda batch: on_loop(batch, 1), True, WORKER),
    ],
    ids=["async", "partial", "callable", "lambda", "blocking", "async offloaded", "lambda offloaded"],
)
def test_where_a_function_runs(
    virtual: VirtualTime, process: Callable[[list[Any]], Any], offload: bool, where: str
) -> None:
    async def main() -> list[Any]:
        async with DynamicBatcher(process, offload=offload, max_batch_size=1) as batcher:
            return await outcomes(await batcher.submit_batch([1, 2, 3]))

    assert virtual(main()) == [where] * 3


def test_the_loop_goes_on_while_a_blocking_function_works(virtual: VirtualTime) -> None:
    working, seen = threading.Event(), threading.Event()

    def process(batch: list[int]) -> list[int]:
        working.set()
        assert seen.wait(60), "the loop stood still"
        return batch

    async def main() -> None:
        async with DynamicBatcher(process, batch_timeout_s=0, max_batch_size=1) as batcher:
            futures = [await batcher.submit(1)]
            await asyncio.to_thread(working.wait, 30)
            futures.append(await batcher.submit(2))
            assert batcher.stats.in_flight == 1
            assert batcher.stats.waiting == 1
            seen.set()
            assert await outcomes(futures) == [1, 2]

    virtual(main())


def test_slots_have_a_thread_each(virtual: VirtualTime) -> None:
    together = threading.Barrier(3)

    def process(batch: list[int]) -> list[int]:
        together.wait(60)
        return [threading.get_ident()] * len(batch)

    async def main() -> list[int]:
        async with DynamicBatcher(process, max_batch_size=1, max_concurrent_batches=3) as batcher:
            return await outcomes(await batcher.submit_batch(range(6)))

    assert len(set(virtual(main()))) == 3


def test_an_offloaded_engine_finds_the_same_loop_at_every_batch(virtual: VirtualTime) -> None:
    """What it ties to a loop, such as a lock or a connection, serves the next batch too."""
    loops: list[int] = []

    async def process(batch: list[int]) -> list[int]:
        loops.append(id(asyncio.get_running_loop()))
        return batch

    async def main() -> None:
        async with DynamicBatcher(process, offload=True, max_batch_size=1) as batcher:
            await outcomes(await batcher.submit_batch([1, 2, 3]))
            assert id(asyncio.get_running_loop()) not in loops

    virtual(main())
    assert len(loops) == 3
    assert len(set(loops)) == 1


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_an_offloaded_engine_may_fail_and_go_on(virtual: VirtualTime, error: BaseException) -> None:
    async def process(batch: list[int]) -> list[int]:
        await asyncio.sleep(0)
        if batch == [0]:
            raise error
        return [double(record) for record in batch]

    async def main() -> list[Any]:
        async with DynamicBatcher(process, offload=True, max_batch_size=1) as batcher:
            return await outcomes(await batcher.submit_batch([0, 1]))

    failure, result = virtual(main())
    assert type(failure) is (ValueError if isinstance(error, ValueError) else ProcessError)
    assert failure.__cause__ is error
    assert result == 2


REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="nobody's")


@pytest.mark.parametrize("process_kind", ["async", "blocking"])
def test_a_function_sees_the_context_of_no_caller(virtual: VirtualTime, process_kind: str) -> None:
    def blocking(batch: list[int]) -> list[str]:
        return [REQUEST.get()] * len(batch)

    async def on_the_loop(batch: list[int]) -> list[str]:
        seen = REQUEST.get()
        REQUEST.set("the batch's")
        return [seen] * len(batch)

    async def main() -> list[str]:
        REQUEST.set("the starter's")
        async with DynamicBatcher(on_the_loop if process_kind == "async" else blocking) as batcher:
            REQUEST.set("the submitter's")
            first = await (await batcher.submit(1))
            return [first, await (await batcher.submit(2)), REQUEST.get()]

    assert virtual(main()) == ["nobody's", "nobody's", "the submitter's"]


class FakeClock:
    """Real seconds as the watcher of the loop reads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(offload, "monotonic", lambda: self.seconds)


def blocking_async(clock: FakeClock) -> Callable[[list[Any]], Any]:
    async def generate(batch: list[Any]) -> list[Any]:
        await asyncio.sleep(1)
        clock.seconds += 0.25  # as `llm.generate` in an `async def` does
        await asyncio.sleep(1)
        return batch

    return generate


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_async_function_that_blocks_the_loop_is_told_of_once_with_the_way_out(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    process = blocking_async(FakeClock(monkeypatch))

    async def main() -> None:
        batcher = DynamicBatcher((lambda batch: process(batch)) if wrapped else process, max_batch_size=1)  # noqa: PLW0108
        async with batcher:
            await outcomes(await batcher.submit_batch([1, 2, 3]))

    with pytest.warns(BlockedLoopWarning) as caught:
        virtual(main())
    [warning] = caught
    assert "blocked the event loop for 0.25 s" in str(warning.message)
    assert "offload=True" in str(warning.message)


@pytest.mark.parametrize("offloaded", [True, False])
def test_nothing_is_said_of_one_that_does_not(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, offloaded: bool
) -> None:
    clock = FakeClock(monkeypatch)

    async def quick(batch: list[int]) -> list[int]:
        clock.seconds += 0.09
        await asyncio.sleep(0)
        clock.seconds += 0.09
        return batch

    async def main() -> None:
        async with DynamicBatcher(blocking_off() if offloaded else quick, offload=offloaded) as batcher:
            assert await (await batcher.submit(1)) == 1

    def blocking_off() -> Callable[[list[int]], Any]:
        async def slow(batch: list[int]) -> list[int]:
            clock.seconds += 5
            return batch

        return slow

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        virtual(main())


def test_an_exception_passes_through_the_watch_of_the_loop(virtual: VirtualTime) -> None:
    """What is thrown in, such as a timeout of its own, reaches the function, and what it makes of it comes out."""

    async def process(batch: list[int]) -> list[Any]:
        try:
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            return [now()]
        return []

    async def main() -> Any:
        async with DynamicBatcher(process, batch_timeout_s=0) as batcher:
            return await (await batcher.submit(1))

    assert virtual(main()) == 5
