"""One place decides about every record, wherever its answer comes from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import BrokenOffError, RecordError, StoppedError, TransientError
from headrace.events import DuplicatesFound, Event, Listener
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.memory_budget import Memory
from headrace.jobs.pipeline.settle import Settling
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import PreparedChunk, Work
from headrace.jobs.settings import JobSettings, Limits
from headrace.records import Failed, Ok, Record
from headrace.testing import FakeEngine


def settling(*, max_attempts: int = 3, listener: Listener = lambda event: None) -> Settling:
    job: Any = SimpleNamespace(
        settings=JobSettings([], [].extend, limits=Limits(max_attempts=max_attempts, retry_wait_s=0.0)),
        engine=FakeEngine(),
        stop=StopRequest(),
        user=UserCode(),
        listener=listener,
        form=None,
        samples=None,
    )
    return Settling(job, Memory(1_000_000))


def work(position: int, attempt: int = 1, key: bytes | None = None) -> Work:
    record = Record(position, f"r{position}", None)
    return Work(record, {"text": f"row {position}"}, f"row {position}", 1, attempt, key=key)


def sorted_out(stage: Settling, chunk: PreparedChunk) -> Any:
    return asyncio.run(stage.sort_out(chunk))


def test_an_output_is_the_records_outcome() -> None:
    stage = settling()
    assert sorted_out(stage, PreparedChunk([work(0)])) == ([work(0)], ([], [], True))
    assert stage.unsettled
    assert stage.settle([work(0)], ["output"], False) == [Ok(work(0).record, "output", 1, work(0).row)]
    assert not stage.unsettled


@pytest.mark.parametrize("where", ["prepare", "engine"])
def test_a_failure_that_may_pass_is_tried_again_whether_prepare_or_the_engine_raised_it(where: str) -> None:
    stage = settling(max_attempts=2)
    for attempt in (1, 2):
        row = Record(4, "r4", {"text": "row"})
        chunk = PreparedChunk()
        if where == "prepare":
            chunk.refuse(row, "r4", TransientError("busy"), attempt)
            _, answered = sorted_out(stage, chunk)
        else:
            tried = Work(Record(4, "r4", None), row.data, "payload", 1, attempt)
            sorted_out(stage, PreparedChunk([tried]))
            answered = [tried], [TransientError("busy")], True
        outcomes = stage.settle(*answered)
        if attempt == 1:
            assert outcomes == []
            assert stage.unsettled
            assert [(again.record, again.attempt) for again in stage.to_try_again()] == [(row, 2)]
    assert outcomes == [Failed(row, "TransientError", "busy", 2)]
    assert not stage.unsettled


def test_what_prepare_refuses_for_good_fails_with_its_own_reason() -> None:
    stage, chunk = settling(), PreparedChunk()
    row = Record(7, "r7", {"text": None})
    chunk.refuse(row, "r7", RecordError("no text"), 1)
    chunk.refuse(row, "r7", StoppedError("of the engine's own"), 1)
    to_do, answered = sorted_out(stage, chunk)
    assert to_do == []
    assert stage.settle(*answered) == [
        Failed(row, "RecordError", "no text", code="invalid_value"),
        Failed(row, "StoppedError", "of the engine's own"),
    ]


def test_what_was_not_begun_before_a_stop_has_no_outcome() -> None:
    stage = settling()
    stage._job.stop.request()
    sorted_out(stage, PreparedChunk([work(0)]))
    assert stage.settle([work(0)], [StoppedError("the job was asked to stop")], True) == []
    assert stage.handed_back == 1


def test_an_engine_that_has_stopped_by_itself_ends_the_job() -> None:
    with pytest.raises(BrokenOffError, match="the engine cannot continue"):
        settling().settle([work(0)], [StoppedError("gone")], True)


@pytest.mark.parametrize("where", ["prepare", "engine"])
def test_a_system_without_threads_ends_the_job_and_costs_no_record(where: str) -> None:
    stage, chunk, error = settling(), PreparedChunk(), RuntimeError("can't start new thread")
    answered: Any = [work(0)], [error], True
    if where == "prepare":
        chunk.refuse(Record(7, "r7", {"text": "row"}), "r7", error, 1)
        _, answered = sorted_out(stage, chunk)
    with pytest.raises(BrokenOffError, match="ulimit -u"):
        stage.settle(*answered)


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def deduplicating(heard: list[Event]) -> Iterator[Settling]:
    stage = settling(listener=heard.append)
    yield stage
    asyncio.run(stage.__aexit__(None, None, None))


def test_equal_records_get_the_answer_of_the_one_that_is_computed(deduplicating: Settling, heard: list[Event]) -> None:
    stage = deduplicating
    first, second, third = (work(position, key=b"same") for position in range(3))
    assert sorted_out(stage, PreparedChunk([first, second]))[0] == [first]
    assert [done.record.position for done in stage.settle([first], ["output"], False)] == [0, 1]
    to_do, answered = sorted_out(stage, PreparedChunk([third]))
    assert to_do == []
    assert stage.settle(*answered) == [Ok(third.record, "output", 1, third.row)]
    assert not stage.unsettled
    assert [event.records for event in heard if isinstance(event, DuplicatesFound)] == [1, 1]


def test_equal_records_fail_with_the_one_that_is_computed(deduplicating: Settling) -> None:
    stage = deduplicating
    first, second = (work(position, key=b"same") for position in range(2))
    sorted_out(stage, PreparedChunk([first, second]))
    outcomes = stage.settle([first], [ValueError("bad")], True)
    assert [(failed.record.position, failed.reason) for failed in outcomes if isinstance(failed, Failed)] == [
        (0, "ValueError"),
        (1, "ValueError"),
    ]
