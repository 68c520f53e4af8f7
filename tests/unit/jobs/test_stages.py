from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import EngineDeadError, ProcessError, StoppedError
from headrace.jobs.pipeline.infer import MAX_RUN, infer_one, longest_first, stream_longest_first
from headrace.jobs.pipeline.job import StopRequest
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


def test_a_stream_has_the_same_runs() -> None:
    some = [work(position, position % 3) for position in range(9)]

    async def main() -> list[list[Work]]:
        return [run async for run in stream_longest_first(some)]

    assert asyncio.run(main()) == list(longest_first(some))


class Ending:
    """A stream engine that asks the job to stop, or does not, and then fails."""

    def __init__(self, error: Exception, stop: StopRequest | None = None) -> None:
        self._error = error
        self._stop = stop

    async def infer(self, payload: Any) -> Any:
        if self._stop is not None:
            self._stop.request()
        raise self._error


@pytest.mark.parametrize("error", [StoppedError("closed"), EngineDeadError("gone")])
def test_an_engine_that_ends_with_the_job_leaves_its_record_unprocessed(error: Exception) -> None:
    stop = StopRequest()
    engine: Any = Ending(error, stop)
    assert isinstance(asyncio.run(infer_one(work(0, 1), engine, stop)), StoppedError)


@pytest.mark.parametrize(
    ("error", "raised"), [(StoppedError("closed"), ProcessError), (EngineDeadError("gone"), EngineDeadError)]
)
def test_an_engine_that_ends_by_itself_fails_its_record(error: Exception, raised: type[Exception]) -> None:
    engine: Any = Ending(error)
    with pytest.raises(raised):
        asyncio.run(infer_one(work(0, 1), engine, StopRequest()))
