"""Starts a new interpreter with a connection to this process.

It is not forked (forking a process with threads may hang) and does not import this process's main module, so scripts
need no `__main__` guard. It runs in its own session, so that only the parent handles Ctrl-C. It ends when the parent
ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NoReturn

from headrace.wording import spoken

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from importlib import import_module; import_module('headrace.wording').speak(sys.argv[4]); "
    "import_module(sys.argv[3]).serve(int(sys.argv[1]))"
)
_LOOK_S = 0.2
"""How often to check that the process lives, in seconds; its own children may keep the connection open."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", which the system also uses when memory runs out",
    signal.SIGALRM: ", which ends a call that takes too long (``engine_timeout_s``)",
}
"""Likely causes of a signal."""


def spawn(module: str, environment: Mapping[str, str] | None = None) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that calls `module.serve(file descriptor)`.

    Args:
        module: full name; its `serve` gets the descriptor of the child's end of the connection.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(theirs.fileno()), json.dumps(sys.path), module, spoken()],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, **environment} if environment else None,
        )
    return process, Connection(ours.detach())


def wait_for_message(process: subprocess.Popen[bytes], connection: Connection, timeout_s: float | None = None) -> bool:
    """Wait until the connection can be read; False on timeout.

    Raises:
        EOFError: the process has ended.
        OSError: the connection is broken.
    """
    ends = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while not connection.poll(max(min(_LOOK_S, ends - time.monotonic()), 0)):
        if process.poll() is not None and not connection.poll(0):
            raise EOFError
        if time.monotonic() >= ends:
            return False
    return True


def exit_text(code: int | None) -> str:
    """How a process ended, in words; `code` is its return code, None while it runs."""
    if code is None:
        return "the process closed its connection"
    if code >= 0:
        return f"the process ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the process was killed by {name}{_HINTS.get(-code, '')}"


def child_connection(fd: int) -> Connection:
    """The child's end of the connection. Ends this process when the other end closes."""
    os.set_inheritable(fd, False)
    poller = select.poll()
    poller.register(fd, 0)  # hang-ups only

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="headrace-parent", daemon=True).start()
    return Connection(fd)


def end_child() -> NoReturn:
    """End this process without waiting for threads of user code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
