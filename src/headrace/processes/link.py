"""A process that holds one object, and both ends of the connection to it.

The parent sends the pickled `(make, arguments)`, then calls: a number and the pickled `(method, arguments)`. An answer
is the number, whether the call failed, and the pickled result or error. An empty message ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import struct
import subprocess
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from headrace.batching.foreign_calls import Raised, attempt, attempt_async
from headrace.errors import BadResultError, WorkerDiedError, text_of
from headrace.processes.portable import Portable
from headrace.processes.spawn import child_connection, end_child, exit_text, spawn, wait_for_message

_HEAD = struct.Struct("!q?")
"""Begins a message: the number of the call, and whether it failed."""
_GRACE_S = 3.0
"""Seconds for a process to end that was asked to, or that closed its connection."""


class CallOutcome(NamedTuple):
    """The answer to a call."""

    number: int
    result: object
    error: Exception | None

    def value(self) -> object:
        """The result; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.result


class LinkedProcess:
    """A process that holds an object, seen from its parent.

    If the object has async methods, several calls run at the same time on an event loop; otherwise one at a time, on
    the main thread. One thread at a time may send, and one receive.

    Args:
        packed_make: the pickled `(make, arguments)`; `make` returns the object.
        environment: variables for the process, added to those of this one.
        cores: the CPU cores that the process may use; None for all. Ignored where the system cannot set them.
    """

    def __init__(
        self, packed_make: bytes, environment: Mapping[str, str] | None = None, cores: Iterable[int] | None = None
    ) -> None:
        self._first: tuple[bytes, ...] = (packed_make,)
        self._process, self._connection = spawn("headrace.processes.link", environment)
        if cores is not None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # it may have ended already
                os.sched_setaffinity(self._process.pid, cores)

    def begin(self) -> None:
        """Let the process make its object now, not at the first call."""
        self._send()

    def send(self, number: int, packed: bytes) -> None:
        """Send a call: its number, and the pickled `(method, arguments)`. Blocks until the process reads it."""
        self._send(_HEAD.pack(number, False) + packed)

    def _send(self, *messages: bytes) -> None:
        first, self._first = self._first, ()
        with contextlib.suppress(OSError):  # `receive` reports that the process has ended
            for message in (*first, *messages):
                self._connection.send_bytes(message)

    def receive(self, timeout_s: float | None = None) -> CallOutcome | None:
        """The next answer; None on timeout. Raises WorkerDiedError: the process has ended."""
        try:
            if not wait_for_message(self._process, self._connection, timeout_s):
                return None
            message = memoryview(self._connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
            ended = exit_text(self._process.poll())
            self.kill()
            self._connection.close()
            raise WorkerDiedError(ended) from None
        number, failed = _HEAD.unpack_from(message)
        outcome = attempt(pickle.loads, message[_HEAD.size :])
        if isinstance(outcome, Raised):  # a class of it may be missing here: only its call fails
            words = f"the answer of the process cannot be unpickled: {text_of(outcome.cause)}"
            return CallOutcome(number, None, BadResultError(words))
        return CallOutcome(number, None, outcome.unpacked()) if failed else CallOutcome(number, outcome, None)

    def close(self) -> None:
        """Ask the process to call the object's `close` and end; kill it if it takes too long. Safe to call twice."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._connection.send_bytes(b"")
            self._process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> str:
        """Kill the process and those it started; returns how it ended. Safe to call twice, and during `receive`."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session
            self._process.wait()
        return exit_text(self._process.poll())


def serve(fd: int) -> NoReturn:
    """The child's main function: make the object, then answer calls."""
    try:
        connection = child_connection(fd)
        target = attempt(_made, connection.recv_bytes())
        if any(inspect.iscoroutinefunction(method) for _, method in inspect.getmembers(type(target))):
            asyncio.run(_answer_at_once(target, connection))
        else:
            while request := connection.recv_bytes():
                connection.send_bytes(_message(request, attempt(_called, target, request)))
            getattr(target, "close", int)()
    finally:
        end_child()


async def _answer_at_once(target: object, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[bytes] = asyncio.Queue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(requests.put_nowait, connection.recv_bytes())
        loop.call_soon_threadsafe(requests.put_nowait, b"")

    async def answer(request: bytes) -> None:
        outcome = attempt(_called, target, request)
        if inspect.isawaitable(outcome):
            outcome = await attempt_async(outcome)
        with contextlib.suppress(OSError):  # the parent is gone, and so is this process soon
            await loop.run_in_executor(sender, connection.send_bytes, _message(request, outcome))

    threading.Thread(target=receive, name="headrace-requests", daemon=True).start()
    sender = ThreadPoolExecutor(1, "headrace-answers")
    running: set[asyncio.Task[None]] = set()
    while request := await requests.get():
        task = loop.create_task(answer(request))
        running.add(task)
        task.add_done_callback(running.discard)


def _made(request: bytes) -> object:
    """The object; raises whatever the user's code does."""
    make, arguments = pickle.loads(request)
    return make(*arguments)


def _called(target: object, request: bytes) -> object:
    """What the method returned. Each call of an object that could not be made raises why."""
    if isinstance(target, Raised):
        raise target.cause
    method, arguments = pickle.loads(memoryview(request)[_HEAD.size :])
    return getattr(target, method)(*arguments)


def _message(request: bytes, outcome: object) -> bytes:
    """The answer to a request; `outcome` is what its method returned, or `Raised`."""
    number, _ = _HEAD.unpack_from(request)
    packed = outcome if isinstance(outcome, Raised) else attempt(pickle.dumps, outcome, protocol=5)
    if isinstance(packed, Raised):
        return _HEAD.pack(number, True) + pickle.dumps(Portable.of(packed.cause), protocol=5)
    return _HEAD.pack(number, False) + packed
