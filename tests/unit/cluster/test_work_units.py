"""Cutting a job into pieces, and finding the record that kills workers."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.work_units import MOST, WorkUnitSize
from headrace.jobs.pipeline.work import Work
from headrace.processes.crash_isolation import WorkUnit, after_death
from headrace.records import Record


def piece(count: int) -> WorkUnit[Work]:
    return WorkUnit([Work(Record(index, index, None), None, b"", 1) for index in range(count)])


def positions(pieces: list[WorkUnit[Work]]) -> list[int]:
    return [work.record.position for piece in pieces for work in piece.work]


def test_a_piece_that_had_company_is_tried_again_as_it_is() -> None:
    [again] = after_death(piece(100), alone=False)
    assert len(again.work) == 100
    assert again.deaths == 1


def test_one_that_was_alone_is_cut_up_and_nothing_of_it_is_lost() -> None:
    portions = after_death(piece(100), alone=True)
    assert [len(portion.work) for portion in portions] == [10] * 10
    assert positions(portions) == list(range(100))
    singles = after_death(portions[3], alone=True)
    assert [len(single.work) for single in singles] == [1] * 10


def test_a_single_record_is_not_given_up_at_its_first_death() -> None:
    [second] = after_death(piece(1), alone=True)
    [third] = after_death(second, alone=True)
    assert after_death(third, alone=True) == []


@given(count=st.integers(1, 1024), data=st.data())
def test_a_bad_record_costs_four_workers_at_most_and_nobody_else_anything(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    todo, done, given_up, deaths = deque(after_death(piece(count), alone=False)), set[int](), set[int](), 1
    while todo:
        tried = todo.popleft()
        inside = {work.record.position for work in tried.work}
        if not inside & bad:
            done |= inside
            continue
        deaths += 1
        again = after_death(tried, alone=True)
        todo.extendleft(reversed(again))
        if not again:
            given_up |= inside
    assert given_up == bad
    assert done == set(range(count)) - bad
    assert deaths <= 4 + 2 * (len(bad) - 1)  # those that follow share the first two


def test_pieces_are_as_long_as_half_a_second_and_bounded() -> None:
    size = WorkUnitSize(32)
    assert size.full == 32
    size.learn(200, 1.0)
    assert size.full == 100
    for _ in range(50):
        size.learn(100_000, 1.0)
    assert size.full == MOST
    for _ in range(100):
        size.learn(1, 10.0)
    assert size.full == 32  # smaller would make the engine's batches smaller
    size.learn(5, 0.0)


@pytest.mark.parametrize(("waiting", "expected"), [(10_000, 500), (1_000, 250), (100, 25), (10, 20), (1, 20)])
def test_where_few_wait_pieces_are_smaller(waiting: int, expected: int) -> None:
    size = WorkUnitSize(20)
    size.learn(1000, 1.0)
    assert size.now(waiting, 2) == expected
