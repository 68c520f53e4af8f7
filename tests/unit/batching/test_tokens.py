"""`TokenBatcher`: where the number of tokens comes from, and the one warning when it comes from nowhere."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.batching.doubles import outcomes
from tests.unit.virtual_time import VirtualTime

from headrace import NoTokenEstimateWarning, Prompt, TokenBatcher
from headrace.errors import ConfigError, CostError
from headrace.events import BatchFormed, Event


@dataclass
class Both:
    """Knows its tokens and its cost."""

    def estimate_tokens(self) -> int:
        return 7

    def estimate_cost(self) -> int:
        return 70


@dataclass
class CostOnly:
    def estimate_cost(self) -> int:
        return 70


@dataclass
class Neither:
    pass


async def echo(batch: list[Any]) -> list[Any]:
    return batch


def cost_of(virtual: VirtualTime, record: Any, submit: dict[str, Any], options: dict[str, Any]) -> float:
    events: list[Event] = []

    async def main() -> None:
        async with TokenBatcher(echo, listener=events.append, **options) as batcher:
            await (await batcher.submit(record, **submit))

    virtual(main())
    [formed] = [event for event in events if isinstance(event, BatchFormed)]
    return formed.cost


PRECEDENCE: list[tuple[Any, dict[str, Any], dict[str, Any], float]] = [
    (Both(), {"estimated_tokens": 1, "estimated_cost": 2}, {"token_estimator": lambda _: 3}, 1),
    (Both(), {"estimated_tokens": 0, "estimated_cost": 2}, {}, 0),
    (Both(), {"estimated_cost": 2}, {"token_estimator": lambda _: 3}, 2),
    (Both(), {}, {"token_estimator": lambda _: 3}, 3),
    (Both(), {}, {"cost_estimator": lambda _: 4}, 4),
    (Both(), {}, {"default_token_estimate": 5}, 7),
    (CostOnly(), {}, {"default_token_estimate": 5}, 70),
    (Neither(), {}, {"default_token_estimate": 5, "default_cost": 6}, 5),
    (Neither(), {}, {"default_token_estimate": 0}, 0),
    (Neither(), {}, {"default_cost": 6}, 6),
    (Prompt("x" * 41), {}, {}, 11),
]


@pytest.mark.parametrize(("record", "submit", "options", "tokens"), PRECEDENCE)
def test_tokens_are_explicit_estimated_the_record_s_own_or_the_default(
    virtual: VirtualTime, record: Any, submit: dict[str, Any], options: dict[str, Any], tokens: float
) -> None:
    assert cost_of(virtual, record, submit, options) == tokens


@pytest.mark.parametrize("way", ["submit", "submit_nowait", "submit_batch", "map", "blocking"])
def test_a_budget_that_limits_nothing_is_told_of_once_with_the_record_s_type(virtual: VirtualTime, way: str) -> None:
    async def main() -> None:
        async with TokenBatcher(echo) as batcher:
            for record in ("a", "b", Neither()):
                if way == "submit":
                    await batcher.submit(record)
                elif way == "submit_nowait":
                    batcher.submit_nowait(record)
                elif way == "submit_batch":
                    await batcher.submit_batch([record])
                elif way == "map":
                    assert [result async for result in batcher.map([record])] == [record]
                else:
                    await asyncio.wrap_future(batcher.submit_threadsafe(record))

    with pytest.warns(NoTokenEstimateWarning, match=r"str records have no token estimate.*token_estimator") as caught:
        virtual(main())
    assert len(caught) == 1


def test_nothing_is_said_where_a_budget_limits_something(virtual: VirtualTime) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for record, submit, options in [
            (Prompt("hello"), {}, {}),
            ("hello", {"estimated_tokens": 3}, {}),
            ("hello", {}, {"token_estimator": len}),
            ("hello", {}, {"default_token_estimate": 1}),
            ("hello", {}, {"default_cost": 30}),
        ]:
            cost_of(virtual, record, submit, options)


def test_the_budget_is_in_tokens_by_either_name(virtual: VirtualTime) -> None:
    async def sizes(**options: Any) -> list[int]:
        batches: list[int] = []

        async def count(batch: list[Any]) -> list[Any]:
            batches.append(len(batch))
            return batch

        async with TokenBatcher(inference_fn=count, token_estimator=len, **options) as batcher:
            await outcomes(await batcher.submit_batch(["x" * 10] * 6))
        return batches

    assert virtual(sizes(target_batch_tokens=30)) == [3, 3]
    assert virtual(sizes(target_batch_cost=20)) == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "requires either 'inference_fn' or 'process_fn'"),
        ({"inference_fn": echo, "process_fn": echo}, ConfigError, "aliases"),
        (
            {"inference_fn": echo, "token_estimator": len, "cost_estimator": len},
            ConfigError,
            "token_estimator and cost_estimator are aliases",
        ),
        (
            {"inference_fn": echo, "target_batch_tokens": 60, "target_batch_cost": 20},
            ConfigError,
            "target_batch_tokens and target_batch_cost are aliases",
        ),
        ({"inference_fn": echo, "target_batch_tokens": 0}, ConfigError, "target_batch_tokens is 0: .*> 0"),
        ({"inference_fn": echo, "default_token_estimate": -1}, ConfigError, "default_token_estimate is -1: .*>= 0"),
        ({"inference_fn": echo, "token_estimator": 5}, ConfigError, "token_estimator is 5: .*function or None"),
        ({"inference_fn": 5}, ConfigError, "process_fn is 5: it must be a function"),
        ({"inference_fn": echo, "max_batch_sice": 5}, TypeError, "max_batch_sice"),
        (
            {"inference_fn": echo, "target_batch_token": 8},
            TypeError,
            "TokenBatcher has no parameter 'target_batch_token'; did you mean target_batch_tokens",
        ),
    ],
)
def test_wrong_arguments_name_what_was_given(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenBatcher(**given)


def test_tokens_that_are_no_number_are_refused(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with TokenBatcher(echo) as batcher:
            with pytest.raises(CostError, match="'many'"):
                await batcher.submit("x", estimated_tokens="many")  # type: ignore[arg-type]

    virtual(main())
