"""Retry policy: which failures are transient, how long to wait, when to give up. Pure."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import (
    BrokenOffError,
    DiskFullError,
    OutputLockedError,
    ProcessTimeoutError,
    ResumeMismatchError,
    TransientError,
)

if TYPE_CHECKING:
    import tenacity

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed later."""
TRANSIENT = (TransientError, ConnectionError, TimeoutError)
"""Transient failures of a record, by type, never by message."""
_LASTING_IO = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_MOST_DOUBLINGS = 64
"""Keeps the wait within a float's range."""


class PermanentIOError(OSError):
    """A store refused a call for a permanent reason, such as missing credentials."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter. Attempts count from 1; times are in seconds."""

    max_attempts: int | None = 4
    """Including the first; None retries forever."""
    backoff_s: float = 0.5
    """Maximum wait after the first attempt; it doubles with each further one."""
    max_backoff_s: float = 60.0
    """Upper limit of a wait, and of a Retry-After."""
    jitter: float = 1.0
    """The random share of a wait. 1 is "full jitter" (M. Brooker, Exponential Backoff And Jitter, 2015): calls that
    failed together do not retry together."""

    def allows(self, attempt: int) -> bool:
        """Whether there may be another attempt after this one."""
        return self.max_attempts is None or attempt < self.max_attempts

    def wait_s(self, attempt: int, retry_after_s: float = 0.0, chance: Callable[[], float] | None = None) -> float:
        """How long to wait after a failed attempt, in seconds.

        Args:
            retry_after_s: requested by the server; the backoff is added to it.
            chance: returns a random number between 0 and 1; `random.random` by default.
        """
        longest = min(self.backoff_s * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS), self.max_backoff_s)
        asked = min(max(retry_after_s, 0.0), self.max_backoff_s)
        luck = random.random() if chance is None else chance()
        return asked + longest * (1.0 - self.jitter + self.jitter * luck)

    def for_tenacity(self, transient: Callable[[BaseException], bool]) -> dict[str, Any]:
        """The arguments of `tenacity.retry` that follow this policy."""

        def failed(state: tenacity.RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome is not None else None
            return error is not None and transient(error)

        return {
            "retry": failed,
            "stop": lambda state: not self.allows(state.attempt_number),
            "wait": lambda state: self.wait_s(state.attempt_number),
            "reraise": True,
        }


def is_transient(error: object) -> bool:
    """Whether a record that failed with this error may succeed later."""
    late = isinstance(error, ProcessTimeoutError)  # it would block the engine again
    return isinstance(error, TRANSIENT) and not late


def is_transient_io(error: BaseException) -> bool:
    """Whether a failed call to a store may succeed later; false for invalid requests."""
    return isinstance(error, OSError) and not isinstance(error, (*_LASTING_IO, PermanentIOError))


def is_transient_state(error: BaseException) -> bool:
    """Whether a job failed because of its machine, such as a full disk or a dead engine."""
    if not isinstance(error, (OSError, BrokenOffError, DiskFullError, OutputLockedError, ResumeMismatchError)):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            return False  # the output is too large for the file system: permanent
        cause = cause.__cause__
    return True


def retry_after_s(header: str | None) -> float:
    """The seconds of a Retry-After header; 0 if it is missing or a date (which uses another machine's clock)."""
    try:
        seconds = float(header or 0)
    except ValueError:
        return 0.0
    return seconds if seconds > 0 else 0.0  # NaN too
