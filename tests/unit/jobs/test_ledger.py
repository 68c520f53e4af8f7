from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import JobError
from headrace.io.parts import Interval
from headrace.jobs.ledger import Ledger

done_sets = st.sets(st.integers(0, 60))


def runs(positions: set[int]) -> list[Interval]:
    """Each position as an interval of its own."""
    return [Interval(position, position + 1) for position in positions]


@settings(deadline=None)  # a busy machine is no failure
@given(done_sets, st.integers(0, 80))
def test_next_todo_is_the_first_position_not_in_any_part(done: set[int], position: int) -> None:
    expected = position
    while expected in done:
        expected += 1
    assert Ledger(runs(done)).next_todo(position) == expected


@settings(deadline=None)  # a busy machine is no failure
@given(done_sets)
def test_neighbours_are_joined_and_counted(done: set[int]) -> None:
    ledger = Ledger(runs(done))
    assert ledger.done == len(done)
    assert {p for interval in ledger.intervals for p in range(*interval)} == done
    for one, two in zip(ledger.intervals, ledger.intervals[1:], strict=False):
        assert one.end < two.start


@pytest.mark.parametrize("intervals", [[(0, 5), (4, 9)], [(0, 9), (2, 3)], [(0, 5), (0, 6)]])
def test_two_parts_with_the_same_position_are_refused(intervals: list[tuple[int, int]]) -> None:
    with pytest.raises(JobError, match="both hold position"):
        Ledger([Interval(*interval) for interval in intervals])


def test_an_empty_interval_is_refused() -> None:
    with pytest.raises(JobError, match="empty interval"):
        Ledger([Interval(3, 3)])
