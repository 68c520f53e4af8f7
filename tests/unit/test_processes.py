"""Which records end a process, and what can travel to another: without a process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import EngineDeadError, ProcessTimeoutError, RecordError, WorkerDiedError
from headrace.processes.crash_isolation import MOST_IN_A_ROW, CrashIsolation
from headrace.processes.portable import UnsendableError, pack, unpack


class Machine:
    """Doubles numbers; dies of some, is too late with some, and cannot be sent others."""

    def __init__(self, deadly: set[int], late: set[int], unsendable: set[int]) -> None:
        self.deadly, self.late, self.unsendable = deadly, late, unsendable
        self.deaths = 0

    def __call__(self, items: list[int]) -> list[int]:
        if self.unsendable & set(items):
            raise UnsendableError("no")
        if self.deadly & set(items):
            self.deaths += 1
            raise WorkerDiedError("gone")
        if self.late & set(items):
            self.deaths += 1
            raise ProcessTimeoutError("late")
        return [2 * item for item in items]


@given(st.integers(1, 200), st.data())
def test_only_those_that_end_the_process_fail(count: int, data: st.DataObject) -> None:
    few = st.sets(st.integers(0, count - 1), max_size=3)
    deadly, late, unsendable = data.draw(few), data.draw(few), data.draw(few)
    machine = Machine(deadly, late, unsendable)
    for number, result in enumerate(CrashIsolation(machine).results(range(count))):
        if number in unsendable:
            assert type(result) is RecordError
        elif number in deadly:
            assert type(result) is WorkerDiedError
        elif number in late:
            assert type(result) is ProcessTimeoutError
        else:
            assert result == 2 * number
    assert machine.deaths <= 4 * len(deadly | late) + 4


def test_where_no_record_survives_the_process_is_to_blame() -> None:
    machine = Machine(set(range(100)), set(), set())
    with pytest.raises(EngineDeadError, match=f"{MOST_IN_A_ROW} records in a row ended their process"):
        CrashIsolation(machine).results(range(100))


class Unkind:
    def __reduce__(self) -> Any:
        raise SystemExit(1)


def test_what_cannot_travel_is_its_own_error() -> None:
    good, lock, unkind, error = unpack(pack([1, threading.Lock(), Unkind(), KeyError("k")]))
    assert good == 1
    assert isinstance(error, KeyError)
    for result in (lock, unkind):
        assert isinstance(result, RecordError)
        assert "cannot leave its process" in str(result)
