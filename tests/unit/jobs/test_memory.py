from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs.pipeline.memory_budget import ROW_BYTES, Memory, rows_bytes, value_bytes
from headrace.records import Record


@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10_000)), min_size=1, max_size=12),
    data=st.data(),
)
def test_what_was_held_is_released_whatever_parts_it_ends_in(chunks: list[tuple[int, int]], data: Any) -> None:
    memory = Memory(1)
    start = 0
    for count, size in chunks:
        memory.hold(start, count, size)
        start += count
    assert (memory.records, memory.held) == (start, sum(size for _, size in chunks))
    cuts = sorted(data.draw(st.sets(st.integers(1, start - 1)))) if start > 1 else []
    parts = [range(a, b) for a, b in zip([0, *cuts], [*cuts, start], strict=True)]
    for part in data.draw(st.permutations(parts)):
        memory.release(part)
    assert memory.records == 0
    assert memory.held == pytest.approx(0, abs=1e-6)


def test_a_chunk_is_read_only_if_one_as_long_as_the_last_fits() -> None:
    memory = Memory(1000)
    assert memory.has_room(0)
    assert not memory.has_room(1)  # nothing is known of the first one yet
    memory.hold(0, 10, 300)
    assert memory.has_room(0)
    assert memory.has_room(1)
    assert not memory.has_room(2)
    memory.hold(10, 1, 5000)
    assert not memory.has_room(0)
    memory.release(range(11))
    assert memory.has_room(0)  # alone, whatever its size


def test_a_part_has_the_fewer_rows_the_longer_they_are() -> None:
    memory = Memory(8_000)
    assert memory.part_rows(50) == 50
    memory.hold(0, 100, 5_000)
    assert memory.part_rows(10) == 10
    memory.outputs += 5_000
    assert memory.part_rows(4096) == 10
    memory.outputs += 10**9
    assert memory.part_rows(4096) == 1


class Odd:
    __slots__ = ("values",)

    def __init__(self, values: list[int]) -> None:
        self.values = values


class Hostile:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("no size")


@pytest.mark.parametrize(
    ("value", "least"),
    [
        ("x" * 10_000, 10_000),
        ([1] * 1000, 32_000),
        ([[0.5] * 100] * 100, 320_000),
        ({"a": ["y" * 1000] * 10}, 10_000),
        (Odd([1] * 1000), 32_000),
        (bytearray(5000), 5000),
        (Hostile(), 1),
    ],
)
def test_a_value_counts_what_it_holds(value: Any, least: int) -> None:
    assert least <= value_bytes(value) <= 2 * least + 100


def test_rows_count_more_than_their_values() -> None:
    rows = [Record(n, n, {"id": n, "text": "t" * 100}) for n in range(10)]
    assert rows_bytes(rows) == 10 * (ROW_BYTES + 100)


def test_what_is_nested_deep_or_in_itself_is_reckoned_in_no_time() -> None:
    deep: list[Any] = []
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    deep.append(deep)
    assert value_bytes(deep) > 0
