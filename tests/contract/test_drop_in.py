"""What users of `flyte.extras` lean on, documented or not: one suite for theirs, where installed, and for ours."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(params=["headrace", "flyte.extras"])
def extras(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test. Theirs is optional: `pip install headrace[bench]`."""
    if request.param == "headrace":
        return importlib.import_module("headrace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports in turn
        return pytest.importorskip("flyte.extras")  # type: ignore[no-any-return]


class Engine:
    """Answers at once, or once it is let go."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[Any]] = []
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        if not held:
            self.let_go.set()

    async def __call__(self, batch: list[Any]) -> list[Any]:
        self.batches.append(list(batch))
        self.started.set()
        await self.let_go.wait()
        return [f"result for {record}" for record in batch]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


async def settled(waiting: Awaitable[Any], seconds: float = 0.2) -> bool:
    """Whether something that should not end has ended after a while."""
    done, _ = await asyncio.wait({asyncio.ensure_future(waiting)}, timeout=seconds)
    return bool(done)


def defaults(cls: type) -> dict[str, Any]:
    """Keyword parameters of a constructor and of those it passes the rest on to, with their defaults."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]  # of a class
            found.update({p.name: p.default for p in parameters if p.name != "self" and p.kind != p.VAR_KEYWORD})
    return found


DYNAMIC = {
    "process_fn": inspect.Parameter.empty,
    "cost_estimator": None,
    "target_batch_cost": 32_000,
    "max_batch_size": 256,
    "min_batch_size": 1,
    "batch_timeout_s": 0.05,
    "max_queue_size": 5_000,
    "prefetch_batches": 2,
    "default_cost": 1,
}
TOKENS = DYNAMIC | {
    "inference_fn": None,
    "process_fn": None,
    "token_estimator": None,
    "target_batch_tokens": None,
    "default_token_estimate": None,
}


@pytest.mark.parametrize(("name", "expected"), [("DynamicBatcher", DYNAMIC), ("TokenBatcher", TOKENS)])
def test_parameters_have_these_names_and_defaults(extras: ModuleType, name: str, expected: dict[str, Any]) -> None:
    found = defaults(getattr(extras, name))
    assert {name: found[name] for name in expected} == expected


def test_the_function_may_be_given_by_position(extras: ModuleType) -> None:
    for cls in (extras.DynamicBatcher, extras.TokenBatcher):
        parameters = list(inspect.signature(cls).parameters.values())
        assert parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[1:])


def test_submit_takes_these(extras: ModuleType) -> None:
    assert {"record", "estimated_cost"} <= set(inspect.signature(extras.DynamicBatcher.submit).parameters)
    tokens = set(inspect.signature(extras.TokenBatcher.submit).parameters)
    assert {"record", "estimated_cost", "estimated_tokens"} <= tokens


def test_classes_can_be_subscripted(extras: ModuleType) -> None:
    async def main() -> None:
        batcher = extras.TokenBatcher[extras.Prompt, str](inference_fn=Engine())
        async with batcher, extras.DynamicBatcher[dict, str](process_fn=Engine()) as other:
            await (await batcher.submit(extras.Prompt(text="hello")))
            await (await other.submit({}))

    run(main)


def test_four_submits_are_accepted_while_the_first_is_processed_and_the_fifth_waits(extras: ModuleType) -> None:
    async def main() -> None:
        engine = Engine(held=True)
        options = {"max_queue_size": 1, "max_batch_size": 1, "prefetch_batches": 1}
        async with extras.DynamicBatcher(process_fn=engine, **options) as batcher:
            futures = [await batcher.submit(0)]
            await engine.started.wait()
            futures += [await batcher.submit(number) for number in range(1, 4)]
            fifth = asyncio.ensure_future(batcher.submit(4))
            assert not await settled(asyncio.shield(fifth))
            assert engine.batches == [[0]]
            engine.let_go.set()
            futures.append(await fifth)
            assert await asyncio.gather(*futures) == [f"result for {number}" for number in range(5)]

    run(main)


def test_three_submits_in_a_row_land_in_one_batch(extras: ModuleType) -> None:
    async def main() -> None:
        engine = Engine()
        async with extras.DynamicBatcher(process_fn=engine) as batcher:
            futures = [await batcher.submit(record) for record in "abc"]
            assert await asyncio.gather(*futures) == ["result for a", "result for b", "result for c"]
        assert engine.batches == [["a", "b", "c"]]

    run(main)


