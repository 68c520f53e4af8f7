"""Background work in a pool with room for one model: behind requests, but never starved. In virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.pool.test_pool import Machine, use
from tests.unit.virtual_time import VirtualTime, now

from headrace import ModelPool
from headrace.pool.policy import BACKGROUND_HOLD_S


class Bulk:
    """Work of many seconds that leaves the model when it is asked to, and comes back."""

    def __init__(self, pool: ModelPool, name: str, seconds: float) -> None:
        self._pool, self._name, self._left = pool, name, seconds
        self.began: list[float] = []
        self.ended = 0.0

    async def run(self) -> None:
        while self._left > 0:
            asked = asyncio.Event()
            async with self._pool.use_in_background(self._name, asked.set):
                self.began.append(now())
                while self._left > 0 and not asked.is_set():
                    await asyncio.sleep(0.5)
                    self._left -= 0.5
        self.ended = now()


def test_it_makes_room_for_a_request_and_goes_on_when_that_model_is_unused(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("ab") as pool:
            bulk = Bulk(pool, "a", 30)
            working = asyncio.create_task(bulk.run())
            await asyncio.sleep(10)
            assert await use(pool, "b") <= 10 + 0.5 + 0.1 + 1, "its turn, unloading, loading"
            await working
            assert len(bulk.began) == 2
            assert bulk.began[1] <= 11.6 + 2 + 1.2, "the hold, unloading, loading"

    virtual(main())
    assert machine.loads == {"a": 2, "b": 1}


def test_models_of_background_work_take_turns_without_waiting_and_with_one_load_each(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("ab") as pool:
            jobs = [Bulk(pool, name, 20) for name in "abab"]
            await asyncio.gather(*[job.run() for job in jobs])
            assert max(job.ended for job in jobs) <= 20 + 20 + 2 * 1.2

    virtual(main())
    assert machine.loads == {"a": 1, "b": 1}


@pytest.mark.parametrize("in_background", [False, True])
def test_it_is_not_starved(in_background: bool, virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("ab") as pool:
            busy = asyncio.Event()

            async def requests() -> None:
                while not busy.is_set():
                    if in_background:
                        await Bulk(pool, "a", 5).run()
                    else:
                        await use(pool, "a", 0.1)

            callers = [asyncio.create_task(requests()) for _ in range(3)]
            await asyncio.sleep(5)
            bulk = Bulk(pool, "b", 1)
            await bulk.run()
            assert BACKGROUND_HOLD_S <= bulk.ended - 5 <= BACKGROUND_HOLD_S + 10
            busy.set()
            await asyncio.gather(*callers)

    virtual(main())


def test_a_model_in_background_use_is_not_unused(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("a", machine.model("a"), idle_timeout_s=5)
        async with pool:
            await Bulk(pool, "a", 20).run()
            await asyncio.sleep(4.8)
            assert pool.stats()["a"].phase == "loaded"
            await asyncio.sleep(1)
            assert pool.stats()["a"].phase == "unloaded"

    virtual(main())
    assert machine.loads == {"a": 1}


def test_closing_and_unloading_ask_it_to_leave(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("a") as pool:
            asked = asyncio.Event()
            async with pool.use_in_background("a", asked.set):
                pool.unload("a")
                await asked.wait()
                assert pool.stats()["a"].phase == "draining"
            asked.clear()

            async def work() -> None:
                async with pool.use_in_background("a", asked.set):
                    await asked.wait()

            working = asyncio.create_task(work())
            await asyncio.sleep(3)
        await working

    virtual(main())
    assert not machine.here
