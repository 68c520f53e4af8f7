"""Whether late records are to blame, or their engine."""

from __future__ import annotations

import pytest

from headrace.engines.profile import KINDS
from headrace.errors import BrokenOffError, ProcessTimeoutError, WorkerDiedError
from headrace.jobs.pipeline.suspects import MOST_IN_A_ROW, SuspectFailures
from headrace.records import Failed, Outcome, Record

LATE = ProcessTimeoutError("process_timeout_s")
FAILED = Failed(Record(3, 3, None), "reason", "message")


def test_a_late_record_waits_for_one_that_succeeds() -> None:
    suspects = SuspectFailures(KINDS["batches"], 2.0)
    outcomes: list[Outcome] = []
    suspects.add(suspects.judged(LATE), FAILED, outcomes)
    suspects.add(WorkerDiedError("gone"), FAILED, outcomes)
    suspects.add(ValueError("bad"), FAILED, outcomes)
    assert outcomes == [FAILED]
    assert suspects.release() == [FAILED, FAILED]
    assert suspects.release() == []


def test_its_error_says_what_can_be_done_about_the_thread() -> None:
    message = str(SuspectFailures(KINDS["batches"], 2.0).judged(LATE))
    assert "no result after 2 s (engine_timeout_s)" in message
    assert "thread cannot be ended" in message


def test_where_none_succeeds_in_between_the_engine_hangs() -> None:
    suspects = SuspectFailures(KINDS["batches"], 2.0)
    for _ in range(MOST_IN_A_ROW - 1):
        suspects.judged(LATE)
    suspects.release()
    for _ in range(MOST_IN_A_ROW - 1):
        suspects.judged(LATE)
    with pytest.raises(BrokenOffError, match="8 records in a row had no result after 2 s"):
        suspects.judged(LATE)


def test_a_step_that_does_not_end_is_no_records_fault() -> None:
    with pytest.raises(BrokenOffError, match="has not finished a step"):
        SuspectFailures(KINDS["steps"], 2.0).judged(LATE)
