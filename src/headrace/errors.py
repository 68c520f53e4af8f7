"""Every error Headrace raises on purpose.

    HeadraceError
    ├── ConfigError (ValueError)            a parameter, flag or file cannot be used; nothing was started
    │   ├── UnknownOptionError              an engine or handler has no option of this name
    │   ├── MissingExtraError               an optional dependency is not installed
    │   └── DiskFullError                   the disk of the output is full
    ├── NotRunningError (RuntimeError)      the batcher has not been started or has stopped
    ├── AlreadyRunningError (RuntimeError)  the batcher was started twice
    ├── QueueFullError                      submit_nowait found no room
    ├── RecordError (ValueError)            this record alone cannot be processed
    │   ├── CostError                       its cost is not a finite number >= 0
    │   └── RecordTooLargeError             it exceeds the batch budget
    ├── DeadlineExceededError (TimeoutError)   its deadline passed while it waited
    ├── StoppedError (RuntimeError)         the batcher stopped before the record was processed
    ├── ProcessError (RuntimeError)         replaces an engine's exception that cannot be copied for a caller
    ├── ProcessTimeoutError (TimeoutError)  a batch ran longer than process_timeout_s
    ├── BadResultError (ValueError)         process_fn returned the wrong type or the wrong number of results
    ├── TransientError (RuntimeError)       a failure that may not occur on another attempt
    ├── EngineError (RuntimeError)          a model cannot be loaded or run
    │   ├── EngineDeadError                 the engine is gone: not a record failure, nothing to split or retry
    │   ├── WorkerDiedError                 a worker process died, and its records are lost
    │   ├── EngineOutOfMemoryError          the device has no memory for this batch: it is split
    │   └── ModelCodeError                  a model's own code failed; the caller says at what
    └── JobError                            a bulk job cannot start or continue
        ├── OutputLockedError               another process writes the same output
        ├── ResumeMismatchError             input, model or parameters differ from those of the existing output
        ├── TooManyErrorsError              more records failed than the job allows
        └── BrokenOffError                  engine, input or output failed: the same command continues from here

A message names the thing, the value and the way out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from headrace.wording import shortened, shown, worded

T = TypeVar("T")

_COMPARED = 16
"""Maximum number of unknown fields that are compared with the known ones: it takes time."""
_LISTED = 25
"""Maximum number of known options that an error lists."""


class HeadraceError(Exception):
    """Base of all of Headrace's own errors. Its text names settings as the user gives them: see `wording`."""

    def __str__(self) -> str:
        return worded(super().__str__())


class ConfigError(HeadraceError, ValueError):
    """A parameter, flag or file cannot be used; nothing was started."""


class UnknownOptionError(ConfigError):
    """An engine has no option of this name; the message lists its options and names the nearest.

    Args:
        option: the unknown one.
        task: of the engine; None for a custom engine.
        engine: its name; None for the default of the task.
        known: the engine's options.
        owners: engines that have the option: name and task of each.
        settings: other names that may have been meant.
    """

    def __init__(
        self,
        option: str,
        task: str | None,
        engine: str | None = None,
        known: tuple[str, ...] = (),
        owners: tuple[tuple[str, str], ...] = (),
        settings: tuple[str, ...] = (),
    ) -> None:
        self.option = option
        self.task = task
        self.engine = engine
        self.known = known
        self.owners = owners
        self.settings = settings
        super().__init__(self.told(option, str, settings))

    def __reduce__(self) -> tuple[type[UnknownOptionError], tuple[object, ...]]:
        return UnknownOptionError, (self.option, self.task, self.engine, self.known, self.owners, self.settings)

    @property
    def place(self) -> str:
        """What lacks the option."""
        return repr(self.engine) if self.task is None else f"task {self.task!r}"

    def told(self, given: str, spelled: Callable[[str], str], others: Iterable[str], beside: str = "") -> str:
        """The message, with the known options, the engines that have this one, and the nearest name.

        Args:
            given: the option as the user has given it.
            spelled: how an option is written there.
            others: names beside the options that may have been meant, as written there.
            beside: where those are listed, as the end of the list.
        """
        known = [spelled(name) for name in self.known]
        more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
        said = f"{given}: {self.place} has no such option; known: {', '.join(known[:_LISTED]) or 'none'}{more}{beside}"
        if self.owners:
            others = ()  # the name is right
            owners = " and ".join(f"engine {engine!r} (task {task!r})" for engine, task in self.owners)
            said += f"; {spelled(self.option)} is an option of {owners}"
        return said + nearest(spelled(self.option), (*known, *others))


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion of similar known names, as the end of a sentence; empty if none is similar."""
    from difflib import get_close_matches  # here, as this module is imported by every command

    names = {one.lstrip("-"): one for one in known}  # their dashes would make flags alike
    name = name.lstrip("-")
    close = get_close_matches(name, names, 3, 0.75)
    close = close or [one for one in names if len(name) > 3 and one.startswith(name)][:3]
    return f"; did you mean {' or '.join(names[one] for one in close)}?" if close else ""


def misspelt(given: Iterable[str], known: Collection[str]) -> str:
    """The first unknown name that is like a known one, as the end of a sentence; empty if there is none."""
    for name in itertools.islice((name for name in given if name not in known), _COMPARED):
        if hint := nearest(name[:60], known):
            return f"; unknown field {shown(name)}{hint}"
    return ""


class MissingExtraError(ConfigError):
    """An optional dependency is not installed; the message names the extra that provides it."""


class DiskFullError(ConfigError):
    """The disk of the output is full."""


class NotRunningError(HeadraceError, RuntimeError):
    """The batcher has not been started or has stopped."""


class AlreadyRunningError(HeadraceError, RuntimeError):
    """The batcher was started twice."""


class QueueFullError(HeadraceError):
    """`submit_nowait` found no room."""


class RecordError(HeadraceError, ValueError):
    """One record cannot be processed; others are not affected.

    Args:
        message: one line.
        param: the invalid field of a request body, such as `messages.0.content`; None for the whole body.
        code: a short stable code for programs, as in OpenAI's errors.
    """

    def __init__(self, *message: object, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(*message)
        self.param = param
        self.code = code


class CostError(RecordError):
    """A record's cost is not a finite number >= 0."""


