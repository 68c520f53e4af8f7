from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from headrace.errors import BrokenOffError, ConfigError, RecordError
from headrace.jobs import usercode
from headrace.jobs.usercode import UserCode, WorkerKind
from headrace.records import Record

ROWS = [Record(number, f"r{number}", {"n": number}) for number in range(7)]


def double(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["n"] == 3:
        raise KeyError("three")
    return {"n": row["n"] * 2, "pid": os.getpid()}


def listed(row: Mapping[str, Any]) -> Any:
    return [row["n"]]


def add(row: Mapping[str, Any], output: int) -> int:
    if output == 2:
        raise UnportableError("no", "way")
    return int(row["n"]) + output


def end(row: Mapping[str, Any]) -> None:
    os._exit(9)


class UnportableError(Exception):
    """Cannot be unpickled: it takes two arguments and keeps one."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


@pytest.fixture(params=["thread", "process"], scope="module")
def kind(request: pytest.FixtureRequest) -> WorkerKind:
    found: WorkerKind = request.param
    return found


@pytest.fixture(scope="module")
def code(kind: WorkerKind) -> Iterator[UserCode]:
    made = UserCode(double, add, kind, workers=2)
    yield made
    made.close()


def test_rows_are_mapped_and_an_exception_is_its_records(code: UserCode, kind: WorkerKind) -> None:
    found = list(code.prepared(ROWS))
    assert [record for record, _ in found] == ROWS
    mapped = [row for _, row in found]
    assert isinstance(mapped[3], KeyError)
    assert [(row.id, row.position, row.data["n"]) for row in mapped if isinstance(row, Record)] == [
        (f"r{n}", n, 2 * n) for n in range(7) if n != 3
    ]
    pids = {row.data["pid"] for row in mapped if isinstance(row, Record)}
    assert (pids == {os.getpid()}) == (kind == "thread")


def test_outputs_are_finished_with_their_rows(code: UserCode, kind: WorkerKind) -> None:
    found = code.finished([({"n": number}, number * 10) for number in range(3)] + [({"n": 9}, 2)])
    assert found[:3] == [0, 11, 22]
    assert isinstance(found[3], UnportableError if kind == "thread" else RecordError)
    assert "no" in str(found[3])


def test_a_row_that_is_no_mapping_is_refused() -> None:
    (_, row), *_ = UserCode(listed).prepared(ROWS)
    assert isinstance(row, RecordError)
    assert "returned list" in str(row)


def test_without_functions_rows_stay_as_they_are() -> None:
    code = UserCode()
    assert list(code.prepared(ROWS)) == list(zip(ROWS, ROWS, strict=True))
    assert not code.finishes
    assert code.describe() == {}


def test_it_names_its_functions() -> None:
    assert UserCode(double, add).describe() == {"prepare": f"{__name__}:double", "finish": f"{__name__}:add"}


def test_a_process_that_ends_breaks_the_job_off() -> None:
    code = UserCode(end, kind="process", workers=1)
    with pytest.raises(BrokenOffError, match="a worker process ended while it ran"):
        code.prepared(ROWS)
    code.close()


def test_what_no_other_process_can_import_is_refused_there() -> None:
    with pytest.raises(ConfigError, match="cannot run in another process"):
        UserCode(lambda row: row, kind="process")


@pytest.mark.parametrize(("slow", "expected"), [(False, "thread"), (True, "process")])
def test_auto_measures_what_a_record_costs(monkeypatch: pytest.MonkeyPatch, slow: bool, expected: str) -> None:
    clock = iter([0.0, (2 if slow else 0.5) * len(ROWS) * usercode.PROCESS_PAYS_S])
    monkeypatch.setattr(usercode.time, "thread_time", functools.partial(next, clock))
    code = UserCode(double, kind="auto", workers=2)
    code.prepared(ROWS)
    assert code._kind == expected
