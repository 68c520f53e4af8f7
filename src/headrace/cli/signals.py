"""Ctrl-C and SIGTERM: the first finishes work in flight, the second ends the process at once."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from headrace.errors import StoppedEarly
from headrace.jobs.pipeline.job import StopRequest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLEARING_UP_S = 10.0
"""Seconds allowed for clean-up before a job has begun, such as a partly loaded engine."""


class Stopper(StopRequest):
    """A stop request that records its signal."""

    grace_s = 10.0
    signal: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's shape
        """Request a stop. The second call ends the process, which is safe: parts are written atomically.

        Raises:
            StoppedEarly: the job has not begun.
        """
        if self.requested:
            os._exit(128 + number)
        self.signal = number
        signal.signal(number, self.handle)
        _handle_once(number)
        if not self.working:
            self.request()
            os.write(2, b"\nheadrace: interrupted before the job began; finished work is kept\n")
            # Ends the process even if user code catches the exception or hangs. Not threading.Thread: the main thread
            # may hold the lock that starting one needs.
            _thread.start_new_thread(_end_in_time, (128 + number,))
            raise StoppedEarly(128 + number)
        # Not print: the signal may have interrupted one.
        os.write(2, b"\nheadrace: stopping: finishing work in flight (Ctrl-C again ends it at once)\n")
        self.request()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stopper]:
    """Turn SIGINT and SIGTERM into a stop request while the body runs. Main thread only."""
    stopper = Stopper()
    before = {number: signal.signal(number, stopper.handle) for number in _SIGNALS}
    for number in _SIGNALS:
        _handle_once(number)
    try:
        yield stopper
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_in_time(status: int) -> None:
    time.sleep(CLEARING_UP_S)
    os._exit(status)


def _handle_once(number: int) -> None:
    """Let Python handle a signal once; the system then ends the process at the next.

    Python runs handlers between bytecodes of the main thread. While that thread is inside a library, or another holds
    the interpreter lock, no handler runs and no number of signals would end the process. Does nothing if the C library
    lacks `sysv_signal`.
    """
    try:
        install = ctypes.CDLL(None).sysv_signal
    except AttributeError:
        return
    install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handler = install(number, 1)  # SIG_IGN: the only way to read the current handler
    install(number, handler)