class RecordTooLargeError(RecordError):
    """A record exceeds the batch budget, and `oversized="reject"` is set."""


class DeadlineExceededError(HeadraceError, TimeoutError):
    """A record's deadline passed while it waited; it was not run."""


class StoppedError(HeadraceError, RuntimeError):
    """The batcher stopped before the record was processed."""


class ProcessError(HeadraceError, RuntimeError):
    """Replaces an engine's exception that cannot be copied for each caller; `__cause__` is the original."""


class ProcessTimeoutError(HeadraceError, TimeoutError):
    """A batch ran longer than `process_timeout_s`."""


class BadResultError(HeadraceError, ValueError):
    """`process_fn` returned the wrong type, or the wrong number of results."""


class TransientError(HeadraceError, RuntimeError):
    """A failure that may not occur on another attempt; raised by engines or user functions."""


class EngineError(HeadraceError, RuntimeError):
    """A model cannot be loaded or run."""


class EngineDeadError(EngineError):
    """The engine is gone. Not a record failure; splitting or retrying does not help."""


class WorkerDiedError(EngineError):
    """A worker process died, and its records are lost."""


class EngineOutOfMemoryError(EngineError):
    """The device has no memory for this batch."""


class ModelCodeError(EngineError):
    """A model's own code failed; the message is the first line of what it said."""


class JobError(HeadraceError):
    """A bulk job cannot start or continue."""


class OutputLockedError(JobError):
    """Another process writes the same output."""


class ResumeMismatchError(JobError):
    """Input, model or parameters differ from those of the existing output."""


class TooManyErrorsError(JobError):
    """More records failed than the job allows."""


class BrokenOffError(JobError):
    """Engine, input or output failed midway. Finished records are kept; the same command continues."""


class StoppedEarly(SystemExit):
    """A signal ends the process before a job has begun. Raised on the main thread, possibly within user code."""


def attempted(call: Callable[..., T], *values: object) -> T | BaseException:
    """What foreign code returns, or what it raises: any exception but a signal that ends the process."""
    try:
        return call(*values)
    except StoppedEarly:
        raise
    except BaseException as error:  # noqa: BLE001 - the border to code of users, models and libraries
        return error


def tried(call: Callable[..., T], *values: object) -> T | Exception:
    """What a library's code returns, or the exception that it raises; Ctrl-C goes on."""
    try:
        return call(*values)
    except Exception as error:  # noqa: BLE001 - the border to libraries, whose classes of errors are many, or not documented
        return error


@contextmanager
def raised_as(kind: type[HeadraceError], words: str, way_out: str = "") -> Iterator[None]:
    """Raise what a library raises in the body as an error of this kind: `words: its message; way_out`."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:  # likewise
        raise kind(f"{words}: {line_of(error)}{way_out and '; ' + way_out}") from error


def text_of(error: BaseException) -> str:
    """The error's message, long values shortened, even if its `__str__` raises."""
    try:
        return shortened(str(error))
    except BaseException as other:  # noqa: BLE001 - user code may raise anything; the error must still be reported
        return f"its message cannot be read: {type(other).__name__}"


OUT_OF_THREADS = "the system gives this process no more threads: raise its limit (ulimit -u)"


def is_out_of_threads(error: BaseException) -> bool:
    """Whether the system gives this process no more threads, which is the fault of no record."""
    return isinstance(error, RuntimeError) and "can't start new thread" in text_of(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def model_code() -> Iterator[None]:
    """The body runs a model's code, or a library's on its files, which may raise anything.

    Raises:
        ModelCodeError: it raised an error that is not one of Headrace's own.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:  # the border to models' code
        raise ModelCodeError(first_line(error)) from error


def line_of(error: BaseException) -> str:
    """The error's message as one line of at most 300 characters, or its type if it has none."""
    return " ".join(text_of(error).split())[:300] or type(error).__name__
