"""Requests under way side by side: bounded, without a boundary, and each one may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime

from headrace.batching.passthrough import PassthroughBatcher
from headrace.errors import ConfigError, DeadlineExceededError, EngineDeadError, RecordError


class Engine:
    """Requests wait until they are let go."""

    def __init__(self) -> None:
        self.gates: dict[Any, asyncio.Future[None]] = {}
        self.most = 0
        self.cancelled: list[Any] = []

    async def infer(self, record: Any) -> Any:
        gate = self.gates[record] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.gates))
        try:
            await gate
        except asyncio.CancelledError:
            self.cancelled.append(record)
            raise
        finally:
            del self.gates[record]
        return record * 10

    def let_go(self, record: Any) -> None:
        self.gates[record].set_result(None)


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_that_ends_makes_room_for_the_next_while_the_others_go_on(virtual: VirtualTime) -> None:
    async def main() -> None:
        engine = Engine()
        async with PassthroughBatcher[int, int](engine.infer, max_in_flight=3) as batcher:
            futures = [await batcher.submit(number) for number in range(5)]
            await _settle()
            assert list(engine.gates) == [0, 1, 2]
            engine.let_go(1)
            await _settle()
            assert list(engine.gates) == [0, 2, 3]
            assert [future.done() for future in futures] == [False, True, False, False, False]
            for number in (3, 2, 0):
                engine.let_go(number)
            await _settle()
            engine.let_go(4)
            assert await asyncio.gather(*futures) == [0, 10, 20, 30, 40]
        assert engine.most == 3

    virtual(main())


def test_a_stream_is_read_no_further_than_the_bounds(virtual: VirtualTime) -> None:
    async def main() -> None:
        engine = Engine()
        read = 0

        async def endless() -> AsyncIterator[int]:
            nonlocal read
            while True:
                yield read
                read += 1

        async with PassthroughBatcher[int, int](engine.infer, max_in_flight=2, max_queue_size=4) as batcher:
            results = batcher.as_completed(endless())
            reader = asyncio.ensure_future(anext(results))
            await _settle()
            assert read <= 2 * (4 + 2) + 1
            engine.let_go(1)
            assert await reader == (1, 10)
            await results.aclose()
            await _settle()
            assert sorted(engine.cancelled) == [0, 2]

    virtual(main())


def test_cancelling_takes_a_running_request_out_and_gives_its_place_to_the_next(virtual: VirtualTime) -> None:
    async def main() -> None:
        engine = Engine()
        async with PassthroughBatcher[int, int](engine.infer, max_in_flight=1) as batcher:
            first, second = await batcher.submit(1), await batcher.submit(2)
            await _settle()
            first.cancel()
            await _settle()
            assert engine.cancelled == [1]
            assert list(engine.gates) == [2]
            engine.let_go(2)
            assert await second == 20
            assert batcher.stats.in_flight == 0
            assert batcher.stats.total_completed == 1

    virtual(main())


def test_cancelling_before_the_request_has_begun_leaves_nothing_behind(virtual: VirtualTime) -> None:
    async def main() -> None:
        engine = Engine()
        async with PassthroughBatcher[int, int](engine.infer, max_in_flight=1) as batcher:
            for turns in range(4):
                future = await batcher.submit(turns)
                for _ in range(turns):
                    await asyncio.sleep(0)
                future.cancel()
                await _settle()
                assert not engine.gates
            last = await batcher.submit(9)
            await _settle()
            engine.let_go(9)
            assert await last == 90
            assert batcher.stats.in_flight == batcher.stats.waiting == 0

    virtual(main())


def test_a_deadline_counts_only_until_the_request_has_begun(virtual: VirtualTime) -> None:
    async def main() -> None:
        engine = Engine()
        async with PassthroughBatcher[int, int](engine.infer, max_in_flight=1) as batcher:
            running = await batcher.submit(1, deadline_s=0.001)
            waiting = await batcher.submit(2, deadline_s=0.001)
            with pytest.raises(DeadlineExceededError):
                await waiting
            engine.let_go(1)
            assert await running == 10
            assert batcher.stats.waiting == 0

    virtual(main())


def test_an_error_is_the_request_s_own(virtual: VirtualTime) -> None:
    async def main() -> None:
        async def infer(record: int) -> int:
            await asyncio.sleep(0)
            if record == 2:
                raise RecordError("two is refused")
            return record

        async with PassthroughBatcher[int, int](infer, max_in_flight=4) as batcher:
            results = [result async for result in batcher.map(range(5), return_exceptions=True)]
        assert [result for result in results if not isinstance(result, Exception)] == [0, 1, 3, 4]
        assert isinstance(results[2], RecordError)

    virtual(main())


def test_a_dead_engine_fails_each_request_and_nobody_hangs(virtual: VirtualTime) -> None:
    async def main() -> None:
        async def infer(record: int) -> int:
            raise EngineDeadError("it is gone")

        async with PassthroughBatcher[int, int](infer, max_in_flight=4) as batcher:
            results = [result async for result in batcher.map(range(50), return_exceptions=True)]
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert len(results) == 50

    virtual(main())


def test_a_wrong_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="max_in_flight is 0"):
        PassthroughBatcher[int, int](Engine().infer, max_in_flight=0)
    with pytest.raises(ConfigError, match="infer_fn is 3"):
        PassthroughBatcher[int, int](3, max_in_flight=1)  # type: ignore[arg-type]
