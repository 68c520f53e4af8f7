"""Ctrl-C and SIGTERM: the first finishes what is in flight, the second ends at once."""

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
_CLEARING_UP_S = 10.0
"""How long the end of a job that has not begun may take: an engine has been loaded in part, say."""


class Stopper(StopRequest):
    """A stop request that remembers the signal it came from."""

    grace_s = 10.0
    signal: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's shape
        """Ask to stop; at the second call end the process, which is safe at any moment: parts are whole or absent.

        Raises:
            StoppedEarly: nothing has begun that there would be to finish.
        """
        if self.requested:
            os._exit(128 + number)
        self.signal = number
        signal.signal(number, self.handle)
        _once(number)
        if not self.working:
            self.request()
            os.write(2, b"\nheadrace: interrupted before the job began; what earlier runs have done is kept\n")
            # Should user code catch what is raised, or not come to an end, the process ends all the same. Not a Thread:
            # the main thread may hold the lock that starting one takes.
            _thread.start_new_thread(_end_in_time, (128 + number,))
            raise StoppedEarly(128 + number)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nheadrace: stopping: finishing what is in flight (again to end at once)\n")
        self.request()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stopper]:
    """Turn SIGINT and SIGTERM into a stop request while the body runs. Main thread only."""
    stopper = Stopper()
    before = {number: signal.signal(number, stopper.handle) for number in _SIGNALS}
    for number in _SIGNALS:
        _once(number)
    try:
        yield stopper
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_in_time(status: int) -> None:
    time.sleep(_CLEARING_UP_S)
    os._exit(status)


def _once(number: int) -> None:
    """Let the handler of a signal take one of them; the system itself ends the process at the next.

    Python's handlers run between two steps of the main thread. While that is deep in a library, or another thread holds
    the interpreter's lock (a regular expression that takes for ever, say), they do not run, and no number of signals
    would end the process. Where the C library cannot do this, all stays as it is.
    """
    try:
        install = ctypes.CDLL(None).sysv_signal
    except AttributeError:
        return
    install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handler = install(number, 1)  # SIG_IGN: the only way to learn the present one
    install(number, handler)