def test_submit_returns_a_future(extras: ModuleType) -> None:
    async def main() -> None:
        async with extras.DynamicBatcher(process_fn=Engine()) as batcher:
            future = await batcher.submit(1)
            assert isinstance(future, asyncio.Future)
            assert not future.done()
            assert await future == "result for 1"

    run(main)


@pytest.mark.parametrize(
    ("full", "costs", "batches"),
    [
        ({"max_batch_size": 2}, {}, [[1, 2], [3, 4]]),
        ({"target_batch_cost": 10}, {"estimated_cost": [5, 5, 10, 10]}, [[1, 2], [3], [4]]),
    ],
    ids=["by size", "by cost"],
)
def test_a_full_batch_does_not_wait_for_the_timeout(
    extras: ModuleType, full: dict[str, Any], costs: dict[str, Any], batches: list[list[int]]
) -> None:
    async def main() -> None:
        engine = Engine()
        async with extras.DynamicBatcher(process_fn=engine, batch_timeout_s=1000, **full) as batcher:
            await asyncio.gather(*await batcher.submit_batch([1, 2, 3, 4], **costs))
        assert engine.batches == batches

    run(main)


def test_an_unfilled_batch_waits_for_the_timeout(extras: ModuleType) -> None:
    async def main() -> None:
        async with extras.DynamicBatcher(process_fn=Engine(), batch_timeout_s=0.1) as batcher:
            loop = asyncio.get_running_loop()
            started = loop.time()
            await (await batcher.submit(1))
            assert loop.time() - started >= 0.09

    run(main)


def test_errors_say_what_users_match_on(extras: ModuleType) -> None:
    async def one_result(batch: list[Any]) -> list[Any]:
        return ["one"]

    async def main() -> None:
        batcher = extras.DynamicBatcher(process_fn=one_result)
        with pytest.raises(RuntimeError, match=r"DynamicBatcher is not running. Call start\(\) or use 'async with'"):
            await batcher.submit(1)
        await batcher.start()
        with pytest.raises(RuntimeError, match="DynamicBatcher is already running"):
            await batcher.start()
        for future in await batcher.submit_batch([1, 2, 3]):
            with pytest.raises(ValueError, match="process_fn returned 1 results for batch of 3 records"):
                await future
        await batcher.stop()
        with pytest.raises(RuntimeError, match="not running"):
            await batcher.submit(1)

    run(main)


def test_a_function_that_raises_fails_its_batch_and_the_batcher_goes_on(extras: ModuleType) -> None:
    async def picky(batch: list[Any]) -> list[Any]:
        if "bad" in batch:
            raise LookupError("no such thing")
        return batch

    async def main() -> None:
        async with extras.DynamicBatcher(process_fn=picky) as batcher:
            for future in await batcher.submit_batch(["good", "bad"]):
                with pytest.raises(LookupError, match="no such thing"):
                    await future
            assert await (await batcher.submit("good")) == "good"

    run(main)


def test_a_cancelled_future_harms_no_neighbour(extras: ModuleType) -> None:
    async def main() -> None:
        engine = Engine(held=True)
        async with extras.DynamicBatcher(process_fn=engine) as batcher:
            futures = await batcher.submit_batch([1, 2, 3])
            await engine.started.wait()
            futures[1].cancel()
            engine.let_go.set()
            assert await asyncio.gather(futures[0], futures[2]) == ["result for 1", "result for 3"]

    run(main)


def test_stop_processes_all_that_was_submitted(extras: ModuleType) -> None:
    async def main() -> None:
        batcher = extras.DynamicBatcher(process_fn=Engine(), max_batch_size=3)
        assert not batcher.is_running
        await batcher.start()
        assert batcher.is_running
        futures = await batcher.submit_batch(list(range(10)))
        await batcher.stop()
        assert not batcher.is_running
        assert all(future.done() for future in futures)
        await batcher.stop()

    run(main)


@dataclass
class Both:
    def estimate_tokens(self) -> int:
        return 7

    def estimate_cost(self) -> int:
        return 70


@dataclass
class CostOnly:
    def estimate_cost(self) -> int:
        return 70


def fixed(cost: int) -> Callable[[Any], int]:
    return lambda record: cost


