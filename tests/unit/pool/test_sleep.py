"""Models that sleep in host memory, in virtual time: a load takes ten seconds, waking one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.virtual_time import VirtualTime, now

from headrace import ModelPool
from headrace.concurrency import loading
from headrace.errors import ConfigError, EngineError
from headrace.pool.policy import SleeperView, to_sleep


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` runs at once: virtual time would not wait for a thread."""

    async def at_once(function: Callable[[], object], too_late: object = None) -> object:
        return function()

    monkeypatch.setattr(loading, "on_daemon_thread", at_once)


class Device:
    """What is on the device and in host memory, and how often."""

    def __init__(self, *, load_s: float = 10.0, wake_s: float = 1.0) -> None:
        self.load_s, self.wake_s = load_s, wake_s
        self.here: set[str] = set()
        self.host: set[str] = set()
        self.counts = Counter[str]()
        self.most_asleep = 0
        self.fails: dict[str, Exception] = {}
        self.too_large: set[str] = set()
        """Models for which the device has no room, because another process takes it."""

    def model(self, name: str) -> Callable[[], Awaitable[Sleeper]]:
        async def load() -> Sleeper:
            self.counts["load"] += 1
            await asyncio.sleep(self.load_s)
            self._check_room(name)
            self._enter(name)
            return Sleeper(self, name)

        return load

    def _enter(self, name: str) -> None:
        assert not self.here, "there is room for one"
        self.here.add(name)

    async def sleep(self, name: str) -> None:
        self._raise("sleep")
        self.counts["sleep"] += 1
        self.here.remove(name)
        self.host.add(name)
        self.most_asleep = max(self.most_asleep, len(self.host))

    async def wake(self, name: str) -> None:
        self._raise("wake")
        self._check_room(name)
        self.counts["wake"] += 1
        await asyncio.sleep(self.wake_s)
        self.host.remove(name)
        self._enter(name)

    def _check_room(self, name: str) -> None:
        if name in self.too_large:
            raise MemoryError("CUDA out of memory")

    def _raise(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]


