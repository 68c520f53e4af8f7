"""Every error Headrace raises on purpose.

    HeadraceError
    ├── ConfigError (ValueError)            a parameter, flag or file cannot be used; nothing was started
    │   ├── UnknownOptionError              an engine or handler has no option of this name
    │   ├── MissingExtraError               an optional dependency is not installed
    │   └── DiskFullError                   the disk of an output is full
    ├── NotRunningError (RuntimeError)      the batcher has not been started, or is stopped
    ├── AlreadyRunningError (RuntimeError)  started twice
    ├── QueueFullError                      submit_nowait found no room
    ├── RecordError (ValueError)            this record alone cannot be processed
    │   ├── CostError                       its cost is not a finite number >= 0
    │   └── RecordTooLargeError             it alone costs more than a batch may
    ├── DeadlineExceededError (TimeoutError)   its deadline passed while it waited
    ├── StoppedError (RuntimeError)         the batcher stopped before the record was processed
    ├── ProcessError (RuntimeError)         stands in for an engine's exception that cannot be copied for a caller
    ├── ProcessTimeoutError (TimeoutError)  a batch ran longer than process_timeout_s
    ├── BadResultError (ValueError)         process_fn returned the wrong type or the wrong number of results
    ├── TransientError (RuntimeError)       it failed this time, and may succeed if tried again
    ├── EngineError (RuntimeError)          a model cannot be loaded or run
    │   ├── EngineDeadError                 the engine is gone: no record's fault, nothing to split or retry
    │   ├── WorkerDiedError                 a worker process is gone, and so is what it was working on
    │   └── EngineOutOfMemoryError          the device has no room for this batch: it is split
    └── JobError                            a bulk job cannot start or go on
        ├── OutputLockedError               another process writes the same output
        ├── ResumeMismatchError             input, model or parameters are not those the output was begun with
        ├── TooManyErrorsError              more records failed than the job allows
        └── BrokenOffError                  engine, input or output gave way: the same command goes on from here

A message names the thing, the value and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable


class HeadraceError(Exception):
    """Base of all of Headrace's own errors."""


class ConfigError(HeadraceError, ValueError):
    """A parameter, flag or file cannot be used; nothing was started."""


class UnknownOptionError(ConfigError):
    """An engine has no option of this name; the message lists those it has and names the nearest.

    Args:
        reason: the message without the nearest name.
        option: the unknown one.
        known: the engine's options.
        settings: other names that may have been meant.
    """

    def __init__(self, reason: str, option: str, known: tuple[str, ...] = (), settings: tuple[str, ...] = ()) -> None:
        super().__init__(reason + nearest(option, (*known, *settings)))
        self.reason = reason
        self.option = option
        self.known = known
        self.settings = settings

    def __reduce__(self) -> tuple[type[UnknownOptionError], tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
        """So that it arrives from another process too."""
        return UnknownOptionError, (self.reason, self.option, self.known, self.settings)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names that may be meant, as the end of a sentence; empty if none is similar."""
    from difflib import get_close_matches  # here, as this module is imported by every command

    close = get_close_matches(name, [*dict.fromkeys(known)], 3, 0.75)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class MissingExtraError(ConfigError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class DiskFullError(ConfigError):
    """The disk of an output is full."""


class NotRunningError(HeadraceError, RuntimeError):
    """The batcher has not been started, or is stopped."""


class AlreadyRunningError(HeadraceError, RuntimeError):
    """The batcher was started twice."""


class QueueFullError(HeadraceError):
    """`submit_nowait` found no room."""


class RecordError(HeadraceError, ValueError):
    """One record cannot be processed; its neighbours can.

    Args:
        message: one line.
        param: the field of a request body that it is about, such as `messages.0.content`; None for the whole.
        code: a short stable word for programs, as OpenAI's errors have it.
    """

    def __init__(self, *message: object, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(*message)
        self.param = param
        self.code = code


class CostError(RecordError):
    """A record's cost is not a finite number >= 0."""


class RecordTooLargeError(RecordError):
    """A record alone costs more than a batch may, and `oversized="reject"` is set."""


class DeadlineExceededError(HeadraceError, TimeoutError):
    """A record's deadline passed while it waited; it was not run."""


class StoppedError(HeadraceError, RuntimeError):
    """The batcher stopped before the record was processed."""


class ProcessError(HeadraceError, RuntimeError):
    """Stands in for an engine's exception that cannot be copied for each caller; `__cause__` is the original."""


class ProcessTimeoutError(HeadraceError, TimeoutError):
    """A batch ran longer than `process_timeout_s`."""


class BadResultError(HeadraceError, ValueError):
    """`process_fn` returned the wrong type, or the wrong number of results."""


class TransientError(HeadraceError, RuntimeError):
    """It failed this time, and may succeed if tried again: for an engine, or a function of yours, to raise."""


class EngineError(HeadraceError, RuntimeError):
    """A model cannot be loaded or run."""


class EngineDeadError(EngineError):
    """The engine is gone: no record's fault, and nothing that splitting or retrying could mend."""


class WorkerDiedError(EngineError):
    """A worker process is gone, and so is what it was working on."""


class EngineOutOfMemoryError(EngineError):
    """The device has no room for this batch."""


class JobError(HeadraceError):
    """A bulk job cannot start or go on."""


class OutputLockedError(JobError):
    """Another process writes the same output."""


class ResumeMismatchError(JobError):
    """Input, model or parameters are not those the output was begun with."""


class TooManyErrorsError(JobError):
    """More records failed than the job allows."""


class BrokenOffError(JobError):
    """Engine, input or output gave way in the middle; what is finished is kept, and the same command goes on."""


class StoppedEarly(SystemExit):
    """A signal ends the process before a job has begun. Raised on the main thread, where user code may just run."""


def text_of(error: BaseException) -> str:
    """The error's message, also where its own `__str__` raises."""
    try:
        return str(error)
    except BaseException as other:  # noqa: BLE001 - a user's own method: the error must be reported nevertheless
        return f"its message cannot be read: {type(other).__name__}"
