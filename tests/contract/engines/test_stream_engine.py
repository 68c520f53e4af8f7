"""What holds beside the common contract for engines that batch by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.contract.engines.cases import Case, of_kind
from tests.contract.engines.fixtures import assert_same, payloads

pytestmark = [
    pytest.mark.parametrize("case", of_kind("stream"), indirect=True, scope="session"),
    pytest.mark.filterwarnings("ignore::headrace.BlockedLoopWarning"),
]


def test_as_many_requests_as_it_names_are_under_way_at_once(case: Case, engine: Any) -> None:
    [ready] = payloads(engine, case.good[:1])

    async def run() -> list[Any]:
        return await asyncio.gather(*(engine.infer(ready) for _ in range(engine.profile.max_in_flight)))

    first, *others = asyncio.run(run())
    assert len(others) == engine.profile.max_in_flight - 1
    for other in others:
        assert_same(first, other)


def test_a_cancelled_request_harms_no_other(case: Case, engine: Any) -> None:
    [ready] = payloads(engine, case.good[:1])

    async def run() -> tuple[Any, Any]:
        left = [asyncio.create_task(engine.infer(ready)) for _ in range(3)]
        kept = asyncio.create_task(engine.infer(ready))
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        ended = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        return await kept, await engine.infer(ready)

    kept, later = asyncio.run(run())
    assert_same(kept, later)
