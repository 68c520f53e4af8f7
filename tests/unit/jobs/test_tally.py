from __future__ import annotations

import pytest

from headrace.errors import TooManyErrorsError
from headrace.jobs.pipeline.job import Length, Tally
from headrace.jobs.settings import Limits
from headrace.records import Failed, Record

FAILED = Failed(Record(7, 7, None), "RecordError", "column 'text' is null")


def fail(tally: Tally, records: int) -> None:
    for _ in range(records):
        tally.count(1, [FAILED])


@pytest.mark.parametrize(
    ("length", "read_bytes", "judged_from"),
    [
        (Length(), 0, 10_000),
        (Length(records=3_000), 0, 1_000),
        (Length(records=50_000), 0, 5_000),
        (Length(records=10**8), 0, 100_000),
        (Length(bytes=10**6), 10**5, 1_000),
        (Length(bytes=10**9), 10**6, 100_000),
    ],
)
def test_the_beginning_of_a_long_input_is_not_judged_alone(length: Length, read_bytes: int, judged_from: int) -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5), length)
    tally.expect(judged_from - 1, read_bytes)
    fail(tally, judged_from - 1 if length.records != 3_000 else 999)
    tally.expect(1, 0)
    with pytest.raises(TooManyErrorsError):
        tally.count(1, [FAILED])


def test_a_sorted_input_with_a_bad_beginning_goes_on() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5), Length(bytes=20_000 * 100))
    for start in range(0, 20_000, 500):
        tally.expect(500, 50_000)
        failed = 500 if start < 1_000 else 0
        fail(tally, failed)
        tally.count(500 - failed, [])
    tally.check()


def test_a_job_that_is_all_errors_stops_after_a_tenth() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5), Length(records=100_000))
    tally.expect(10_000)
    fail(tally, 5_000)
    with pytest.raises(TooManyErrorsError):
        fail(tally, 1)


@pytest.mark.parametrize("length", [Length(records=200), Length(bytes=1000)])
def test_a_job_stops_once_the_rest_cannot_mend_its_rate(length: Length) -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5), length)
    tally.expect(200, 1000)
    fail(tally, 100)
    with pytest.raises(TooManyErrorsError):
        tally.count(1, [FAILED])


def test_a_few_records_are_not_judged_before_the_end() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.1))
    tally.expect(999)
    fail(tally, 999)
    with pytest.raises(TooManyErrorsError):
        tally.check()


def test_the_error_says_how_many_failed_and_why() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5))
    tally.expect(101)
    for _ in range(50):
        tally.count(1, [])
    fail(tally, 51)
    with pytest.raises(
        TooManyErrorsError, match=r"51 of 101 .*max_error_rate=0\.5 .*51 RecordError.*record 7: column 'text'"
    ):
        tally.check()


def test_failures_that_come_before_their_good_neighbours_are_no_reason_to_stop() -> None:
    tally = Tally(0, 0, Limits(max_error_rate=0.5), Length(records=1200))
    tally.expect(1200)
    fail(tally, 600)
    assert (tally.records, tally.failed) == (600, 600)


def test_what_earlier_runs_committed_counts() -> None:
    tally = Tally(10_000, 5_000, Limits(max_error_rate=0.5))
    with pytest.raises(TooManyErrorsError):
        tally.count(1, [FAILED])


def test_exactly_the_limit_is_allowed() -> None:
    Tally(10, 0, Limits(max_error_rate=0.0)).check()
    Tally(10, 10, Limits(max_error_rate=1.0)).check()
