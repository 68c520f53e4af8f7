from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.io.parts import Interval
from headrace.jobs.coalescer import Coalescer
from headrace.records import Ok, Outcome, Record

FOREVER = float("inf")


def ok(position: int) -> Ok:
    return Ok(Record(position, position, None), None)


def take_all(coalescer: Coalescer, now: float) -> list[tuple[Interval, list[Outcome]]]:
    taken = []
    while run := coalescer.take(now):
        taken.append(run)
    return taken


@given(st.permutations(range(40)), st.integers(1, 12), st.sets(st.integers(0, 39)))
def test_every_outcome_comes_out_once_in_order_whatever_the_order_in(
    order: list[int], part_records: int, take_after: set[int]
) -> None:
    coalescer = Coalescer(part_records, interval_s=10)
    taken = []
    for count, position in enumerate(order):
        coalescer.add(ok(position), now=0)
        if count in take_after:
            taken += take_all(coalescer, now=0)
    early = len(taken)
    taken += take_all(coalescer, FOREVER)
    assert not len(coalescer)
    assert sorted(p for interval, _ in taken for p in range(*interval)) == list(range(40))
    for number, (interval, outcomes) in enumerate(taken):
        assert [outcome.record.position for outcome in outcomes] == list(range(*interval))
        assert len(outcomes) < 2 * part_records
        if number < early:
            assert len(outcomes) >= part_records


@given(st.permutations(range(30)))
def test_what_is_held_together_is_given_out_together(order: list[int]) -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    for position in order:
        coalescer.add(ok(position), now=0)
    assert [interval for interval, _ in take_all(coalescer, FOREVER)] == [Interval(0, 30)]


def test_a_run_is_given_out_when_its_oldest_row_has_waited() -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10, small_run=3)
    for position, now in ((5, 0.0), (4, 7.0), (6, 9.0)):
        coalescer.add(ok(position), now)
    assert coalescer.take(9.9) is None
    interval, _ = coalescer.take(10.0) or (None, [])
    assert interval == Interval(4, 7)


def test_joining_two_runs_keeps_the_older_clock() -> None:
    for first, second in ((0, 2), (2, 0)):
        coalescer = Coalescer(part_records=1000, interval_s=10, small_run=1)
        coalescer.add(ok(first), 0.0)
        coalescer.add(ok(second), 5.0)
        coalescer.add(ok(1), 9.0)
        assert coalescer.take(9.9) is None
        assert coalescer.take(10.0) is not None


def test_a_fragment_waits_longer_for_its_neighbours() -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10, small_run=3)
    coalescer.add(ok(0), 0.0)
    coalescer.add(ok(1), 0.0)
    assert coalescer.take(49.9) is None
    assert coalescer.take(50.0) is not None
