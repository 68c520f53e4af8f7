"""The running task: which one it is, and what is meant for it rather than for the code that it runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

current_task: Callable[[Any], Any] = (
    asyncio.current_task if sys.version_info >= (3, 12) else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]
)
"""`asyncio.current_task` without its price on Python 3.11, where it is not yet written in C."""


def ends_the_task(exc: BaseException) -> bool:
    """Whether `exc`, caught around a user's code, comes from outside of that code and must go on.

    That is a cancellation of the task, the closing of a coroutine whose loop is gone, or the signal of Ctrl-C. The same
    exceptions raised by the user's code itself are failures of that code. asyncio's handler of SIGINT is a Python
    function, so its frame is the last of the traceback; a `raise KeyboardInterrupt` in user code has another.
    """
    if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here any more
            return True
        return task is None or (isinstance(exc, asyncio.CancelledError) and task.cancelling() > 0)
    if not isinstance(exc, KeyboardInterrupt):
        return False
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is asyncio.Runner._on_sigint.__code__  # type: ignore[attr-defined]
