"""Percentiles are close to the exact ones, whatever the numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.accounting.histogram import Histogram, mean, merge_histograms, percentile

NUMBERS = st.lists(st.floats(min_value=0, max_value=1e12, allow_nan=False), min_size=1, max_size=200)


def counted(numbers: list[float]) -> Histogram:
    histogram = Histogram()
    for number in numbers:
        histogram.add(number)
    return histogram


@given(NUMBERS, st.floats(min_value=0.01, max_value=1))
def test_percentiles(numbers: list[float], share: float) -> None:
    exact = sorted(numbers)[math.ceil(share * len(numbers)) - 1]
    found = percentile(counted(numbers).buckets(), share)
    assert exact / 1.1 - 1e-9 <= found <= exact * 1.1 + 1e-9


@given(NUMBERS, NUMBERS)
def test_a_sum_of_histograms_is_the_histogram_of_all(some: list[float], others: list[float]) -> None:
    both = merge_histograms([counted(some).buckets(), counted(others).buckets()])
    whole = counted(some + others).buckets()
    assert [bucket[:3] for bucket in both] == [bucket[:3] for bucket in whole]


def test_nothing_and_equal_numbers() -> None:
    assert percentile([], 0.5) == mean([]) == 0.0
    assert percentile(counted([32] * 5).buckets(), 0.99) == mean(counted([31, 33]).buckets()) == 32
