from __future__ import annotations

import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import JobError
from headrace.io.storage.parts import Interval
from headrace.jobs.state.ledger import Ledger

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


@settings(deadline=None)
@given(st.sets(st.integers(0, 9_000), max_size=20), st.integers(0, 10_000))
def test_next_done_is_the_first_position_in_any_part(done: set[int], position: int) -> None:
    expected = min((one for one in done if one >= position), default=sys.maxsize)
    ledger = Ledger(runs(done))
    assert ledger.next_done(position) == expected
    assert ledger(position) == ledger.next_todo(position)


@settings(deadline=None)  # a busy machine is no failure
@given(done_sets)
def test_what_is_done_is_counted_and_known_to_be_whole_where_it_is(done: set[int]) -> None:
    ledger = Ledger(runs(done))
    assert ledger.done == len(done)
    assert ledger.is_whole == (done == set(range(len(done))))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9_000), max_size=9), st.integers(0, 60_000))
def test_long_stretches_over_many_pages(lengths: list[int], position: int) -> None:
    """Done and not done in turns, the first done."""
    intervals, todo, start = [], set(), 0
    for number, length in enumerate(lengths):
        if number % 2:
            todo.update(range(start, start + length))
        else:
            intervals.append(Interval(start, start + length))
        start += length
    expected = min((place for place in todo if place >= position), default=max(position, start))
    if lengths and len(lengths) % 2 == 0:  # the last stretch is not done, nor is what follows
        expected = min(expected, max(position, start))
    ledger = Ledger(intervals)
    for _ in range(2):  # the second answer is remembered
        assert ledger.next_todo(position) == expected


@pytest.mark.parametrize(("rows", "gap"), [(4096, 0), (40, 40)])
def test_what_is_done_of_100_million_records_takes_less_than_100_mb(rows: int, gap: int) -> None:
    """In parts as they are; and in fragments with as much missing behind each, of a hundredth: a page is a page."""
    records = 1_000_000 if gap else 100_000_000
    tracemalloc.start()
    ledger = Ledger(Interval(start, start + rows) for start in range(0, records, rows + gap))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ledger.done >= records // 2
    assert used * (100_000_000 // records) < 100_000_000


@pytest.mark.parametrize("intervals", [[(0, 5), (4, 9)], [(0, 9), (2, 3)], [(0, 5), (0, 6)]])
def test_two_parts_with_the_same_position_are_refused(intervals: list[tuple[int, int]]) -> None:
    with pytest.raises(JobError, match="two parts hold position"):
        Ledger([Interval(*interval) for interval in intervals])


def test_an_empty_interval_is_refused() -> None:
    with pytest.raises(JobError, match="empty interval"):
        Ledger([Interval(3, 3)])
