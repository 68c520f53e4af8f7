from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.shown import shown

from headrace import run
from headrace.errors import BadResultError, BrokenOffError, ConfigError, RecordError, WorkerDiedError, text_of
from headrace.events import StageDone
from headrace.jobs.pipeline import user_code as usercode
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.settings import WorkerKind
from headrace.processes import crash_isolation
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


def kill(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["n"] == 3:
        os._exit(9)
    if row["n"] == 11:
        os.kill(os.getpid(), signal.SIGSEGV)
    if row["n"] == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": row["n"] * 2}


def end(row: Mapping[str, Any]) -> None:
    os._exit(9)


def interrupt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Raises what a record's neighbours must not feel, and returns what is no row."""
    if row["n"] < len(RAISED):
        raise RAISED[row["n"]]
    return {"n": row["n"]}


async def later(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return row


def promises(row: Mapping[str, Any]) -> Any:
    return later(row)


class WordlessError(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


RAISED: list[BaseException] = [
    StopIteration(),
    StopAsyncIteration(),
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    BaseException("base"),
    BaseExceptionGroup("group", [KeyboardInterrupt()]),
    WordlessError(),
]


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


def same(texts: list[str]) -> list[str]:
    return texts


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": row["text"][:3]}


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_time_in_processes_is_not_taken_for_waiting(kind: WorkerKind, tmp_path: Path) -> None:
    seen: list[Any] = []
    rows = [{"text": "the mill"}] * 3
    run(rows, engine=same, sink=tmp_path / "o.jsonl", prepare=shortened, worker_kind=kind, listeners=[seen.append])
    [prepared] = [event for event in seen if isinstance(event, StageDone) and event.stage == "prepare"]
    assert (prepared.cpu_s == prepared.duration_s) == (kind == "process")


def test_outputs_are_finished_with_their_rows(code: UserCode, kind: WorkerKind) -> None:
    found = code.finished([({"n": number}, number * 10) for number in range(3)] + [({"n": 9}, 2)])
    assert found[:3] == [0, 11, 22]
    assert type(found[3]).__name__ == "UnportableError"
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


def test_only_the_record_that_ends_its_process_fails() -> None:
    code = UserCode(kill, kind="process", workers=2)
    rows = [Record(number, number, {"n": number}) for number in range(40)]
    found = [row for _, row in code.prepared(rows)]
    code.close()
    dead = {number: str(row) for number, row in enumerate(found) if isinstance(row, Exception)}
    assert {type(found[number]) for number in dead} == {WorkerDiedError}
    assert sorted(dead) == [3, 11, 12]
    assert "3 processes ended with this record" in dead[3] and "status 9" in dead[3]
    assert "was killed by SIGSEGV" in dead[11]
    assert "was killed by SIGKILL" in dead[12] and "memory" in dead[12]
    assert [row.data["n"] for row in found if isinstance(row, Record)] == [2 * n for n in range(40) if n not in dead]


def test_a_function_that_ends_every_process_breaks_the_job_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_isolation, "MOST_IN_A_ROW", 2)
    code = UserCode(end, kind="process", workers=1)
    with pytest.raises(BrokenOffError, match="2 records in a row ended their process, and none succeeded in between"):
        code.prepared(ROWS)
    code.close()


def test_whatever_is_raised_is_its_records(kind: WorkerKind) -> None:
    code = UserCode(interrupt, kind=kind, workers=1)
    rows = [Record(number, number, {"n": number}) for number in range(len(RAISED) + 2)]
    found = [row for _, row in code.prepared(rows)]
    code.close()
    assert [isinstance(row, Exception) for row in found] == [True] * len(RAISED) + [False] * 2
    assert all(isinstance(text_of(row), str) for row in found if isinstance(row, Exception))


@pytest.mark.parametrize("function", [later, functools.partial(later), lambda row: (yield row)], ids=shown)
def test_a_function_that_only_promises_its_result_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"finish is an? (async|generator) function: it must be a plain function"):
        UserCode(finish=function)


def test_a_promise_in_a_results_place_is_the_records_error(kind: WorkerKind) -> None:
    code = UserCode(promises, kind=kind, workers=1)
    [(_, found)] = code.prepared(ROWS[:1])
    code.close()
    assert isinstance(found, BadResultError)
    assert "promises returned a coroutine" in str(found)


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
