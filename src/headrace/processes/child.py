"""A separate process that answers one call at a time; it may crash or hang without affecting this one.

It starts a new interpreter instead of forking (forking a process with threads may hang) and does not import this
process's main module, so scripts need no `__main__` guard. It runs in its own session, so that only the parent handles
Ctrl-C. It ends when the parent ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from headrace.errors import EngineDeadError, ProcessTimeoutError, WorkerDiedError
from headrace.processes.portable import Portable, pack, pack_request, unpack

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from headrace.processes.child import serve; serve(int(sys.argv[1]))"
)
_LOOK_S = 0.2
"""How often to check that the process lives, in seconds; its own children may keep the connection open."""
_GRACE_S = 3.0
"""How long to wait for a process that was asked to end, in seconds."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", which the system also uses when memory runs out",
    signal.SIGALRM: ", which ends a call that takes too long (--engine-timeout)",
}
"""Likely causes of a signal."""


class ChildProcess:
    """A process that calls what `make(*arguments)` returns there. Starts on first use; not thread-safe.

    Args:
        make: importable by name; returns a callable `(request) -> list of results`, which may have `facts` and `close`.
        arguments: picklable.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self._packed_make = pickle.dumps((make, arguments))
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._facts: Any = None

    def start(self) -> Any:
        """Start the process if needed; returns the `facts` of the object made there.

        Raises:
            EngineDeadError: the process ended before it was ready.
            Exception: what `make` raised.
        """
        if self._process is None:
            ours, theirs = socket.socketpair()
            with theirs:
                fd = str(theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, fd, json.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            self._connection = Connection(ours.detach())
            try:
                answer = self._answer(self._packed_make, None)
            except WorkerDiedError as error:
                raise EngineDeadError(f"{error} before it was ready") from None
            if isinstance(answer, Portable):
                self.kill()
                raise answer.unpacked()
            self._facts = answer
        return self._facts

    def call(self, request: object, timeout_s: float | None = None) -> list[Any]:
        """The results for a request; starts the process if needed.

        Raises:
            WorkerDiedError: the process ended during the call.
            UnsendableError: the request cannot be pickled; nothing was sent.
            ProcessTimeoutError: the call took longer than `timeout_s`; the process was killed.
            Exception: what the call or the start of the process raised.
        """
        packed = pack_request(request)
        self.start()
        answer = self._answer(packed, timeout_s)
        if isinstance(answer, Portable):
            raise answer.unpacked()
        return unpack(answer)

    def kill(self) -> None:
        """Kill the process; the next call starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Ask the process to end; kill it if it takes too long. Safe to call twice."""
        if self._process is not None and self._connection is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send_bytes(b"")
                self._process.wait(_GRACE_S)
        self.kill()

    def _answer(self, packed: bytes, timeout_s: float | None) -> Any:
        process, connection = self._process, self._connection
        assert process is not None and connection is not None, "started"
        try:
            connection.send_bytes(packed)
            answered = _wait(process, connection, timeout_s)
            if answered:
                return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            code = process.poll()
            self.kill()
            raise WorkerDiedError(_exit_text(code)) from None
        self.kill()
        raise ProcessTimeoutError(f"there was no result after {timeout_s:g} s, and the process was killed")


def _wait(process: subprocess.Popen[bytes], connection: Connection, timeout_s: float | None) -> bool:
    """Wait for an answer; False on timeout.

    Raises:
        EOFError: the process has ended.
    """
    ends = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while not connection.poll(max(min(_LOOK_S, ends - time.monotonic()), 0)):
        if process.poll() is not None and not connection.poll(0):
            raise EOFError
        if time.monotonic() >= ends:
            return False
    return True


def _exit_text(code: int | None) -> str:
    if code is None:
        return "the process closed its connection"
    if code >= 0:
        return f"the process ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the process was killed by {name}{_HINTS.get(-code, '')}"


def serve(fd: int) -> NoReturn:
    """The child's main function: make the object, then answer calls."""
    os.set_inheritable(fd, False)
    _end_with_parent(fd)
    connection = Connection(fd)
    answer: Any = None
    try:
        make, arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = make(*arguments)
            outcome: object = getattr(answer, "facts", None)
        except BaseException as error:  # noqa: BLE001 - process boundary: the parent receives the error
            outcome = Portable.of(error)
        connection.send_bytes(pickle.dumps(outcome))
        while request := connection.recv_bytes():
            connection.send_bytes(pickle.dumps(_called(answer, request), protocol=5))
        getattr(answer, "close", int)()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)  # do not wait for threads of user code


def _called(answer: Callable[[Any], Any], request: bytes) -> bytes | Portable:
    try:
        return pack(answer(pickle.loads(request)))
    except BaseException as error:  # noqa: BLE001 - as above
        return Portable.of(error)


def _end_with_parent(fd: int) -> None:
    """End this process when the other end of the connection closes."""
    poller = select.poll()
    poller.register(fd, 0)  # hang-ups only

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="headrace-parent", daemon=True).start()
