from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.io.storage.parts import Interval
from headrace.jobs.pipeline.blocks import RecordPiece
from headrace.jobs.pipeline.write import Coalescer
from headrace.records import Ok, Outcome, Record

FOREVER = float("inf")


def ok(position: int) -> Ok:
    return Ok(Record(position, position, None), None)


def take_all(coalescer: Coalescer, now: float) -> list[tuple[Interval, list[Outcome]]]:
    taken = []
    while run := coalescer.take(now):
        interval, pieces = run
        taken.append((interval, [outcome for piece in pieces for outcome in cast("RecordPiece", piece).outcomes]))
    return taken


@settings(deadline=None)  # a busy machine is no failure
@given(st.permutations(range(40)), st.integers(1, 12), st.sets(st.integers(0, 39)))
def test_every_outcome_comes_out_once_in_order_whatever_the_order_in(
    order: list[int], part_records: int, take_after: set[int]
) -> None:
    coalescer = Coalescer(part_records, interval_s=10)
    taken = []
    for count, position in enumerate(order):
        coalescer.add([ok(position)], now=0)
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


@settings(deadline=None)  # a busy machine is no failure
@given(st.permutations(range(30)))
def test_what_is_held_together_is_given_out_together(order: list[int]) -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    for position in order:
        coalescer.add([ok(position)], now=0)
    assert [interval for interval, _ in take_all(coalescer, FOREVER)] == [Interval(0, 30)]


def add_all(coalescer: Coalescer, positions: Iterable[int], now: float) -> None:
    for position in positions:
        coalescer.add([ok(position)], now)


def test_a_run_is_given_out_when_its_oldest_row_has_waited() -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    add_all(coalescer, [5], now=0.0)
    add_all(coalescer, [*range(40, 5, -1), 4], now=9.0)
    assert coalescer.take(9.9) is None
    interval, _ = coalescer.take(10.0) or (None, [])
    assert interval == Interval(4, 41)


@pytest.mark.parametrize("order", [(range(50), range(51, 90)), (range(51, 90), range(50))])
def test_joining_two_runs_keeps_the_older_clock(order: tuple[range, range]) -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    add_all(coalescer, order[0], now=0.0)
    add_all(coalescer, order[1], now=5.0)
    add_all(coalescer, [50], now=9.0)
    assert coalescer.take(9.9) is None
    assert coalescer.take(10.0) is not None


def test_a_fragment_waits_the_longer_for_its_neighbours_the_smaller_it_is() -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    add_all(coalescer, [0, *range(10, 18)], now=0.0)
    assert coalescer.take(39.9) is None
    interval, _ = coalescer.take(40.0) or (None, [])
    assert interval == Interval(10, 18)
    assert coalescer.take(319.9) is None
    interval, _ = coalescer.take(320.0) or (None, [])
    assert interval == Interval(0, 1)


@pytest.mark.parametrize(("rows", "due"), [(64, 60), (32, 60), (4, 80), (1, 320)])
def test_a_long_run_waits_for_more_but_fragments_no_longer_than_they_did(rows: int, due: float) -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    add_all(coalescer, range(rows), now=0)
    assert coalescer.take(due - 1, least_wait_s=60) is None
    assert coalescer.take(due, least_wait_s=60) is not None


def test_a_full_run_waits_for_nothing() -> None:
    coalescer = Coalescer(part_records=10, interval_s=10)
    add_all(coalescer, range(10), now=0)
    assert coalescer.take(0, least_wait_s=60) is not None
