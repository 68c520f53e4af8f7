"""The cost of a batch while it is filled, and the line through the durations of batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.batching.policy.cost import BatchCost, BatchLimits, batch_cost
from headrace.batching.policy.cost_line import CostLine

costs = st.lists(st.one_of(st.integers(0, 12), st.floats(0, 12), st.just(50)), min_size=1, max_size=20)
limits = st.builds(BatchLimits, st.integers(1, 30), st.integers(1, 8), padded=st.booleans())


@given(limits, costs)
def test_a_filled_batch_is_within_its_limits_and_has_no_room_for_the_next(
    limits: BatchLimits, costs: list[float]
) -> None:
    batch = BatchCost(limits)
    size = batch.fill(costs)
    assert 1 <= size == batch.size <= limits.max_batch_size
    assert batch.computed == batch_cost(costs[:size], padded=limits.padded)
    assert batch.computed <= limits.target_batch_cost or size == 1
    if size < min(len(costs), limits.max_batch_size):
        assert batch_cost(costs[: size + 1], padded=limits.padded) > limits.target_batch_cost


@given(limits, costs, st.integers(0, 9))
def test_the_room_for_equal_records_is_as_many_as_fit_one_by_one(
    limits: BatchLimits, costs: list[float], most: int
) -> None:
    batch, cost = BatchCost(limits), int(costs[0])
    batch.fill(map(int, costs[1:]))
    one_by_one = BatchCost(limits)
    one_by_one.fill(map(int, costs[1:]))
    assert batch.room(cost, most) == one_by_one.fill([cost] * most)


def test_what_a_batch_takes_beside_its_cost_is_told_from_enough_batches_that_differ() -> None:
    line = CostLine()
    for cost in range(1, 20):
        assert line.fixed_s() is None or cost > 10
        line.add(cost, 2.0 * cost + 5.0)
    fixed = line.fixed_s()
    assert fixed is not None
    assert abs(fixed - 5.0) < 1e-6
    alike = CostLine()
    for _ in range(20):
        alike.add(4.0, 13.0)
    assert alike.fixed_s() is None
    assert alike.line == (13.0 / 4.0, 0.0)


@given(st.floats(1e-5, 0.1), st.floats(0, 1), st.lists(st.integers(1, 4096), min_size=5, max_size=200))
def test_a_line_is_found_again(slope: float, base: float, costs: list[int]) -> None:
    model = CostLine(decay=0.98)
    for cost in (*costs, 1, 5000):  # of different size
        model.add(cost, slope * cost + base)
    assert model.seconds(1000) == pytest.approx(slope * 1000 + base, rel=1e-3, abs=1e-6)
    assert model.cost_within(slope * 700 + base) == pytest.approx(700, rel=1e-2)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 100)), max_size=50), st.floats(0, 1e6), st.floats(0, 100))
def test_whatever_is_seen_nothing_is_negative(seen: list[tuple[float, float]], cost: float, seconds: float) -> None:
    model = CostLine(decay=0.98)
    for one in seen:
        model.add(*one)
    assert model.seconds(cost) >= 0
    assert model.cost_within(seconds) >= 0


def test_a_machine_that_slows_down_is_believed_soon() -> None:
    model = CostLine(decay=0.98)
    for number in range(500):
        model.add(100 + number % 7 * 50, (100 + number % 7 * 50) * 0.001)
    for number in range(200):
        model.add(100 + number % 7 * 50, (100 + number % 7 * 50) * 0.002)
    assert model.seconds(200) == pytest.approx(0.4, rel=0.05)


def test_batches_all_alike_give_no_hope_for_larger_ones() -> None:
    model = CostLine(decay=0.98)
    for _ in range(10):
        model.add(100, 0.5)
    assert model.seconds(200) == pytest.approx(1.0)


def test_nothing_is_known_of_a_model_that_never_ran() -> None:
    assert not CostLine(decay=0.98).known
