"""Runs of records without an object each: joined for `process_fn`, and their results as views of one array."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.batching.doubles import double
from tests.unit.virtual_time import VirtualTime

from headrace import DynamicBatcher
from headrace.errors import BadResultError


class Column(Sequence[int]):
    """Numbers of equal cost, held as an array."""

    made = 0
    """How many records were asked for."""

    def __init__(self, values: Sequence[int] | np.ndarray[Any, Any], cost: float = 1) -> None:
        self.values = np.asarray(values)
        self.cost = cost

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return type(self)(self.values[index], self.cost)
        type(self).made += 1
        return int(self.values[index])

    @classmethod
    def joined(cls, pieces: Sequence[Column]) -> Column:
        return cls(np.concatenate([piece.values for piece in pieces]), max(piece.cost for piece in pieces))


class OtherColumn(Column):
    """Of another type."""


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Column.made = 0


Answers = list[tuple[Any, Any, bool]]


async def answers(batcher: DynamicBatcher[int, Any], *runs: Sequence[int]) -> Answers:
    async def all_of() -> AsyncIterator[Sequence[int]]:
        for run in runs:
            yield run

    return [answer async for answer in batcher.runs_as_completed(all_of())]


def over(function: Callable[..., Any], *runs: Sequence[int], **options: Any) -> Answers:
    """Each run that came back, its results, and whether any is an exception."""

    async def main() -> Answers:
        async with DynamicBatcher[int, Any](function, **options) as batcher:
            return await answers(batcher, *runs)

    return VirtualTime()(main())


def pairs(answered: Answers) -> dict[int, Any]:
    """Each record's result."""
    return {record: result for run, results, _ in answered for record, result in zip(run, results, strict=True)}


async def twice(batch: Column) -> Any:
    return batch.values * 2


def on_a_thread(batch: Column) -> Any:
    return batch.values * 2


def of_a_coroutine(batch: Column) -> Any:
    return twice(batch)


@pytest.mark.parametrize("function", [twice, on_a_thread, of_a_coroutine])
@pytest.mark.parametrize("offload", [False, True])
def test_an_array_of_results_is_handed_on_in_views_of_one_copy(function: Callable[..., Any], offload: bool) -> None:
    async def main() -> Answers:
        async with DynamicBatcher[int, Any](function, max_batch_size=8, offload=offload) as batcher:
            return await answers(batcher, Column([1, 2, 3]), Column([4, 5, 6, 7]), Column([8]))

    answered = asyncio.run(main())
    assert not Column.made
    assert all(type(run) is Column and type(results) is np.ndarray for run, results, _ in answered)
    assert len({id(results.base) for _, results, _ in answered}) == 1
    assert pairs(answered) == {number: 2 * number for number in range(1, 9)}
    assert not any(failed for _, _, failed in answered)


def test_an_engine_may_fill_the_same_array_again() -> None:
    buffer = np.zeros((4, 2))

    async def fill(batch: Column) -> Any:
        buffer[:] = batch.values[:, None]
        return buffer

    answered = over(fill, *[Column(range(first, first + 4)) for first in (0, 4, 8)], max_batch_size=4)
    assert {number: result.tolist() for number, result in pairs(answered).items()} == {
        number: [number, number] for number in range(12)
    }


def test_results_in_a_list_stay_a_list_and_an_exception_fails_its_record_and_marks_its_run_alone() -> None:
    async def refuse_3(batch: Column) -> Any:
        return [ValueError("3") if number == 3 else number for number in batch.values.tolist()]

    answered = over(refuse_3, Column([1, 2]), Column([3, 4]), Column([5]), max_batch_size=8)
    assert [(list(run), failed) for run, _, failed in answered] == [([1, 2], False), ([3, 4], True), ([5], False)]
    assert isinstance(answered[1][1][0], ValueError)
    assert [results for _, results, failed in answered if not failed] == [[1, 2], [5]]


def test_a_part_of_a_run_without_a_failure_is_not_called_failed() -> None:
    async def refuse_0(batch: list[int]) -> Any:
        return [ValueError("0") if number == 0 else number for number in batch]

    for run in (list(range(8)), Column(range(8))):
        answered = over(refuse_0, run, max_batch_size=4)
        assert [failed for _, _, failed in answered] == [True, False]


def test_lists_of_records_get_lists_as_they_always_did() -> None:
    async def as_array(batch: list[int]) -> Any:
        assert type(batch) is list
        return np.array(batch)

    answered = over(as_array, [1, 2], [3], max_batch_size=8)
    assert [(type(run), type(results)) for run, results, _ in answered] == [(list, list)] * 2


