"""End the process soon after the work is done, even if user code has left threads or processes running."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable

_THREADS_S = 5.0
"""Seconds allowed for non-daemon threads to end; Python would wait without limit."""
_EXIT_FUNCTIONS_S = 10.0
"""Seconds allowed for `atexit` functions, which wait for child processes."""


def exit_in_time(status: str | int | None) -> None:
    """Make the process end within some seconds. Call this last in the main thread."""
    code = status if isinstance(status, int) else int(status is not None)
    threads_ended = threading.Event()
    atexit.register(threads_ended.set)  # the last one registered runs first
    threading.Thread(target=_watch, args=(threads_ended, code), name="headrace-leaving", daemon=True).start()


def _watch(threads_ended: threading.Event, code: int) -> None:
    if threads_ended.wait(_THREADS_S):
        time.sleep(_EXIT_FUNCTIONS_S)  # the process nearly always ends meanwhile
    else:
        threads = [one for one in threading.enumerate() if not (one.daemon or one is threading.main_thread())]
        _report("thread", [one.name for one in threads])
        # In a thread: they may hang too.
        exits = threading.Thread(target=atexit._run_exitfuncs, name="headrace-exit", daemon=True)
        exits.start()
        exits.join(_EXIT_FUNCTIONS_S)
    children = multiprocessing.active_children()
    if children:
        _report("process", [one.name for one in children])
    for child in children:
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or missing
            pass
    os._exit(code)


def _report(kind: str, names: Iterable[str]) -> None:
    named = ", ".join(names) or "of an executor"
    print(f"headrace: exiting while a {kind} of user code ({named}) still runs", file=sys.stderr)
