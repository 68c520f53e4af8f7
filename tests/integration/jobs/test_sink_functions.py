"""Results handed to a function: also to one that is asynchronous."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError, JobError
from headrace.io.sinks.callback_sink import CallbackWriter
from headrace.jobs.settings import Limits

ROWS = [{"id": n, "text": f"text {n}"} for n in range(300)]


def run(sink: Any) -> Any:
    return headrace.run(ROWS, sink=sink, task="embed", engine="headrace.testing:FakeEngine", progress=False)


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
        await asyncio.to_thread(run, found)

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


class Keeper:
    """A user's class that would be made of the rows, and dropped."""

    def __init__(self, rows: Any) -> None:
        raise AssertionError("never called")


@pytest.mark.parametrize("sink", [list, tuple, dict, str, Keeper])
def test_a_class_is_refused_with_the_way_out(sink: Any) -> None:
    with pytest.raises(ConfigError, match=f'the sink is the class {sink.__name__}, .* sink="list" returns the rows'):
        run(sink)


@pytest.mark.parametrize("sink", [lambda: None, lambda rows, more: None, lambda *, rows: None, list.extend])
def test_a_function_that_cannot_take_a_list_of_rows_is_refused(sink: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be called with a list of rows: .*; pass a function of one argument"):
        run(sink)


def test_a_function_with_other_arguments_that_have_defaults_is_taken() -> None:
    found: list[Any] = []

    def take(rows: list[dict[str, Any]], also: int = 0, **rest: Any) -> None:
        found.extend(rows)

    run(functools.partial(take, also=1))
    assert len(found) == 300


def test_a_list_of_rows_is_returned_in_input_order_with_what_failed() -> None:
    def halves(batch: list[str]) -> list[Any]:
        return [ValueError("odd") if int(text.split()[1]) % 2 else {"half": text} for text in batch]

    limits = Limits(max_error_rate=1.0)
    found = headrace.run(ROWS, sink="list", engine=halves, keep_columns=["text"], limits=limits, progress=False)
    assert found[:2] == [
        {"id": 0, "text": "text 0", "output": {"half": "text 0"}},
        {"id": 1, "error": {"reason": "ValueError", "message": "odd"}},
    ]
    assert [row["id"] for row in found] == list(range(300))
    taken: list[Any] = []
    headrace.run(ROWS, sink=taken.extend, engine=halves, keep_columns=["text"], limits=limits, progress=False)
    assert sorted(taken, key=lambda row: row["id"]) == found


def test_a_list_keeps_the_objects_of_the_engine() -> None:
    found = headrace.run(["a", "b"], sink="list", engine=lambda batch: [{text} for text in batch], progress=False)
    assert [row["output"] for row in found] == [{"a"}, {"b"}]


@pytest.mark.parametrize("setting", [{"retry": True}, {"output_format": "jsonl"}])
def test_a_list_keeps_no_files(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sink='list' returns its rows and keeps no files: leave out"):
        headrace.run(ROWS, sink="list", task="embed", engine="headrace.testing:FakeEngine", progress=False, **setting)


def test_a_job_that_ends_early_says_that_a_list_keeps_nothing() -> None:
    def broken(batch: list[str]) -> list[str]:
        raise ValueError("always")

    with pytest.raises(JobError, match="sink='list' keeps nothing; a file would keep finished records"):
        headrace.run(ROWS, sink="list", engine=broken, progress=False)


def test_the_name_of_a_list_is_found_by_a_near_one() -> None:
    with pytest.raises(ConfigError, match="one of pandas, polars, arrow, numpy, list"):
        headrace.run(ROWS, sink="lists", task="embed", engine="headrace.testing:FakeEngine", progress=False)


def test_a_sink_that_is_none_names_what_may_be_one() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="file, folder or database, a function, or one of list, pandas, polars"):
        headrace.run(["a"], sink=nothing, engine=lambda texts: texts, progress=False)
