from __future__ import annotations

import errno

import pytest
import tenacity

from headrace.errors import BrokenOffError, ConfigError, DiskFullError
from headrace.retry import (
    PermanentIOError,
    RetryPolicy,
    is_transient_io,
    is_transient_state,
    retry_after_s,
)


def test_waits_double_up_to_the_cap_after_any_number_of_attempts() -> None:
    policy = RetryPolicy(backoff_s=1, max_backoff_s=30)
    waits = [policy.wait_s(attempt, chance=lambda: 1.0) for attempt in (1, 2, 3, 6, 5_000)]
    assert waits == [1, 2, 4, 30, 30]


@pytest.mark.parametrize(("jitter", "least"), [(1.0, 0.0), (0.5, 4.0), (0.0, 8.0)])
def test_jitter_is_the_random_share_of_a_wait(jitter: float, least: float) -> None:
    policy = RetryPolicy(backoff_s=8, jitter=jitter)
    assert (policy.wait_s(1, chance=lambda: 0.0), policy.wait_s(1, chance=lambda: 1.0)) == (least, 8.0)


def test_what_the_server_asks_for_comes_first_and_is_believed_up_to_the_cap() -> None:
    policy = RetryPolicy(backoff_s=1, max_backoff_s=30)
    assert policy.wait_s(1, 5.0, lambda: 0.5) == 5.5
    assert policy.wait_s(1, 3600.0, lambda: 0.5) == 30.5


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, 0.0), ("7", 7.0), ("-3", 0.0), ("nan", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0)]
)
def test_retry_after_is_read_in_seconds(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_the_last_attempt_is_the_last_and_none_is_where_there_is_no_bound() -> None:
    assert [RetryPolicy(max_attempts=2).allows(attempt) for attempt in (1, 2, 3)] == [True, False, False]
    assert RetryPolicy(max_attempts=None).allows(10**9)


def call(policy: RetryPolicy, *errors: Exception) -> tuple[list[float], int]:
    """The waits and the number of calls where a call fails with these errors, then succeeds."""
    waits: list[float] = []
    left = list(errors)
    calls = 0

    def flaky() -> str:
        nonlocal calls
        calls += 1
        if left:
            raise left.pop(0)
        return "done"

    tenacity.retry(sleep=waits.append, **policy.for_tenacity(is_transient_io))(flaky)()
    return waits, calls


def test_tenacity_waits_as_the_policy_says() -> None:
    policy = RetryPolicy(max_attempts=4, backoff_s=1, jitter=0.0)
    assert call(policy, *[OSError("x")] * 3) == ([1, 2, 4], 4)


def test_tenacity_gives_up_as_the_policy_says_with_the_last_error() -> None:
    with pytest.raises(OSError, match="second"):
        call(RetryPolicy(max_attempts=2, backoff_s=0), OSError("first"), OSError("second"))


@pytest.mark.parametrize(
    "error", [FileNotFoundError("x"), PermissionError("x"), PermanentIOError("x"), ValueError("x")]
)
def test_tenacity_raises_at_once_what_does_not_pass(error: Exception) -> None:
    with pytest.raises(type(error)):
        call(RetryPolicy(max_attempts=9, backoff_s=0), error, AssertionError("a second call"))


def test_a_job_waits_for_its_machine_and_not_for_itself() -> None:
    own = DiskFullError("x")
    own.__cause__ = OSError(errno.EFBIG, "File too large")
    found = [is_transient_state(error) for error in (DiskFullError("x"), BrokenOffError("x"), OSError("x"), own)]
    assert found == [True, True, True, False]
    assert not is_transient_state(ConfigError("x"))
