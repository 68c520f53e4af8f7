from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import pytest

from headrace.jobs.pipeline.dedupe import Deduplicator, key_of


class Item(NamedTuple):
    number: int
    key: bytes | None


@pytest.fixture
def once() -> Iterator[Deduplicator[Item]]:
    made: Deduplicator[Item] = Deduplicator()
    yield made
    made.close()


def item(number: int, value: Any) -> Item:
    return Item(number, key_of(value))


def test_keys_tell_inputs_apart_and_nothing_else() -> None:
    values: list[Any] = ["a", "b", "", ["a"], {"a": 1}, ("a", "b"), "\ud800", 1, None]
    assert len({key_of(value) for value in values}) == len(values)
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of(b"bytes") is key_of(object()) is None


def scenario(steps: Callable[[Deduplicator[Item]], Coroutine[Any, Any, None]]) -> Callable[[Deduplicator[Item]], None]:
    """A test that awaits."""

    def test(once: Deduplicator[Item]) -> None:
        asyncio.run(steps(once))

    return test


@scenario
async def test_an_item_is_computed_waits_or_is_known(once: Deduplicator[Item]) -> None:
    first = [item(0, "a"), item(1, "b"), item(2, "a"), Item(3, None), Item(4, None)]
    to_do, known = await once.sort_out(first)
    assert [found.number for found in to_do] == [0, 1, 3, 4]
    assert known == []
    assert once.waiting == 1
    assert [found.number for found in once.computed(first[0], "A")] == [2]
    assert once.waiting == 0
    to_do, known = await once.sort_out([item(5, "a"), item(6, "b"), item(7, "c")])
    assert [(found.number, output) for found, output in known] == [(5, "A")]
    assert [found.number for found in to_do] == [7]
    assert [found.number for found in once.given_up(first[1])] == [6]


@scenario
async def test_a_result_that_comes_while_the_file_is_asked_is_seen(once: Deduplicator[Item]) -> None:
    await once.sort_out([item(0, "a")])
    asked = asyncio.create_task(once.sort_out([item(1, "a")]))
    await asyncio.sleep(0)
    once.computed(item(0, "a"), "A")
    to_do, known = await asked
    assert to_do == []
    assert known == [(item(1, "a"), "A")]


@scenario
async def test_thousands_of_outputs_leave_memory_and_come_back(once: Deduplicator[Item]) -> None:
    for start in range(0, 3000, 600):
        items = [item(number, f"text {number}") for number in range(start, start + 600)]
        to_do, _ = await once.sort_out(items)
        for found in to_do:
            once.computed(found, [found.number] * 3)
    to_do, known = await once.sort_out([item(number, f"text {number}") for number in range(3000)])
    assert to_do == []
    assert {found.number: output[0] for found, output in known} == {number: number for number in range(3000)}
