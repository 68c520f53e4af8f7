from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.jobs.pipeline.infer import MAX_RUN, longest_first
from headrace.jobs.pipeline.work import Work
from headrace.records import Record


def work(position: int, cost: int) -> Work:
    return Work(Record(position, position, None), None, None, cost)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(1, 5), max_size=40))
def test_runs_are_alike_the_costliest_come_first_and_nothing_is_lost(costs: list[int]) -> None:
    runs = list(longest_first([work(position, cost) for position, cost in enumerate(costs)]))
    assert all(len({item.cost for item in run}) == 1 for run in runs)
    flat = [item for run in runs for item in run]
    assert [item.cost for item in flat] == sorted(costs, reverse=True)
    assert sorted(item.record.position for item in flat) == list(range(len(costs)))
    for run in runs:
        positions = [item.record.position for item in run]
        assert positions == sorted(positions)


def test_a_run_is_bounded() -> None:
    runs = list(longest_first([work(position, 1) for position in range(2 * MAX_RUN + 3)]))
    assert [len(run) for run in runs] == [MAX_RUN, MAX_RUN, 3]
