"""Functions whose call alone does nothing are refused where nobody would await or iterate what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from tests.shown import shown

from headrace import ContinuousBatcher, DynamicBatcher, StepFunction, TokenBatcher
from headrace.batching.callables import is_async, plain_function, unfinished
from headrace.errors import ConfigError


async def later(value: Any) -> Any:
    return value


async def many(value: Any) -> Any:
    yield value


def few(value: Any) -> Any:
    yield value


class Later:
    async def __call__(self, value: Any) -> Any:
        return value


PROMISING = [later, many, few, functools.partial(later, 1), functools.partial(many, 1), Later()]


@pytest.mark.parametrize("function", PROMISING, ids=shown)
def test_each_kind_is_refused_by_name(function: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"hook is an? (async|async generator|generator) function: it must be a plain"
    ):
        plain_function("hook", function)
    assert is_async(function) is (function not in (many, few) and getattr(function, "func", None) is not many)


def test_the_way_out_of_async_functions_is_not_that_of_generators() -> None:
    with pytest.raises(ConfigError, match=r"its result; await it$"):
        plain_function("hook", later, "; await it")
    with pytest.raises(ConfigError, match=r"its result; return a list instead of yielding$"):
        plain_function("hook", few, "; await it")


@pytest.mark.parametrize("function", [None, len, lambda value: value, functools.partial(max, 1), dict, "x".join])
def test_plain_ones_are_not(function: Any) -> None:
    plain_function("hook", function)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("listener", lambda: DynamicBatcher(list, listener=later)),
        ("cost_estimator", lambda: DynamicBatcher(list, cost_estimator=later)),
        ("token_estimator", lambda: TokenBatcher(list, token_estimator=later)),
        ("step_fn", lambda: StepFunction(later)),
        ("start", lambda: StepFunction(list, start=later)),
        ("cost", lambda: StepFunction(list, cost=later)),
        ("listener", lambda: ContinuousBatcher(StepFunction(list), listener=later, max_slots=1)),
    ],
)
def test_every_hook_that_must_be_plain_refuses_them(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name} is an async function"):
        make()


def test_a_promise_in_a_results_place_is_named_and_closed() -> None:
    for promise, kind in ((later(1), "coroutine"), (few(1), "generator"), (many(1), "async_generator")):
        assert f"mine returned a {kind}" in str(unfinished("mine", promise))
    assert unfinished("mine", [1]) is None
