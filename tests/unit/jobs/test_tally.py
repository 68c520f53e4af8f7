from __future__ import annotations

import pytest

from headrace.errors import TooManyErrorsError
from headrace.jobs.job import CHECK_ERRORS_AFTER, Limits, Tally
from headrace.records import Failed, Record

FAILED = Failed(Record(7, 7, None), "RecordError", "column 'text' is null")


def test_a_few_records_are_not_judged_before_the_end() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.1))
    tally.expect(CHECK_ERRORS_AFTER - 1)
    for _ in range(CHECK_ERRORS_AFTER - 1):
        tally.count(1, [FAILED])
    with pytest.raises(TooManyErrorsError):
        tally.check()


def test_a_job_that_is_mostly_errors_stops_and_says_which() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5))
    tally.expect(101)
    for _ in range(50):
        tally.count(1, [])
        tally.count(1, [FAILED])
    with pytest.raises(TooManyErrorsError, match=r"51 of 101 .* 0\.5 .*51 RecordError.*record 7: column 'text'"):
        tally.count(1, [FAILED])


def test_failures_that_come_before_their_good_neighbours_are_no_reason_to_stop() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5))
    tally.expect(512)
    for _ in range(200):
        tally.count(1, [FAILED])
    assert (tally.records, tally.failed) == (200, 200)


def test_what_earlier_runs_committed_counts() -> None:
    tally = Tally(1000, 500, Limits(max_error_rate=0.5))
    with pytest.raises(TooManyErrorsError):
        tally.count(1, [FAILED])


def test_exactly_the_limit_is_allowed() -> None:
    Tally(10, 0, Limits(max_error_rate=0.0)).check()
    Tally(10, 10, Limits(max_error_rate=1.0)).check()
