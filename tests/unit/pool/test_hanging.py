"""Models whose own code hangs, in virtual time: what it costs the others, and the end of the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace import ModelPool


async def hang() -> None:
    await asyncio.Event().wait()


async def hangs_at_the_end() -> AsyncIterator[str]:
    yield "it"
    await hang()


class HangsAsleep:
    def __init__(self) -> None:
        self.is_closed = False

    async def sleep(self) -> None:
        await hang()

    async def wake(self) -> None:
        raise AssertionError("it never slept")


async def hangs_asleep() -> HangsAsleep:
    return HangsAsleep()


@pytest.mark.parametrize(
    ("load", "message"),
    [(hangs_at_the_end, "unloading model 'it' raised TimeoutError: it took longer than 30 s"),
     (hangs_asleep, "putting to sleep model 'it' raised TimeoutError: it took longer than 30 s")],
)  # fmt: skip
def test_a_model_that_hangs_when_it_makes_room_gives_it_to_others(
    virtual: VirtualTime, caplog: pytest.LogCaptureFixture, load: Callable[[], Awaitable[object]], message: str
) -> None:
    async def main() -> None:
        pool = ModelPool(max_models=1, max_asleep=1)
        pool.add("it", load, load_timeout_s=30)
        pool.add("other", str, max_wait_s=0)
        async with pool:
            async with pool.use("it"):
                pass
            async with pool.use("other"):
                assert now() == pytest.approx(30, abs=1)

    with caplog.at_level(logging.WARNING, "headrace"):
        virtual(main())
    assert message in caplog.text


def test_a_pool_closes_though_a_load_hangs_and_waits_for_one_that_does_not(virtual: VirtualTime) -> None:
    ended: list[str] = []

    async def slow() -> AsyncIterator[str]:
        await asyncio.sleep(9)
        yield "slow"
        ended.append("slow")

    async def main() -> None:
        pool = ModelPool(max_models=2)
        pool.add("hangs", hang)
        pool.add("slow", slow)
        async with pool:
            waiting = [asyncio.create_task(pool.use(name).__aenter__()) for name in ("hangs", "slow")]
            await asyncio.sleep(0)
        assert now() == pytest.approx(10)
        assert {type(error).__name__ for error in await asyncio.gather(*waiting, return_exceptions=True)} == {
            "StoppedError"
        }
        assert {entry.phase for entry in pool.stats().values()} == {"unloaded"}

    virtual(main())
    assert ended == ["slow"]
