"""The running task, and exceptions meant for the task rather than for the code it runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

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
