"""A separate process that answers one call at a time; it may crash or hang without affecting this one.

`spawn` says how it is started and how it ends.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from headrace.errors import EngineDeadError, ProcessTimeoutError, WorkerDiedError
from headrace.processes.portable import Portable, pack, pack_request, unpack
from headrace.processes.spawn import child_connection, end_child, exit_text, spawn, wait_for_message

_GRACE_S = 3.0
"""How long to wait for a process that was asked to end, in seconds."""


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
        self._facts: object = None

    def start(self) -> Any:
        """Start the process if needed; returns the `facts` of the object made there.

        Raises:
            EngineDeadError: the process ended before it was ready.
            Exception: what `make` raised.
        """
        if self._process is None:
            self._process, self._connection = spawn("headrace.processes.child")
            try:
                answer = self._answer(self._packed_make, None)
            except WorkerDiedError as error:
                raise EngineDeadError(f"{error} before it was ready") from None
            if isinstance(answer, Portable):
                self.kill()
                raise answer.unpacked()
            self._facts = answer
        return self._facts

    def call(self, request: object, timeout_s: float | None = None) -> list[object]:
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
            answered = wait_for_message(process, connection, timeout_s)
            if answered:
                return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            code = process.poll()
            self.kill()
            raise WorkerDiedError(exit_text(code)) from None
        self.kill()
        raise ProcessTimeoutError(f"there was no result after {timeout_s:g} s, and the process was killed")


def serve(fd: int) -> NoReturn:
    """The child's main function: make the object, then answer calls."""
    connection = child_connection(fd)
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
        end_child()


def _called(answer: Callable[[Any], Any], request: bytes) -> bytes | Portable:
    try:
        return pack(answer(pickle.loads(request)))
    except BaseException as error:  # noqa: BLE001 - as above
        return Portable.of(error)
