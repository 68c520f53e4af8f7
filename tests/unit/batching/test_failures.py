"""Whatever process_fn does, each caller gets an answer of its own."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from tests.shown import shown
from tests.unit.batching.doubles import Engine, double, outcomes
from tests.unit.virtual_time import VirtualTime, VirtualTimeLoop, now

from headrace import DynamicBatcher
from headrace.batching.dispatch import offload
from headrace.errors import BadResultError, CostError, EngineDeadError, ProcessError, ProcessTimeoutError


class UncopyableError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason}: {code}")

    def __copy__(self) -> UncopyableError:
        raise TypeError("not me")


class SingletonError(Exception):
    def __copy__(self) -> SingletonError:
        return self


RAISED: list[tuple[BaseException, type[Exception]]] = [
    (ValueError("bad"), ValueError),
    (EngineDeadError("gone"), EngineDeadError),
    (BaseException("base"), ProcessError),
    (KeyboardInterrupt(), ProcessError),
    (SystemExit(3), ProcessError),
    (asyncio.CancelledError(), ProcessError),
    (GeneratorExit(), ProcessError),
    (UncopyableError(5, reason="odd"), ProcessError),
    (SingletonError("one"), ProcessError),
    (ExceptionGroup("both", [ValueError(1), TypeError(2)]), ExceptionGroup),
]


def raising(how: str, cause: BaseException) -> Callable[[list[Any]], Any]:
    """A process_fn of each kind that raises `cause`, unless the first record says that all is well."""

    def blocking(batch: list[Any]) -> list[Any]:
        if batch[0] != "well":
            raise cause
        return batch

    async def on_the_loop(batch: list[Any]) -> list[Any]:
        await asyncio.sleep(1)
        return blocking(batch)

    return {"async": on_the_loop, "blocking": blocking, "lambda": lambda batch: on_the_loop([*batch])}[how]


KINDS = ["async", "blocking", "lambda"]


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize(("cause", "kind"), RAISED, ids=lambda value: getattr(value, "__name__", type(value).__name__))
def test_each_caller_gets_an_exception_of_its_own_and_the_batcher_goes_on(
    virtual: VirtualTime, how: str, cause: BaseException, kind: type[Exception]
) -> None:
    async def main() -> list[Any]:
        async with DynamicBatcher(raising(how, cause)) as batcher:
            results = await outcomes(await batcher.submit_batch([1, 2, 3]))
            mapped = [result async for result in batcher.map([1, 2, 3], return_exceptions=True)]
            assert await (await batcher.submit("well")) == "well"
            return results + mapped

    results = virtual(main())
    assert [type(result) for result in results] == [kind] * 6
    assert len({id(result) for result in results}) == 6
    assert all(result is not cause for result in results)
    assert all(result.__cause__ is cause for result in results)
    if kind is ProcessError:
        assert all(type(cause).__name__ in str(result) for result in results)


@pytest.mark.parametrize("how", ["async", "blocking"])
def test_a_stop_iteration_is_an_error_like_others(virtual: VirtualTime, how: str) -> None:
    async def main() -> list[Any]:
        async with DynamicBatcher(raising(how, StopIteration(7))) as batcher:
            return await outcomes(await batcher.submit_batch([1, 2]))

    assert all(isinstance(result, RuntimeError) for result in virtual(main()))


def generator() -> Iterator[int]:
    yield from (1, 2, 3)


@pytest.mark.parametrize("on_error", ["fail", "isolate"])
@pytest.mark.parametrize(
    "returned",
    ["abc", b"abc", {1: 1, 2: 2, 3: 3}, {1, 2, 3}, frozenset({1, 2, 3}), None, 3, generator(), UserDict({1: 1, 2: 2})],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_list_of_results_is_named_by_its_type(virtual: VirtualTime, returned: Any, on_error: Any) -> None:
    async def main() -> list[Any]:
        async with DynamicBatcher(lambda batch: returned, on_error=on_error) as batcher:
            return await outcomes(await batcher.submit_batch([1, 2, 3]))

    for result in virtual(main()):
        assert isinstance(result, BadResultError)
        assert f"process_fn returned {type(returned).__name__}" in str(result)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_wrong_number_of_results_is_told_with_both_numbers(virtual: VirtualTime, count: int) -> None:
    async def main() -> list[Any]:
        async with DynamicBatcher(lambda batch: [0] * count) as batcher:
            return await outcomes(await batcher.submit_batch([1, 2, 3]))

    for result in virtual(main()):
        assert isinstance(result, BadResultError)
        assert f"returned {count} results for batch of 3" in str(result)


class Labelled:
    """Indexes by label, iterates by position, as a pandas Series does."""

    def __init__(self, by_label: dict[int, int]) -> None:
        self.by_label = by_label

    def __len__(self) -> int:
        return len(self.by_label)

    def __getitem__(self, label: int) -> int:
        return self.by_label[label]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_label.values())


@pytest.mark.parametrize(
    "kind", [tuple, deque, lambda results: Labelled(dict(zip([2, 0, 1], results, strict=True)))], ids=shown
)
@pytest.mark.parametrize("mapped", [False, True])
def test_any_sequence_of_results_is_taken_by_position(
    virtual: VirtualTime, kind: Callable[[list[int]], Any], mapped: bool
) -> None:
    async def main() -> list[Any]:
        async with DynamicBatcher(
            lambda batch: kind([double(record) for record in batch]), max_batch_size=3
        ) as batcher:
            if mapped:
                return [result async for result in batcher.map(range(3))]
            return await outcomes(await batcher.submit_batch(range(3)))

    assert virtual(main()) == [0, 2, 4]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("place", [list, tuple, deque])
def test_an_exception_in_a_record_s_place_fails_that_record_alone(
    virtual: VirtualTime, mapped: bool, place: Callable[[Any], Any]
) -> None:
    causes: dict[int, BaseException] = {1: ValueError("bad"), 3: KeyboardInterrupt()}

    async def process(batch: list[int]) -> Any:
        return place(causes.get(record, record) for record in batch)

    async def main() -> tuple[list[Any], int]:
        async with DynamicBatcher(process) as batcher:
            if mapped:
                results = [result async for result in batcher.map(range(5), return_exceptions=True)]
            else:
                results = await outcomes(await batcher.submit_batch(range(5)))
            return results, batcher.stats.total_failed

    results, failed = virtual(main())
    assert [type(result) for result in results] == [int, ValueError, int, ProcessError, int]
    assert results[1] is not causes[1]
    assert results[1].__cause__ is causes[1]
    assert failed == 2


def test_an_engine_that_never_returns_fails_its_batch_at_the_limit_and_the_next_one_runs(virtual: VirtualTime) -> None:
    engine = Engine(seconds=1)

    async def stuck(batch: list[int]) -> list[int]:
        if 0 in batch:
            try:
                await asyncio.sleep(10**9)
            except asyncio.CancelledError:
                await asyncio.sleep(10**6)  # nor does it agree to end
        return await engine(batch)

    async def main() -> None:
        async with DynamicBatcher(stuck, max_batch_size=2, process_timeout_s=30) as batcher:
            first = await batcher.submit_batch([0, 1])
            second = await batcher.submit_batch([2, 3])
            for result in await outcomes(first):
                assert isinstance(result, ProcessTimeoutError)
                assert "process_timeout_s=30" in str(result)
            assert now() == 30
            assert await outcomes(second) == [4, 6]
            assert now() == 31

    virtual(main())


def test_a_blocking_function_that_never_returns_is_left_behind_on_its_thread(virtual: VirtualTime) -> None:
    let_go = threading.Event()
    stuck = threading.Event()

    def process(batch: list[int]) -> list[int]:
        if 0 in batch:
            stuck.set()
            assert let_go.wait(60)
        return [double(record) for record in batch]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        batcher = DynamicBatcher(process, max_batch_size=1, process_timeout_s=30)
        await batcher.start()
        first, second = await batcher.submit(0), await batcher.submit(1)
        await asyncio.to_thread(stuck.wait)
        loop.awaited.clear()  # time goes on, although that thread does not
        assert isinstance((await outcomes([first]))[0], ProcessTimeoutError)
        assert now() == 30
        assert await second == 2
        await batcher.stop()
        let_go.set()

    virtual(main())


def estimators(cost: Any) -> Any:
    def estimate(record: Any) -> Any:
        if record == "well":
            return 1
        if isinstance(cost, BaseException):
            raise cost
        return cost

    return estimate


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1, -0.001, "x", None, [1], 1j, 10**400], ids=shown)
def test_a_cost_that_is_no_number_is_refused_and_harms_nobody(virtual: VirtualTime, cost: Any) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(), cost_estimator=estimators(cost)) as batcher:
            good = await batcher.submit("well")
            with pytest.raises(CostError, match="the cost of a str record is"):
                await batcher.submit("ill")
            with pytest.raises(CostError):
                batcher.submit_nowait("ill")
            if cost is not None:
                with pytest.raises(CostError):
                    await batcher.submit("explicit", estimated_cost=cost)
            assert await good == "wellwell"
            assert batcher.stats.total_submitted == 1

    virtual(main())


def test_an_estimator_that_raises_raises_in_its_own_caller(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(), cost_estimator=estimators(KeyError("tokens"))) as batcher:
            good = await batcher.submit("well")
            with pytest.raises(KeyError, match="tokens"):
                await batcher.submit("ill")
            assert await good == "wellwell"

    virtual(main())


def test_any_real_number_is_a_cost(virtual: VirtualTime) -> None:
    numpy = pytest.importorskip("numpy")

    async def main() -> float:
        async with DynamicBatcher(Engine()) as batcher:
            for cost in (1, 0, 0.5, True, Fraction(1, 2), numpy.int64(2), numpy.float32(3), numpy.float64(4)):
                await batcher.submit(1, estimated_cost=cost)
            await batcher.stop()
            return batcher.stats.total_batch_cost

    assert virtual(main()) == 12


class Large:
    """A record or a result that takes memory."""


@pytest.mark.parametrize("how", ["async", "blocking"])
def test_nothing_of_a_batch_is_kept_once_it_is_answered(
    virtual: VirtualTime, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch may be far away."""
    idle = threading.Event()

    class Calls(queue.SimpleQueue[Any]):
        def get(self, *args: Any) -> Any:
            idle.set()
            return super().get(*args)

    monkeypatch.setattr(offload, "queue", SimpleNamespace(SimpleQueue=Calls))

    def blocking(batch: list[Large]) -> list[Large]:
        idle.clear()
        return [Large() for _ in batch]

    async def on_the_loop(batch: list[Large]) -> list[Large]:
        return [Large() for _ in batch]

    async def main() -> None:
        async with DynamicBatcher(blocking if how == "blocking" else on_the_loop, max_batch_size=3) as batcher:
            records = [Large() for _ in range(3)]
            refs = [weakref.ref(record) for record in records]
            for future in await batcher.submit_batch(records):
                refs.append(weakref.ref(await future))
                del future
            records.clear()
            if how == "blocking":
                await asyncio.to_thread(idle.wait, 30)
            await asyncio.sleep(1)
            gc.collect()
            assert [ref() for ref in refs] == [None] * 6

    virtual(main())
