"""Blocking calls on threads of their own: one that hangs delays no other call, and the exit by a few seconds only."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.batching.foreign_calls import Raised, attempt
from headrace.errors import ProcessError, text_of

ResultT = TypeVar("ResultT")

_NAME = "headrace-model"
_LAST_CALLS_S = 10.0
"""Seconds that calls may take to end at Python's exit: native code that runs on may abort the process."""


async def on_daemon_thread(call: Callable[[], ResultT], too_late: Callable[[ResultT], object] | None = None) -> ResultT:
    """The result of a call on a new daemon thread, in the caller's context.

    Args:
        too_late: called on a thread with the result, if nobody waits for it any more.

    Raises:
        Exception: what the call raised, as `as_exception` has it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def settle(answer: ResultT | Raised) -> None:
        if not done.done():
            if isinstance(answer, Raised):
                done.set_exception(as_exception(answer.cause))
            else:
                done.set_result(answer)
        elif too_late is not None and not isinstance(answer, Raised):
            threading.Thread(target=too_late, args=(answer,), name=_NAME, daemon=True).start()

    def run() -> None:
        answer = attempt(call)
        try:
            loop.call_soon_threadsafe(settle, answer)
        except RuntimeError:  # the loop is closed
            if too_late is not None and not isinstance(answer, Raised):
                too_late(answer)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=_NAME, daemon=True).start()
    return await done


def as_exception(error: BaseException) -> Exception:
    """The error, or one with its name and text where a future or a task would not pass it on."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ProcessError(f"{type(error).__name__}: {text_of(error)}")


@atexit.register
def _wait_for_calls() -> None:
    ends = time.monotonic() + _LAST_CALLS_S
    for thread in threading.enumerate():
        if thread.name == _NAME and thread is not threading.current_thread():
            thread.join(max(0.0, ends - time.monotonic()))
