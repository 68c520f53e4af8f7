from __future__ import annotations

import pytest

from headrace.errors import EngineDeadError, ProcessTimeoutError, RecordError, TransientError
from headrace.jobs.pipeline.waiting_retries import RetryQueue
from headrace.records import Record
from headrace.retry import RetryPolicy


def record(position: int) -> Record:
    return Record(position, position, {})


def longest() -> float:
    """The dice that always fall on the longest wait."""
    return 1.0


@pytest.mark.parametrize("error", [TransientError("x"), ConnectionResetError("x"), TimeoutError("x")])
def test_what_may_pass_is_known_by_its_type(error: Exception) -> None:
    assert RetryQueue(RetryPolicy(2, 1.0)).wants(error, 1)


@pytest.mark.parametrize(
    "error",
    [
        RecordError("connection refused"),
        ValueError("timeout"),
        EngineDeadError("x"),
        OSError("x"),
        {"no": 1},
        ProcessTimeoutError("it would hold up the engine again"),
    ],
)
def test_what_lasts_is_not_tried_again_whatever_it_says(error: object) -> None:
    assert not RetryQueue(RetryPolicy(9, 1.0)).wants(error, 1)


def test_the_last_attempt_is_the_last() -> None:
    retries = RetryQueue(RetryPolicy(3, 1.0))
    assert [retries.wants(TransientError("x"), attempt) for attempt in (1, 2, 3, 4)] == [True, True, False, False]


def test_each_wait_may_be_twice_as_long_up_to_a_minute() -> None:
    retries = RetryQueue(RetryPolicy(99, 0.5), longest)
    waits = []
    for attempt in (1, 2, 3, 20):
        retries.add(record(attempt), attempt, now=100.0)
        waits.append(retries.due_in(100.0))
        retries.take(1000.0, 9)
    assert waits == [0.5, 1.0, 2.0, 60.0]


def test_waits_differ_so_that_those_who_failed_together_do_not_come_back_together() -> None:
    retries = RetryQueue(RetryPolicy(9, 1.0))
    for position in range(200):
        retries.add(record(position), 1, now=0.0)
    early = retries.take(0.5, 1000)
    assert 50 < len(early) < 150
    assert len(retries) == 200 - len(early)


def test_those_due_come_in_input_order_and_no_more_than_asked_for() -> None:
    retries = RetryQueue(RetryPolicy(9, 1.0), longest)
    for position in (5, 3, 4):
        retries.add(record(position), 1, now=0.0)
    assert retries.take(0.9, 9) == []
    first = retries.take(1.0, 2)
    assert [(item.record.position, item.attempt) for item in first] == [(3, 2), (4, 2)]
    assert retries.due_in(0.25) == 0.75
    assert [item.record.position for item in retries.take(1.0, 2)] == [5]
    assert retries.due_in(2.0) is None