@pytest.mark.parametrize("other", [[7, 8], OtherColumn([7, 8])], ids=["a list", "another column"])
def test_a_batch_of_several_kinds_is_a_flat_list(other: Sequence[int]) -> None:
    batches = []

    async def note(batch: Any) -> Any:
        batches.append(batch)
        return np.array(list(batch))

    answered = over(note, Column([1, 2]), other, Column([3]), max_batch_size=8)
    assert batches == [[1, 2, 7, 8, 3]]
    assert pairs(answered) == {number: number for number in (1, 2, 3, 7, 8)}
    assert all(type(results) is list for _, results, _ in answered)


def test_single_records_and_columns_share_a_batch() -> None:
    batches = []

    async def note(batch: Any) -> Any:
        batches.append(batch)
        return [double(number) for number in batch]

    async def main() -> None:
        async with DynamicBatcher[int, Any](note, max_batch_size=8) as batcher:
            single = await batcher.submit(9)
            assert pairs(await answers(batcher, Column([1, 2]))) == {1: 2, 2: 4}
            assert await single == 18

    VirtualTime()(main())
    assert [sorted(batch) for batch in batches] == [[1, 2, 9]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data(), st.booleans())
def test_a_failed_batch_of_columns_is_halved_until_the_bad_records_failed_alone(
    counts: list[int], data: st.DataObject, bucketing: bool
) -> None:
    total = sum(counts)
    bad = data.draw(st.sets(st.integers(0, total - 1), max_size=3))

    async def refuse(batch: Column) -> Any:
        assert type(batch) is Column
        if found := bad & set(batch.values.tolist()):
            raise ValueError(str(found))
        return batch.values * 2

    starts = [sum(counts[:at]) for at in range(len(counts))]
    runs = [Column(range(start, start + count), 1 + count) for start, count in zip(starts, counts, strict=True)]
    options: dict[str, Any] = {"padded": bucketing, "length_bucketing": bucketing}
    answered = over(refuse, *runs, max_batch_size=16, on_error="isolate", **options)
    found = pairs(answered)
    assert sorted(found) == list(range(total))
    for number, result in found.items():
        assert str(result) == (f"{{{number}}}" if number in bad else str(2 * number))
    for _, results, failed in answered:
        assert failed == any(isinstance(result, Exception) for result in results)
        assert type(results) is (list if failed else np.ndarray)


def test_columns_that_cannot_be_joined_for_want_of_memory_go_in_smaller_batches() -> None:
    class Large(Column):
        @classmethod
        def joined(cls, pieces: Sequence[Column]) -> Column:
            if sum(map(len, pieces)) > 2:
                raise MemoryError
            return super().joined(pieces)

    answered = over(twice, Large([1, 2, 3]), Large([4]), max_batch_size=8)
    assert pairs(answered) == {1: 2, 2: 4, 3: 6, 4: 8}


def test_columns_that_lose_a_record_when_joined_fail_with_both_counts() -> None:
    class Losing(Column):
        @classmethod
        def joined(cls, pieces: Sequence[Column]) -> Column:
            return cast("Column", super().joined(pieces)[1:])

    answered = over(twice, Losing([1, 2, 3]), max_batch_size=8, on_error="isolate")
    assert {str(result) for result in pairs(answered).values()} == {"Losing.joined made 2 records of 3"}


@pytest.mark.parametrize("returned", [np.zeros(3), np.zeros((5, 2)), np.float64(1)], ids=str)
def test_an_array_of_another_length_fails_the_batch(returned: Any) -> None:
    async def wrong(batch: Column) -> Any:
        return returned

    answered = over(wrong, Column([1, 2, 3, 4]), max_batch_size=8, on_error="isolate")
    assert {type(result) for result in pairs(answered).values()} == {BadResultError}


def test_an_array_of_objects_becomes_a_list_in_which_each_is_copied() -> None:
    one = [1]

    async def objects(batch: Column) -> Any:
        found = np.empty(len(batch), dtype=object)
        found[:] = [one] * len(batch)
        return found

    [(_, results, _)] = over(objects, Column([1, 2]), max_batch_size=8)
    assert results == [[1], [1]]
    assert results[0] is not one


def test_a_column_says_what_its_records_cost() -> None:
    sizes = []

    async def note(batch: Column) -> Any:
        sizes.append(len(batch))
        return batch.values

    over(note, Column(range(10), 4), target_batch_cost=12, cost_estimator=lambda record: 1 / 0)
    assert sizes == [3, 3, 3, 1]
    assert not Column.made


def test_a_column_that_costs_too_much_or_nothing_sensible_fails_as_its_first_record_would() -> None:
    for cost, why in ((float("nan"), "finite number"), (99, "more than the budget")):
        with pytest.raises(Exception, match=why):
            over(twice, Column([1, 2], cost), target_batch_cost=12, oversized="reject")
