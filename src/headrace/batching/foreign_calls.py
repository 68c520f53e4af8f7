"""The running task, and the border to foreign code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from headrace.errors import ProcessError, text_of

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

current_task: Callable[[asyncio.AbstractEventLoop], asyncio.Task[object] | None] = (
    asyncio.current_task if sys.version_info >= (3, 12) else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]
)
"""A faster `asyncio.current_task` for Python 3.11, where it is not yet written in C."""


def must_propagate(exc: BaseException) -> bool:
    """Whether `exc`, caught around user code, comes from outside that code and must be re-raised.

    True for a cancellation of the task, the closing of a coroutine whose loop is gone, and Ctrl-C. The same exceptions
    raised by user code are failures of that code. asyncio handles SIGINT in a Python function, so for Ctrl-C its frame
    is the last of the traceback; for a `raise KeyboardInterrupt` in user code it is not.
    """
    if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no running loop
            return True
        return task is None or (isinstance(exc, asyncio.CancelledError) and task.cancelling() > 0)
    if not isinstance(exc, KeyboardInterrupt):
        return False
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is asyncio.Runner._on_sigint.__code__  # type: ignore[attr-defined]


class Raised:
    """An exception as a value."""

    __slots__ = ("cause",)

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


def attempt(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | Raised:
    """Call foreign code, which may raise anything; what it raises becomes a value."""
    try:
        return fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the border to foreign code
        return Raised(error)


async def attempt_async(awaitable: Awaitable[R]) -> R | Raised:
    """`attempt` for an awaitable; raises what is meant for this task."""
    try:
        return await awaitable
    except BaseException as error:
        if must_propagate(error):
            raise
        return Raised(error)


class Foreign:
    """Code of the user's in a `with` block.

    Raises:
        ProcessError: it raised what is no failure to Python, such as SystemExit; the message says `name`.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or must_propagate(error):
            return
        if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a coroutine cannot raise it
            raise ProcessError(f"{self._name} raised {type(error).__name__}: {text_of(error)}") from error


def called(name: str, fn: Callable[[T], R], value: T) -> R:
    """Call the function with the value; see `Foreign`."""
    with Foreign(name):
        return fn(value)
