"""How long a batch takes, learned."""

from __future__ import annotations

import random

import pytest

from headrace.serving.admission.backfill import Margin, RecentMaximum


def test_the_largest_of_late_is_forgotten_after_two_periods() -> None:
    recent = RecentMaximum(10)
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
