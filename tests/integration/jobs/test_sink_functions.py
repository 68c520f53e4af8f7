"""Results handed to a function: also to one that is asynchronous."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError, JobError
from headrace.io.sinks.callback_sink import CallbackWriter

ROWS = [{"id": n, "text": f"text {n}"} for n in range(300)]


def run(sink: Any) -> Any:
    return headrace.run(ROWS, sink=sink, engine="headrace.testing:FakeEngine", progress=False)


class Collected:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.loops: set[int] = set()

    async def take(self, rows: list[dict[str, Any]]) -> None:
        await asyncio.sleep(0)
        self.loops.add(id(asyncio.get_running_loop()))
        self.ids += [row["id"] for row in rows]

    async def __call__(self, rows: list[dict[str, Any]]) -> None:
        await self.take(rows)


@pytest.mark.parametrize(
    "made",
    [
        lambda found: found.take,
        lambda found: found,
        lambda found: functools.partial(found.take),
        lambda found: lambda rows: found.take([*rows]),
    ],
    ids=["async method", "async __call__", "partial", "lambda of a coroutine"],
)
def test_an_asynchronous_sink_is_awaited_on_one_loop(made: Any) -> None:
    found = Collected()
    run(made(found))
    assert sorted(found.ids) == list(range(300))
    assert len(found.loops) == 1


def test_it_is_awaited_within_a_running_loop_too() -> None:
    found = Collected()

    async def main() -> None:
        run(found)

    asyncio.run(main())
    assert len(found.ids) == 300


async def _many(rows: Any) -> Any:
    yield rows


def _few(rows: Any) -> Any:
    yield rows


@pytest.mark.parametrize("sink", [_many, _few])
def test_a_generator_function_is_refused(sink: Any) -> None:
    with pytest.raises(ConfigError, match=r"sink is an? (async )?generator function"):
        run(sink)


@pytest.mark.parametrize("sink", [lambda rows: _many([*rows]), lambda rows: _few([*rows])])
def test_so_is_what_returns_a_generator(sink: Any) -> None:
    with pytest.raises(JobError, match="which would never run"):
        run(sink)


@pytest.mark.parametrize(
    "kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_it_raises_ends_the_job_with_one_error(kind: type[BaseException], asynchronous: bool) -> None:
    def plain(rows: Any) -> None:
        raise kind

    async def later(rows: Any) -> None:
        plain(rows)

    with pytest.raises(
        JobError, match=r"that takes the results raised .* \(at rows \d+ to \d+; such a job cannot be re"
    ):
        run(later if asynchronous else plain)


def test_closing_it_twice_is_safe() -> None:
    writer = CallbackWriter(Collected(), "output")
    writer.close()
    writer.close()
