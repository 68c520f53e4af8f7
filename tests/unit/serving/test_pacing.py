"""How long a batch takes, learned."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.admission.pacing import Margin, Recent, TimeModel


@given(st.floats(1e-5, 0.1), st.floats(0, 1), st.lists(st.integers(1, 4096), min_size=5, max_size=200))
def test_a_line_is_found_again(slope: float, base: float, costs: list[int]) -> None:
    model = TimeModel()
    for cost in (*costs, 1, 5000):  # of different size
        model.observe(cost, slope * cost + base)
    assert model.seconds(1000) == pytest.approx(slope * 1000 + base, rel=1e-3, abs=1e-6)
    assert model.cost_within(slope * 700 + base) == pytest.approx(700, rel=1e-2)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 100)), max_size=50), st.floats(0, 1e6), st.floats(0, 100))
def test_whatever_is_seen_nothing_is_negative(seen: list[tuple[float, float]], cost: float, seconds: float) -> None:
    model = TimeModel()
    for one in seen:
        model.observe(*one)
    assert model.seconds(cost) >= 0
    assert model.cost_within(seconds) >= 0


def test_a_machine_that_slows_down_is_believed_soon() -> None:
    model = TimeModel()
    for number in range(500):
        model.observe(100 + number % 7 * 50, (100 + number % 7 * 50) * 0.001)
    for number in range(200):
        model.observe(100 + number % 7 * 50, (100 + number % 7 * 50) * 0.002)
    assert model.seconds(200) == pytest.approx(0.4, rel=0.05)


def test_batches_all_alike_give_no_hope_for_larger_ones() -> None:
    model = TimeModel()
    for _ in range(10):
        model.observe(100, 0.5)
    assert model.seconds(200) == pytest.approx(1.0)


def test_nothing_is_known_of_a_model_that_never_ran() -> None:
    assert not TimeModel().known


def test_the_largest_of_late_is_forgotten_after_two_periods() -> None:
    recent = Recent(10)
    recent.add(5, 0)
    assert recent.largest(9) == 5
    assert recent.largest(15) == 5
    assert recent.largest(26) == 0
    recent.add(1, 27)
    recent.add(3, 28)
    assert recent.largest(29) == 3


def test_a_margin_settles_where_as_many_miss_as_may() -> None:
    """Whoever plans with `margin` takes about that share of the target, and now and then much longer."""
    margin, chance = Margin(), random.Random(3)
    missed = [_missed(margin, margin.value * chance.lognormvariate(0, 0.3)) for _ in range(60_000)]
    assert sum(missed[20_000:]) / 40_000 == pytest.approx(0.005, rel=0.3)
    assert 0.3 < margin.value < 0.8


def test_a_margin_stays_within_reason() -> None:
    margin = Margin()
    for _ in range(1_000):
        margin.observe(missed=True)
    assert margin.value == pytest.approx(0.1)
    for _ in range(100_000):
        margin.observe(missed=False)
    assert margin.value == pytest.approx(2.0)


def _missed(margin: Margin, took: float) -> bool:
    margin.observe(missed=took > 1)
    return took > 1