class Sleeper:
    """A model that can sleep."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self.name = name

    async def sleep(self) -> None:
        await self._device.sleep(self.name)

    async def wake(self) -> None:
        await self._device.wake(self.name)

    def close(self) -> None:
        self._device.here.discard(self.name)
        self._device.host.discard(self.name)


def pool_of(device: Device, names: str, **options: Any) -> ModelPool:
    pool = ModelPool(max_models=1, **({"max_asleep": 2} | options))
    for name in names:
        pool.add(name, device.model(name), max_wait_s=0)
    return pool


async def turns(pool: ModelPool, names: str) -> list[float]:
    """Use models one after the other; the seconds that each waited."""
    waits: list[float] = []
    for name in names:
        began = now()
        async with pool.use(name) as model:
            assert model.name == name
            waits.append(round(now() - began, 3))
    return waits


def test_a_model_that_slept_is_woken_and_not_loaded(virtual: VirtualTime) -> None:
    device = Device()

    async def main() -> None:
        async with pool_of(device, "abc") as pool:
            assert await turns(pool, "abcabc") == [10, 10, 10, 1, 1, 1]
            stats = pool.stats()
            assert {name: (one.phase, one.loads, one.wakes) for name, one in stats.items()} == {
                "a": ("asleep", 1, 1),
                "b": ("asleep", 1, 1),
                "c": ("loaded", 1, 1),
            }
            assert stats["a"].wake_s == 1

    virtual(main())
    assert not device.here | device.host, "closing the pool leaves nothing asleep"


def test_models_without_room_in_host_memory_are_dropped(virtual: VirtualTime) -> None:
    device = Device()

    async def main() -> None:
        async with pool_of(device, "abc", max_asleep=1) as pool:
            await turns(pool, "abcabcabc")
            assert len(device.host) == 1
        async with pool_of(device, "ab", max_asleep=0) as pool:
            device.counts.clear()
            assert await turns(pool, "abab") == [10, 10, 10, 10]

    virtual(main())
    assert device.most_asleep == 1
    assert device.counts == {"load": 4}


def test_a_model_that_wakes_slower_than_it_loads_does_not_sleep_again(virtual: VirtualTime) -> None:
    device = Device(load_s=1.0, wake_s=5.0)

    async def main() -> None:
        async with pool_of(device, "ab") as pool:
            assert await turns(pool, "ababab") == [1, 1, 5, 5, 1, 1]

    virtual(main())


def test_a_shorter_waking_makes_a_switch_cheaper(virtual: VirtualTime) -> None:
    """The hold is twice the expected time: of waking, once that is known."""
    device = Device()

    async def main() -> None:
        pool = ModelPool(max_models=1, max_asleep=2)
        for name in "ab":
            pool.add(name, device.model(name))
        async with pool:
            await turns(pool, "ab")
            await asyncio.sleep(1_000)
            assert await turns(pool, "a") == [1]
            await asyncio.sleep(1_000)
            assert await turns(pool, "b") == [1]
            assert await turns(pool, "a") == [3], "twice the waking, and the waking"

    virtual(main())


@pytest.mark.parametrize("what", ["sleep", "wake"])
def test_a_model_that_cannot_sleep_or_wake_is_loaded_anew(
    virtual: VirtualTime, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.fails[what] = RuntimeError("no")

    async def main() -> None:
        async with pool_of(device, "ab") as pool:
            with caplog.at_level(logging.WARNING, "headrace"):
                assert await turns(pool, "aba") == [10, 10, 10]

    virtual(main())
    assert "model 'a' raised RuntimeError: no" in caplog.text
    assert not device.here | device.host


def test_memory_that_another_process_took_fails_the_requests_of_one_model_until_it_is_free(
    virtual: VirtualTime,
) -> None:
    device = Device()

    async def main() -> None:
        async with pool_of(device, "ab") as pool:
            await turns(pool, "ab")
            device.too_large = {"a"}
            waiting = asyncio.create_task(turns(pool, "a"))
            await asyncio.sleep(0)
            assert await turns(pool, "b") == [11]  # the load of the other fails, then it is woken
            with pytest.raises(EngineError, match="model 'a' cannot be loaded: CUDA out of memory"):
                await waiting
            device.too_large = set()
            await asyncio.sleep(2)
            assert await turns(pool, "a") == [10]

    virtual(main())
    assert not device.here | device.host


def test_a_waking_that_hangs_fails_its_requests_and_the_model_is_loaded_later(virtual: VirtualTime) -> None:
    device = Device(wake_s=1e9)

    async def main() -> None:
        pool = ModelPool(max_models=1, max_asleep=2)
        for name in "ab":
            pool.add(name, device.model(name), max_wait_s=0, load_timeout_s=30)
        async with pool:
            await turns(pool, "ab")
            with pytest.raises(EngineError, match="'a' took longer than 30 s to load"):
                await turns(pool, "a")
            await asyncio.sleep(2)
            assert await turns(pool, "a") == [10]

    virtual(main())


def test_unload_leaves_nothing_asleep(virtual: VirtualTime) -> None:
    device = Device()

    async def main() -> None:
        async with pool_of(device, "ab") as pool:
            await turns(pool, "ab")
            pool.unload("a")  # asleep
            pool.unload("b")  # loaded
            assert await turns(pool, "a") == [10], "asked for while it was dropped"
            assert not device.host

    virtual(main())


def test_the_room_belongs_to_the_unit_of_the_pool() -> None:
    with pytest.raises(ConfigError, match="max_asleep belongs to max_models"):
        ModelPool(memory_bytes=1e9, max_asleep=1)
    with pytest.raises(ConfigError, match="host_memory_bytes to memory_bytes"):
        ModelPool(max_models=1, host_memory_bytes=1e9)
    with pytest.raises(ConfigError, match="max_asleep is -1"):
        ModelPool(max_models=1, max_asleep=-1)


views = st.builds(SleeperView, st.uuids().map(str), st.floats(1, 100), st.floats(-10, 100), last_used=st.floats(0, 100))


@given(st.lists(views, max_size=8), st.floats(0, 300))
def test_what_sleeps_fits_and_is_worth_it(models: list[SleeperView], room: float) -> None:
    kept = to_sleep(models, room)
    chosen = [model for model in models if model.name in kept]
    assert sum(model.size for model in chosen) <= room + 1e-6
    assert all(model.saves_s > 0 for model in chosen)
    left = room - sum(model.size for model in chosen)
    assert not any(model.saves_s > 0 and model.size < left - 1e-6 for model in models if model.name not in kept)
