"""Models that come and go, in virtual time: a load takes a second unless a test says otherwise."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher, ModelPool
from headrace.errors import ConfigError, EngineError, NotRunningError, StoppedError


class Machine:
    """Counts what is in memory; a model is its own name."""

    def __init__(self, *, load_s: float = 1.0) -> None:
        self.load_s = load_s
        self.here: set[str] = set()
        self.loads: Counter[str] = Counter()
        self.fails: dict[str, Exception] = {}
        self.most = 0

    def model(self, name: str) -> Callable[[], AsyncIterator[str]]:
        async def load() -> AsyncIterator[str]:
            self.loads[name] += 1
            assert name not in self.here, "loaded twice"
            await asyncio.sleep(self.load_s)
            if name in self.fails:
                raise self.fails[name]
            self.here.add(name)
            self.most = max(self.most, len(self.here))
            yield name
            await asyncio.sleep(0.1)
            self.here.remove(name)

        return load

    def pool(self, models: str, **limits: Any) -> ModelPool:
        pool = ModelPool(**(limits or {"max_models": 1}))
        for name in models:
            pool.add(name, self.model(name))
        return pool


async def use(pool: ModelPool, name: str, seconds: float = 0.01) -> float:
    """Use a model for so long; returns when the use began."""
    async with pool.use(name) as model:
        assert model == name
        began = now()
        await asyncio.sleep(seconds)
        return began


def test_a_model_is_loaded_once_however_many_ask(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("a") as pool:
            assert set(await asyncio.gather(*[use(pool, "a") for _ in range(50)])) == {1.0}
            assert pool.stats()["a"].requests == 50
            assert pool.stats()["a"].wait_s == 50
        assert not machine.here

    virtual(main())
    assert machine.loads == {"a": 1}


def test_traffic_of_three_models_with_room_for_one_loses_nothing_and_keeps_the_device_busy(
    virtual: VirtualTime,
) -> None:
    """A permanent backlog, and a load that takes as long as 20 batches."""
    machine, used = Machine(load_s=1.0), Counter[str]()

    async def caller(pool: ModelPool, name: str, ends: float) -> None:
        while now() < ends:
            async with pool.use(name):
                await asyncio.sleep(0.05)
                used[name] += 1

    async def main() -> None:
        async with machine.pool("abc") as pool:
            await asyncio.gather(*[caller(pool, name, 600) for name in "abc" for _ in range(2)])
            stats = pool.stats()
            assert sum(entry.requests for entry in stats.values()) == sum(used.values())
            # A hold, and for both others: residency, the last request, unloading, loading.
            assert max(entry.longest_wait_s for entry in stats.values()) <= 2 + 2 * (10 + 0.05 + 0.1 + 1) + 1.1

    virtual(main())
    assert machine.most == 1
    busy = sum(used.values()) * 0.05 / 2 / 600
    assert busy >= 0.9
    assert max(used.values()) <= 1.3 * min(used.values())


@pytest.mark.parametrize("seed", range(5))
def test_at_random_no_more_is_in_memory_than_fits_and_each_request_is_served(seed: int, virtual: VirtualTime) -> None:
    machine, chance, served = Machine(load_s=0.3), random.Random(seed), Counter[str]()

    async def request(pool: ModelPool, name: str, after: float, seconds: float, patience: float) -> None:
        await asyncio.sleep(after)
        try:
            async with asyncio.timeout(patience):
                await use(pool, name, seconds)
                served[name] += 1
        except TimeoutError:
            served["left"] += 1

    async def main() -> None:
        async with machine.pool("abcd", max_models=2) as pool:
            names, patience = chance.choices("abcd", k=300), chance.choices((0.5, 500), k=300)
            await asyncio.gather(
                *[
                    request(pool, name, chance.uniform(0, 60), chance.expovariate(5), seconds)
                    for name, seconds in zip(names, patience, strict=True)
                ]
            )
            assert all(entry.in_use == entry.waiting == 0 for entry in pool.stats().values())

    virtual(main())
    assert sum(served.values()) == 300
    assert machine.most == 2
    assert not machine.here


def test_a_model_that_cannot_be_loaded_fails_its_own_requests_and_is_tried_again_later(virtual: VirtualTime) -> None:
    machine = Machine()
    machine.fails["b"] = OSError("no weights")

    async def main() -> None:
        async with machine.pool("abc", max_models=2) as pool:
            ended = await asyncio.gather(use(pool, "a"), use(pool, "b"), use(pool, "b"), return_exceptions=True)
            assert ended[0] == 1.0
            assert all(isinstance(error, EngineError) for error in ended[1:])
            assert str(ended[1]) == "model 'b' cannot be loaded: no weights"
            with pytest.raises(EngineError, match=r"no weights; it is tried again in 1\.0 s"):
                await use(pool, "b")
            await asyncio.sleep(1)
            with pytest.raises(EngineError, match=r"no weights$"):
                await use(pool, "b")
            with pytest.raises(EngineError, match=r"tried again in 2\.0 s"):
                await use(pool, "b")
            await asyncio.sleep(2)
            del machine.fails["b"]
            await use(pool, "b")
            assert (pool.stats()["b"].failed_loads, pool.stats()["b"].loads) == (2, 1)
            await use(pool, "c")
            await asyncio.sleep(9)
            await use(pool, "a")
            assert pool.stats()["b"].phase == "unloaded"
            machine.fails["b"] = OSError("no weights")
            with pytest.raises(EngineError, match=r"no weights$"):
                await use(pool, "b")
            with pytest.raises(EngineError, match=r"tried again in 1\.0 s"):
                await use(pool, "b")

    virtual(main())
    assert machine.loads["b"] == 4


def test_a_load_that_takes_too_long_leaves_the_room_to_others(virtual: VirtualTime) -> None:
    async def stuck() -> str:
        await asyncio.sleep(1e9)
        return "late"

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("stuck", stuck, load_timeout_s=30)
        pool.add("a", Machine().model("a"))
        async with pool:
            ended = await asyncio.gather(use(pool, "stuck"), use(pool, "a"), return_exceptions=True)
            assert isinstance(ended[0], EngineError)
            assert str(ended[0]) == "model 'stuck' took longer than 30 s to load"
            assert ended[1] == 31.0

    virtual(main())


def test_an_unused_model_is_unloaded_after_its_time(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        pool = ModelPool(max_models=3)
        pool.add("a", machine.model("a"), idle_timeout_s=60)
        pool.add("b", machine.model("b"))
        async with pool:
            await asyncio.gather(use(pool, "a"), use(pool, "b"))
            await asyncio.sleep(59.8)
            assert machine.here == {"a", "b"}
            await use(pool, "a")
            await asyncio.sleep(59.8)
            assert machine.here == {"a", "b"}
            await asyncio.sleep(1)
            assert machine.here == {"b"}
            assert await use(pool, "a") == pytest.approx(now() - 0.01)

    virtual(main())


def test_memory_is_measured_at_the_first_load_which_is_alone(virtual: VirtualTime) -> None:
    machine = Machine()
    sizes = {"a": 30.0, "b": 50.0, "c": 40.0}

    async def main() -> None:
        pool = machine.pool("abc", memory_bytes=100, used_memory=lambda: 7 + sum(sizes[name] for name in machine.here))
        async with pool:
            for name in "abc":
                await use(pool, name)
            assert {name: entry.size for name, entry in pool.stats().items()} == sizes
            await asyncio.sleep(100)
            await asyncio.gather(use(pool, "a"), use(pool, "c"))
            assert machine.here == {"a", "c"}
            await use(pool, "b")
            assert "b" in machine.here and sum(sizes[name] for name in machine.here) <= 100

    virtual(main())


def test_a_model_that_turns_out_to_be_too_large_is_refused_from_then_on(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        pool = machine.pool("ab", memory_bytes=100, used_memory=lambda: 300.0 * len(machine.here & {"a"}))
        async with pool:
            for _ in range(2):
                with pytest.raises(ConfigError, match="model 'a' takes 300 bytes, and the pool has 100"):
                    await use(pool, "a")
            await use(pool, "b")

    virtual(main())
    assert machine.loads == {"a": 1, "b": 1}


def test_memory_that_cannot_be_measured_fails_the_requests_and_leaves_nothing_loaded(virtual: VirtualTime) -> None:
    machine, measured = Machine(), iter([0.0, OSError("no device"), OSError("no device")])

    def used() -> float:
        found = next(measured)
        if isinstance(found, OSError):
            raise found
        return found

    async def main() -> None:
        async with machine.pool("a", memory_bytes=5, used_memory=used) as pool:
            for _ in range(2):  # after the load, and before it
                with pytest.raises(EngineError, match="model 'a' cannot be loaded: no device"):
                    await use(pool, "a")
                await asyncio.sleep(2)
                assert not machine.here

    virtual(main())


def test_closing_serves_what_has_begun_and_fails_what_waits(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        pool = machine.pool("ab")
        async with pool:
            begun = asyncio.create_task(use(pool, "a", 5))
            await asyncio.sleep(2)
            waiting = asyncio.create_task(use(pool, "b"))
            await asyncio.sleep(0)
        assert await begun == 1.0
        with pytest.raises(StoppedError, match="closing"):
            await waiting
        with pytest.raises(StoppedError, match="closing"):
            await use(pool, "a")
        assert not machine.here
        async with pool:
            await use(pool, "a")

    virtual(main())


def test_a_batcher_is_started_and_stopped(virtual: VirtualTime) -> None:
    made: list[DynamicBatcher[int, int]] = []

    def batcher() -> DynamicBatcher[int, int]:
        async def double(numbers: list[int]) -> list[int]:
            await asyncio.sleep(0.1)
            return [2 * number for number in numbers]

        made.append(DynamicBatcher(double))
        return made[-1]

    async def load() -> DynamicBatcher[int, int]:
        return batcher()

    async def main() -> None:
        pool = ModelPool(max_models=1)
        doubles = pool.add("doubles", load)
        async with pool, doubles.use() as batcher:
            results = await asyncio.gather(*[batcher.submit(number) for number in range(5)])
            assert await asyncio.gather(*results) == [0, 2, 4, 6, 8]
            assert batcher.is_running
        assert not made[0].is_running

    virtual(main())


class Closing:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("kind", ["function", "generator", "coroutine"])
def test_plain_functions_load_on_a_thread_and_models_are_closed(kind: str) -> None:
    model, threading_name = Closing(), list[str]()

    def function() -> Closing:
        threading_name.append(threading.current_thread().name)
        return model

    def generator() -> Iterator[Closing]:
        threading_name.append(threading.current_thread().name)
        yield model
        model.close()

    async def coroutine() -> Closing:
        return model

    async def main() -> None:
        pool = ModelPool(max_models=1)
        load: Callable[[], Any] = {"function": function, "generator": generator, "coroutine": coroutine}[kind]
        pool.add("it", load)
        async with pool, pool.use("it") as used:
            assert used is model
            assert not model.closed

    asyncio.run(main())
    assert model.closed
    assert threading_name == ([] if kind == "coroutine" else ["headrace-model"])


def test_a_generator_without_a_model_is_named() -> None:
    def nothing() -> Iterator[int]:
        yield from ()

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("it", nothing)
        async with pool:
            with pytest.raises(EngineError, match="'it' cannot be loaded: its generator yields no model"):
                await use(pool, "it")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError("still in use"), "unloading model 'bad' raised OSError: still in use"), (SystemExit(3), "")],
    ids=["an error", "an exit"],
)
def test_an_unload_that_fails_is_logged_and_gives_the_room_back(
    virtual: VirtualTime, caplog: pytest.LogCaptureFixture, error: BaseException, told: str
) -> None:
    async def bad() -> AsyncIterator[str]:
        yield "bad"
        raise error

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("bad", bad)
        pool.add("a", Machine().model("a"))
        async with pool:
            await use(pool, "bad")
            await use(pool, "a")

    virtual(main())
    assert told in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ModelPool, "either max_models or memory_bytes"),
        (lambda: ModelPool(max_models=1, memory_bytes=1), "either max_models or memory_bytes"),
        (lambda: ModelPool(max_models=0), "max_models is 0"),
        (lambda: ModelPool(memory_bytes=0), "memory_bytes is 0"),
        (lambda: ModelPool(max_models=1).add("a", str, memory_bytes=5), "no meaning in a pool with max_models"),
        (lambda: ModelPool(memory_bytes=4).add("a", str, memory_bytes=5), "takes 5 bytes, and the pool has 4"),
        (lambda: ModelPool(max_models=1).add("a", str, max_wait_s=-1), "max_wait_s is -1"),
        (lambda: ModelPool(max_models=1).add("a", str, idle_timeout_s=0), "idle_timeout_s is 0"),
        (lambda: ModelPool(max_models=1).add("a", str, load_timout_s=3), "no option 'load_timout_s'"),  # type: ignore[call-arg]
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_names_and_life_of_a_pool(virtual: VirtualTime) -> None:
    async def main() -> None:
        pool = Machine().pool("ab")
        with pytest.raises(ConfigError, match="has a model 'a' already"):
            pool.add("a", str)
        with pytest.raises(NotRunningError, match="async with"):
            await use(pool, "a")
        async with pool:
            with pytest.raises(ConfigError, match="no model 'x'; it has a, b"):
                await use(pool, "x")

    virtual(main())


def test_a_model_that_is_unloaded_while_it_loads_serves_what_waits_and_leaves(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("a") as pool:
            waiting = asyncio.create_task(use(pool, "a"))
            await asyncio.sleep(0.5)
            pool.unload("a")
            assert await waiting == 1.0
            await asyncio.sleep(0.2)
            assert (pool.stats()["a"].phase, machine.here) == ("unloaded", set())
            await use(pool, "a")
            await asyncio.sleep(1)
            assert pool.stats()["a"].phase == "loaded"

    virtual(main())


def test_a_request_that_leaves_does_not_hold_a_model(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("ab") as pool:
            leaving: list[Awaitable[float]] = [asyncio.create_task(use(pool, "a")) for _ in range(3)]
            await asyncio.sleep(0.5)
            for task in leaving:
                task.cancel()  # type: ignore[attr-defined]
            assert await use(pool, "b") > 1
            assert pool.stats()["a"].in_use == 0

    virtual(main())


def test_a_request_that_leaves_takes_no_room_from_others(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        async with machine.pool("ab") as pool, pool.use("a"):
            await asyncio.sleep(20)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await use(pool, "b")
            await asyncio.sleep(20)
            assert pool.stats()["a"].phase == "loaded"

    virtual(main())


def test_a_request_that_leaves_at_the_moment_it_gets_the_model_gives_it_back(virtual: VirtualTime) -> None:
    leaving: list[asyncio.Task[float]] = []

    async def load() -> str:
        await asyncio.sleep(1)
        asyncio.get_running_loop().call_soon(leaving[0].cancel)  # runs once the model is granted
        return "it"

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("it", load)
        async with pool:
            leaving.append(asyncio.create_task(use(pool, "it")))
            [ended] = await asyncio.gather(*leaving, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError)
            assert (pool.stats()["it"].requests, pool.stats()["it"].in_use) == (1, 0)

    virtual(main())


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(), TimeoutError()]
)
@pytest.mark.parametrize("kind", ["function", "coroutine", "async generator"])
def test_whatever_loading_raises_fails_its_own_requests_and_leaves_the_room(error: BaseException, kind: str) -> None:
    def function() -> str:
        raise error

    async def coroutine() -> str:
        raise error

    async def generator() -> AsyncIterator[str]:
        if kind:
            raise error
        yield "it"

    async def main() -> None:
        pool = ModelPool(max_models=1)
        load: Any = {"function": function, "coroutine": coroutine, "async generator": generator}[kind]
        pool.add("it", load, load_timeout_s=None)
        pool.add("a", Machine(load_s=0).model("a"))
        async with pool:
            with pytest.raises(EngineError, match="model 'it' cannot be loaded"):
                await use(pool, "it")
            await use(pool, "a", 0)

    asyncio.run(main())


def test_models_that_never_fit_together_take_turns(virtual: VirtualTime) -> None:
    machine = Machine()

    async def main() -> None:
        pool = ModelPool(memory_bytes=100)
        for name in "ab":
            pool.add(name, machine.model(name), memory_bytes=60, max_wait_s=0)
        async with pool:
            for name in "abab":
                await use(pool, name)

    virtual(main())
    assert machine.loads == {"a": 2, "b": 2}
    assert machine.most == 1


def test_a_model_whose_parts_refer_to_each_other_is_freed(virtual: VirtualTime) -> None:
    class Part:
        def __init__(self) -> None:
            self.whole = self

    found: list[weakref.ref[Part]] = []

    def load() -> Part:
        part = Part()
        found.append(weakref.ref(part))
        return part

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("a", load)
        async with pool:
            for _ in range(3):
                async with pool.use("a"):
                    pass
                pool.unload("a")

    gc.disable()
    try:
        virtual(main())
        assert [one() for one in found[:2]] == [None, None]  # the thread that loaded the last may still hold it
    finally:
        gc.enable()