PRECEDENCE: list[tuple[str, Any, dict[str, Any], dict[str, Any], int]] = [
    ("DynamicBatcher", CostOnly(), {"cost_estimator": fixed(5)}, {"estimated_cost": 3}, 3),
    ("DynamicBatcher", CostOnly(), {"cost_estimator": fixed(5)}, {"estimated_cost": 0}, 0),
    ("DynamicBatcher", CostOnly(), {"cost_estimator": fixed(5)}, {}, 5),
    ("DynamicBatcher", CostOnly(), {"default_cost": 9}, {}, 70),
    ("DynamicBatcher", "text", {"default_cost": 9}, {}, 9),
    ("DynamicBatcher", "text", {}, {}, 1),
    ("TokenBatcher", Both(), {"token_estimator": fixed(5)}, {"estimated_tokens": 2, "estimated_cost": 3}, 2),
    ("TokenBatcher", Both(), {"token_estimator": fixed(5)}, {"estimated_cost": 3}, 3),
    ("TokenBatcher", Both(), {"token_estimator": fixed(5)}, {}, 5),
    ("TokenBatcher", Both(), {"cost_estimator": fixed(6)}, {}, 6),
    ("TokenBatcher", Both(), {"default_token_estimate": 9}, {}, 7),
    ("TokenBatcher", CostOnly(), {"default_token_estimate": 9}, {}, 70),
    ("TokenBatcher", "text", {"default_token_estimate": 9, "default_cost": 8}, {}, 9),
    ("TokenBatcher", "text", {"default_cost": 8}, {}, 8),
]


@pytest.mark.parametrize(("name", "record", "options", "submit", "cost"), PRECEDENCE)
def test_a_cost_is_explicit_estimated_the_record_s_own_or_the_default(
    extras: ModuleType, name: str, record: Any, options: dict[str, Any], submit: dict[str, Any], cost: int
) -> None:
    async def main() -> None:
        async with getattr(extras, name)(Engine(), **options) as batcher:
            await (await batcher.submit(record, **submit))
        assert batcher.stats.total_batch_cost == cost

    run(main)


def test_a_token_batcher_takes_its_own_names(extras: ModuleType) -> None:
    async def main() -> None:
        engine = Engine()
        options = {"token_estimator": len, "target_batch_tokens": 10, "batch_timeout_s": 1000}
        async with extras.TokenBatcher(inference_fn=engine, **options) as batcher:
            await asyncio.gather(*await batcher.submit_batch(["12345", "67890", "1234567890"]))
        assert engine.batches == [["12345", "67890"], ["1234567890"]]
        with pytest.raises(TypeError, match="TokenBatcher requires either 'inference_fn' or 'process_fn'"):
            extras.TokenBatcher()

    run(main)


def test_a_prompt_has_about_a_token_for_four_characters(extras: ModuleType) -> None:
    assert [extras.Prompt(text="x" * count).estimate_tokens() for count in (0, 3, 4, 41)] == [1, 1, 2, 11]
    assert extras.Prompt("hello") == extras.Prompt(text="hello")


def test_protocols_are_met_by_having_the_method(extras: ModuleType) -> None:
    assert isinstance(Both(), extras.TokenEstimator)
    assert isinstance(CostOnly(), extras.CostEstimator)
    assert not isinstance(CostOnly(), extras.TokenEstimator)
    assert not isinstance("text", extras.CostEstimator)


def test_statistics_have_these_fields_and_add_up(extras: ModuleType) -> None:
    fields = {"total_submitted", "total_completed", "total_batches", "total_batch_cost"}
    fields |= {"avg_batch_size", "avg_batch_cost", "busy_time_s", "idle_time_s", "utilization"}
    assert all(getattr(extras.BatchStats(), field) == 0 for field in fields)

    async def main() -> None:
        async with extras.DynamicBatcher(process_fn=Engine(), max_batch_size=2) as batcher:
            await asyncio.gather(*await batcher.submit_batch([1, 2, 3, 4], estimated_cost=[1, 2, 3, 4]))
        stats = batcher.stats
        assert isinstance(stats, extras.BatchStats)
        assert (stats.total_submitted, stats.total_completed, stats.total_batches) == (4, 4, 2)
        assert (stats.total_batch_cost, stats.avg_batch_size, stats.avg_batch_cost) == (10, 2, 5)
        assert stats.busy_time_s > 0
        assert 0 < stats.utilization < 1

    run(main)
