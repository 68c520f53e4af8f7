"""One process of its own that answers calls, one after the other; it may crash or hang without harm to this one.

It is started anew from the interpreter, not forked (a fork of a process that has threads may hang), and does not import
the main module of this process, so that a script needs no guard around its main code. It is in a session of its own:
Ctrl-C is for the parent to handle. It ends when the parent does, whatever ended that.
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
"""How often to see whether the process still lives: its end of the connection may be held by children of its own."""
_GRACE_S = 3.0
"""How long a process that is asked to end may take."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", which the system also uses when memory runs out",
    signal.SIGALRM: ", which ends a call that takes too long (--engine-timeout)",
}
"""What a signal most likely means."""


class ChildProcess:
    """A process that calls what `make(*arguments)` returns, made there. Started by its first use; one caller at a time.

    Args:
        make: importable by name; returns a callable `(request) -> list of results`, which may have `facts` and `close`.
        arguments: picklable.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._order = pickle.dumps((make, arguments))
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._facts: Any = None

    def start(self) -> Any:
        """Begin, unless it has begun; returns the `facts` of what was made there.

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
                answer = self._answer(self._order, None)
            except WorkerDiedError as error:
                raise EngineDeadError(f"{error} before it was ready") from None
            if isinstance(answer, Portable):
                self.kill()
                raise answer.unpacked()
            self._facts = answer
        return self._facts

    def call(self, request: Any, timeout_s: float | None = None) -> list[Any]:
        """The results for a request; begins the process if there is none.

        Raises:
            WorkerDiedError: the process ended during the call.
        UnsendableError: the request cannot be pickled; nothing was sent.
            ProcessTimeoutError: the call took longer than `timeout_s`, and the process was killed.
            Exception: what the call raised, or why the process cannot begin.
        """
        packed = pack_request(request)
        self.start()
        answer = self._answer(packed, timeout_s)
        if isinstance(answer, Portable):
            raise answer.unpacked()
        return unpack(answer)

    def kill(self) -> None:
        """End the process at once; the next call begins another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Ask the process to end, and end it if it takes too long. Safe to call twice."""
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
            raise WorkerDiedError(_obituary(code)) from None
        self.kill()
        raise ProcessTimeoutError(f"there was no result after {timeout_s:g} s, and the process was killed")


def _wait(process: subprocess.Popen[bytes], connection: Connection, timeout_s: float | None) -> bool:
    """Wait for an answer; False if the time is over.

    Raises:
        EOFError: the process has ended, and will not answer.
    """
    ends = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while not connection.poll(max(min(_LOOK_S, ends - time.monotonic()), 0)):
        if process.poll() is not None and not connection.poll(0):
            raise EOFError
        if time.monotonic() >= ends:
            return False
    return True


def _obituary(code: int | None) -> str:
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
    """The life of such a process: make what was ordered, then answer."""
    os.set_inheritable(fd, False)
    _end_with_parent(fd)
    connection = Connection(fd)
    answer: Any = None
    try:
        make, arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = make(*arguments)
            told: Any = getattr(answer, "facts", None)
        except BaseException as error:  # noqa: BLE001 - the edge of the process: whoever started it hears why
            told = Portable.of(error)
        connection.send_bytes(pickle.dumps(told))
        while request := connection.recv_bytes():
            connection.send_bytes(pickle.dumps(_called(answer, request), protocol=5))
        getattr(answer, "close", int)()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)  # threads that a user's code has left are not waited for


def _called(answer: Callable[[Any], Any], request: bytes) -> bytes | Portable:
    try:
        return pack(answer(pickle.loads(request)))
    except BaseException as error:  # noqa: BLE001 - as above
        return Portable.of(error)


def _end_with_parent(fd: int) -> None:
    """End this process once the other end of the connection is gone."""
    poller = select.poll()
    poller.register(fd, 0)  # hang-ups alone

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="headrace-parent", daemon=True).start()
