"""An engine of every kind, made once for all tests that do not end it, and how any of them is run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.contract.engines.cases import CASES, Case, Place, missing

from headrace import ContinuousBatcher, DynamicBatcher
from headrace.batching.passthrough import PassthroughBatcher
from headrace.engines.base import Prepared
from headrace.engines.profile import profile_of


@pytest.fixture(scope="session")
def device() -> str:
    """Where the engines run that can choose; `tests/gpu` has its own."""
    return "cpu"


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest, device: str) -> Case:
    case = CASES[request.param]
    reason = missing(case) if device == "cpu" or case.placed else f"does not choose its device, so not on {device}"
    if reason is not None:
        pytest.skip(reason)
    return case


@pytest.fixture(scope="session")
def engine(case: Case, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:
        engine = case.make(Place(tmp_path_factory.mktemp("model"), device, stack))
        stack.callback(engine.close)
        yield engine


def payloads(engine: Any, inputs: list[Any]) -> list[Any]:
    """What the model takes of inputs that are all good."""
    ready = engine.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in ready)
    return [one.payload for one in ready]


def batcher_of(engine: Any) -> Any:
    """The batcher for an engine of this type, by the settings that the engine itself suggests."""
    profile = profile_of(engine)
    if profile.batching == "steps":
        return ContinuousBatcher[Any, Any](engine, max_slots=profile.max_in_flight, max_cost=profile.max_cost)
    if profile.batching == "own":
        return PassthroughBatcher[Any, Any](engine.infer, max_in_flight=profile.max_in_flight)
    return DynamicBatcher[Any, Any](engine.forward, cost_estimator=lambda payload: 1, max_batch_size=profile.batch_size)


def together(engine: Any, ready: list[Any]) -> list[Any]:
    """Outputs in order, as many at once as the engine takes."""

    async def run() -> list[Any]:
        async with batcher_of(engine) as batcher:
            return [output async for output in batcher.map(ready)]

    return asyncio.run(run())


def alone(engine: Any, ready: list[Any]) -> list[Any]:
    """Outputs in order, one after the other."""

    async def run() -> list[Any]:
        async with batcher_of(engine) as batcher:
            return [await (await batcher.submit(one)) for one in ready]

    return asyncio.run(run())


def assert_same(left: Any, right: Any) -> None:
    """Equal; numbers to five digits, since the order of additions follows the shape of a batch."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float | np.ndarray):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=2e-5)
    else:
        assert left == right
