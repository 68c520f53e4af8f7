"""Processes that prepare blocks: what dies, what is refused, and that results keep their rows."""

from __future__ import annotations

import pickle
import threading
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columns import Column, PayloadList, PreparedColumn, values_of
from headrace.errors import BrokenOffError, RecordError, WorkerDiedError
from headrace.jobs.pipeline.arrow import cut_out
from headrace.jobs.pipeline.preparers import EarlyProcesses, PreparerPool, joined
from headrace.processes.link import CallOutcome, LinkedProcess


class Doubler:
    """Prepares numbers as twice as many; refuses odd ones."""

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Each number twice."""
        values = cast("list[int]", values_of(inputs))
        errors = {row: RecordError(f"odd {value}") for row, value in enumerate(values) if value % 2}
        return PreparedColumn(PayloadList([2 * value for value in values]), np.array(values), errors, 1)


class Process:
    """A process without a process: dies of some numbers."""

    def __init__(self, packed: bytes, deadly: set[int], log: list[str]) -> None:
        make, arguments = pickle.loads(packed)
        self.held, self.deadly, self.log = make(*arguments), deadly, log
        self.request: tuple[str, tuple[Column]] = ("", ([],))
        log.append("start")

    def send(self, _number: int, packed: bytes) -> None:
        """Keep the request."""
        self.request = pickle.loads(packed)

    def receive(self) -> CallOutcome:
        """Answer it, or die."""
        method, (inputs,) = self.request
        if self.deadly & set(cast("list[int]", values_of(inputs))):
            self.log.append("death")
            raise WorkerDiedError("killed by signal 9")
        return CallOutcome(0, getattr(self.held, method)(inputs), None)

    def kill(self) -> str:
        """End it."""
        self.log.append("kill")
        return ""


def pool_of(deadly: set[int], log: list[str], most: int = 2) -> PreparerPool:
    return PreparerPool(Doubler(), most, lambda packed: cast("LinkedProcess", Process(packed, deadly, log)))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.sets(st.integers(0, 50), max_size=2), st.booleans())
def test_a_row_that_kills_its_process_fails_alone(numbers: list[int], deadly: set[int], arrow: bool) -> None:
    inputs: Column = pa.array(numbers) if arrow else numbers
    found = pool_of(deadly, []).prepare_column(inputs)
    assert len(found.payloads) == len(found.costs) == len(numbers)
    for row, number in enumerate(numbers):
        if number in deadly:
            assert isinstance(found.errors[row], WorkerDiedError)
            assert "signal 9" in str(found.errors[row])
        elif number % 2:
            assert str(found.errors[row]) == f"odd {number}"
        else:
            assert row not in found.errors
            assert (found.payloads[row], found.costs[row]) == (2 * number, number)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.int64()])
def test_a_process_gets_the_rows_of_a_part_alone(kind: pa.DataType) -> None:
    whole = pa.array([*range(100_000), None], pa.int64()).cast(kind)
    part = whole.slice(99_990)
    assert cut_out(part).equals(part)
    assert len(pickle.dumps(cut_out(part))) < 2_000 < len(pickle.dumps(part))
    assert cut_out(whole) is whole
    assert cut_out(["a"]) == ["a"]


def test_a_process_is_used_again_and_ended() -> None:
    log: list[str] = []
    pool = pool_of(set(), log)
    for _ in range(3):
        pool.prepare_column([2, 4])
    pool.close()
    assert log == ["start", "kill"]


def test_a_death_is_told_once_however_often_its_rows_are_halved(caplog: pytest.LogCaptureFixture) -> None:
    pool_of({8}, []).prepare_column(list(range(0, 64, 2)))
    said = [record.message for record in caplog.records]
    assert said == [
        "headrace: a process that prepares records ended: killed by signal 9; another one prepares its 32 rows again"
    ]


def test_if_every_process_dies_the_job_ends() -> None:
    log: list[str] = []
    with pytest.raises(BrokenOffError, match="prepare_processes=0"):
        pool_of(set(range(1000)), log).prepare_column(list(range(1000)))
    assert log.count("death") < 100


def test_where_no_process_can_be_started_this_one_prepares(caplog: pytest.LogCaptureFixture) -> None:
    def refused(packed: bytes) -> LinkedProcess:
        raise OSError(11, "Resource temporarily unavailable")

    pool = PreparerPool(Doubler(), 2, refused)
    for _ in range(2):
        assert list(pool.prepare_column([2, 4]).payloads) == [4, 8]
    assert caplog.text.count("Resource temporarily unavailable") == 1


def test_real_processes_prepare_at_the_same_time() -> None:
    pool = PreparerPool(Doubler(), 2)
    found: list[PreparedColumn] = []
    threads = [
        threading.Thread(target=lambda: found.append(pool.prepare_column(pa.array(range(0, 2000, 2))))) for _ in "abc"
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        pool.close()
    assert [list(one.payloads) for one in found] == [list(range(0, 4000, 4))] * 3


def test_columns_are_joined_with_their_errors_in_place() -> None:
    parts = [Doubler().prepare_column([2, 3]), Doubler().prepare_column([5]), Doubler().prepare_column([4])]
    whole = joined(parts)
    assert (list(whole.payloads), whole.costs.tolist(), sorted(whole.errors)) == ([4, 6, 10, 8], [2, 3, 5, 4], [1, 2])
    assert whole.truncated == 3


def test_a_call_that_waits_for_a_process_goes_on_when_the_last_one_is_gone() -> None:
    log: list[str] = []
    entered, die = threading.Event(), threading.Event()

    class Dies(Process):
        def receive(self) -> CallOutcome:
            entered.set()
            die.wait()
            raise WorkerDiedError("killed by signal 9")

    def start(packed: bytes) -> LinkedProcess:
        if log:
            raise OSError(11, "Resource temporarily unavailable")
        return cast("LinkedProcess", Dies(packed, set(), log))

    pool = PreparerPool(Doubler(), 1, start)
    found: list[list[object]] = []

    def call(value: int) -> None:
        found.append(list(values_of(cast("Column", list(pool.prepare_column([value, value]).payloads)))))

    first = threading.Thread(target=call, args=(2,), daemon=True)
    first.start()
    entered.wait()
    second = threading.Thread(target=call, args=(4,), daemon=True)
    second.start()
    die.set()
    for thread in (first, second):
        thread.join()
    assert sorted(map(tuple, found)) == [(4, 4), (8, 8)]


def test_a_process_whose_call_breaks_is_ended_and_another_takes_its_place() -> None:
    log: list[str] = []

    class Breaks(Process):
        def send(self, _number: int, packed: bytes) -> None:
            if log.count("start") == 1:
                raise ValueError("broken")
            super().send(_number, packed)

    pool = PreparerPool(Doubler(), 1, lambda packed: cast("LinkedProcess", Breaks(packed, set(), log)))
    with pytest.raises(ValueError, match="broken"):
        pool.prepare_column([2])
    assert list(pool.prepare_column([4]).payloads) == [8]
    assert log == ["start", "kill", "start"]


def test_a_process_that_is_given_back_after_the_end_is_ended() -> None:
    log: list[str] = []
    pool: list[PreparerPool] = []

    class Late(Process):
        def receive(self) -> CallOutcome:
            pool[0].close()
            return super().receive()

    pool.append(PreparerPool(Doubler(), 1, lambda packed: cast("LinkedProcess", Late(packed, set(), log))))
    assert list(pool[0].prepare_column([2]).payloads) == [4]
    assert log == ["start", "kill"]


def test_processes_that_were_started_early_are_told_what_they_hold() -> None:
    early = EarlyProcesses(2, "json")
    first = early._idle[-1]
    pool = PreparerPool(Doubler(), 2, early.start)
    assert list(pool.prepare_column([2, 4]).payloads) == [4, 8]
    assert pool._idle == [first], "and no other was started"
    pool.close()
    [left] = early._idle
    early.close()
    assert left._process.poll() is not None


def test_another_process_takes_the_place_of_an_early_one_that_died_or_cannot_import() -> None:
    early = EarlyProcesses(1, "json")
    early._idle[0].kill()
    for one in (early, EarlyProcesses(1, "no_such_module")):
        pool = PreparerPool(Doubler(), 1, one.start)
        assert list(pool.prepare_column([3]).payloads) == [6]
        pool.close()
        one.close()
