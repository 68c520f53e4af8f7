from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.virtual_time import VirtualTime, now
from tests.unit.virtual_time import virtual as virtual

from headrace import DynamicBatcher
from headrace.engines.base import Chunks
from headrace.errors import EngineDeadError, ProcessError, StoppedError
from headrace.jobs.pipeline.chunks import answers
from headrace.jobs.pipeline.infer import MAX_RUN, infer_one, longest_first, streamed
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.read import Pace
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


def test_what_is_expected_to_be_long_at_its_end_comes_first() -> None:
    expected = {0: 70.0, 1: 900.0, 2: 80.0, 3: 900.0}
    some = [work(0, 5), work(1, 5), work(2, 9), work(3, 5)]
    runs = list(longest_first(some, lambda item: expected[item.record.position]))
    assert [[item.record.position for item in run] for run in runs] == [[1, 3], [2], [0]]


def test_a_run_is_bounded() -> None:
    runs = list(longest_first([work(position, 1) for position in range(2 * MAX_RUN + 3)]))
    assert [len(run) for run in runs] == [MAX_RUN, MAX_RUN, 3]


def test_a_stream_has_the_same_runs() -> None:
    some = [work(position, position % 3) for position in range(9)]

    async def main() -> list[list[Work]]:
        return [run async for run in streamed(longest_first(some))]

    assert asyncio.run(main()) == list(longest_first(some))


class Halves:
    """A batcher that answers with the payloads, in batches of two, last ones first; -1 fails."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    async def __aenter__(self) -> Halves:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def runs_as_completed(self, runs: Any) -> Any:
        taken = [run async for run in runs if run]
        assert all(len({item.cost for item in run}) == 1 for run in taken)
        for run in reversed(taken):
            for start in range(0, len(run), 2):
                some = run[start : start + 2]
                self.batches.append(len(some))
                values = [item.payload for item in some]
                yield some, [ValueError("bad") if value == -1 else value for value in values], True


def test_the_parts_of_a_record_are_in_several_batches_and_it_has_one_answer() -> None:
    def long(position: int, *parts: int) -> Work:
        chunks: Chunks[int] = Chunks(parts, [4] * (len(parts) - 1) + [2], parts, lambda outputs, weights: list(outputs))
        return work(position, sum(chunks.costs))._replace(payload=chunks, row="the row")

    records = [long(0, 1, 2, 3, 4, 5), work(1, 18)._replace(payload=7), long(2, 6, -1, 8, 9, 10)]

    async def main() -> list[tuple[Work, object]]:
        async def runs() -> Any:
            yield records

        found = [answer async for answer in answers(batcher, runs())]
        return [pair for run, outputs, _ in found for pair in zip(run, outputs, strict=True)]

    batcher = Halves()
    answered = {item.record.position: (item, output) for item, output in asyncio.run(main())}
    assert max(batcher.batches) == 2
    assert [answered[position][0] for position in range(3)] == records
    assert answered[0][1] == [1, 2, 3, 4, 5]
    assert answered[1][1] == 7
    assert str(answered[2][1]) == "bad"


class OneByOne(Halves):
    """A batcher that answers each run before it takes the next."""

    async def runs_as_completed(self, runs: Any) -> Any:
        async for run in runs:
            if run:
                yield run, [item.payload for item in run], False


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_record_may_ask_for_more_parts_while_others_follow(count: int) -> None:
    def sums(left: int) -> Any:
        """Adds up its parts, `left` times more with one part that is the sum."""
        more = left - 1 if left > 1 else None
        return lambda outputs, _: Chunks([sum(outputs)], [1], [1], sums(left - 1), more) if left else sum(outputs)

    def long(position: int) -> Work:
        return work(position, 3)._replace(payload=Chunks([1, 2, position], [1, 1, 1], [1, 1, 1], sums(2), 2))

    async def main() -> list[tuple[int, object]]:
        async def runs() -> Any:
            for position in range(count):
                yield [long(position), work(position + 100, 9)._replace(payload=7)]
                await asyncio.sleep(0)

        found = [answer async for answer in answers(OneByOne(), runs())]
        return [(item.record.position, out) for run, some, _ in found for item, out in zip(run, some, strict=True)]

    answered = sorted(asyncio.run(main()))
    assert answered == [(n, 3 + n) for n in range(count)] + [(n + 100, 7) for n in range(count)]


def test_the_next_parts_of_the_last_record_wait_for_no_others(virtual: VirtualTime) -> None:
    async def doubled(batch: list[Work]) -> list[int]:
        return [2 * item.payload for item in batch]

    def total(outputs: Sequence[Any], _: object) -> Any:
        return Chunks([sum(outputs)], [1], [1], lambda outputs, _: outputs[0])

    async def main() -> list[object]:
        settled = asyncio.Event()

        async def runs() -> Any:
            yield [work(0, 2)._replace(payload=Chunks([1, 2], [1, 1], [1, 1], total, 1))]
            yield []
            await settled.wait()

        outputs: list[object] = []
        async with DynamicBatcher[Work, int](doubled, max_batch_size=8, batch_timeout_s=60) as batcher:
            async for _, found, _ in answers(batcher, runs()):
                outputs += found
                settled.set()
        assert now() == 0
        return outputs

    assert virtual(main()) == [12]


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


def test_blocks_grow_while_the_job_is_fast_and_are_short_again_once_it_is_slow() -> None:
    pace, sizes = Pace(4096), []
    for _ in range(40):
        sizes.append(pace.rows)
        pace.asked(0.01)
    assert sizes == [512] * 8 + [2048] * 8 + [4096] * 24
    pace.asked(60)
    assert pace.rows == 512
    steady = Pace(4096)
    for _ in range(8):
        steady.asked(512 * 200e-6)
    assert steady.rows == 2048
    slow = Pace(4096, 2048)  # the engine's window is long
    slow.asked(60)
    assert slow.rows == 2048
    assert Pace(16, 2048).rows == 16
    for _ in range(7):  # what is read ahead of a slow engine comes quickly
        pace.asked(0)
    assert pace.rows == 512
