"""A separate process that holds one object and answers several calls at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from headrace.errors import BadResultError, WorkerDiedError
from headrace.processes.portable import Portable, UnsendableError, pack_request
from headrace.processes.spawn import child_connection, end_child, exit_text, spawn, wait_for_message

_GRACE_S = 3.0
"""Seconds to wait for the exit status of a process that closed its connection."""


class ActorProcess:
    """A process that makes an object and awaits its methods there. Thread-safe.

    Args:
        make: importable by name; returns an object with async methods.
        arguments: picklable.
        environment: variables for the process, added to those of this one.
        cores: the CPU cores that the process may use; None for all. Ignored where the system cannot set them.

    Raises:
        UnsendableError: an argument cannot be pickled.
    """

    def __init__(
        self,
        make: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        cores: Iterable[int] | None = None,
    ) -> None:
        first = pack_request((make, arguments), "an argument")
        self._lock = threading.Lock()
        self._calls: dict[int, Future[object]] = {}
        self._numbers = itertools.count()
        self._ended: str | None = None
        self._process, self._connection = spawn("headrace.processes.actor", environment)
        if cores is not None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # it may have ended already
                os.sched_setaffinity(self._process.pid, cores)
        self._sender = ThreadPoolExecutor(1, "headrace-actor-send")  # the caller may be an event loop
        self._sender.submit(self._send, first)
        threading.Thread(target=self._receive, name="headrace-actor", daemon=True).start()

    @property
    def ended(self) -> str | None:
        """How the process ended; None while it runs."""
        return self._ended

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Call a method of the object there.

        The future may fail with:
            WorkerDiedError: the process ended before it answered.
            UnsendableError: an argument cannot be pickled.
            Exception: what the method raised.
        """
        future: Future[object] = Future()
        future.set_running_or_notify_cancel()  # the answer comes, whether or not someone still waits
        number = next(self._numbers)
        with self._lock:
            if self._ended is None:
                self._calls[number] = future
            else:
                future.set_exception(WorkerDiedError(self._ended))
        try:
            self._sender.submit(self._send, pack_request((number, method, arguments), "an argument"))
        except UnsendableError as error:
            self._settle(number, None, error)
        except RuntimeError:
            pass  # the process has ended, and the future has failed
        return future

    def kill(self) -> None:
        """Kill the process and those it started. Safe to call twice."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session
            self._process.wait()
        self._end()

    def _send(self, packed: bytes) -> None:
        with contextlib.suppress(OSError):  # the receiver reports that the process has ended
            self._connection.send_bytes(packed)

    def _receive(self) -> None:
        try:
            while True:
                wait_for_message(self._process, self._connection)
                number, failed, packed = pickle.loads(self._connection.recv_bytes())
                self._settle(number, *_unpacked(packed, failed))
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
            self.kill()
        finally:
            self._connection.close()

    def _settle(self, number: int, result: object, error: Exception | None = None) -> None:
        with self._lock:
            future = self._calls.pop(number, None)
        if future is not None and error is not None:
            future.set_exception(error)
        elif future is not None:
            future.set_result(result)

    def _end(self) -> None:
        """Fail the calls without an answer."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = exit_text(self._process.poll())
            calls, self._calls = self._calls, {}
        self._sender.shutdown(wait=False)
        for future in calls.values():
            future.set_exception(WorkerDiedError(self._ended))


def _unpacked(packed: bytes, failed: bool) -> tuple[object, Exception | None]:
    try:
        outcome = pickle.loads(packed)
    except Exception as error:  # noqa: BLE001 - a class of the outcome may be missing here: only its call fails
        return None, BadResultError(f"the answer of the process cannot be unpickled: {error}")
    return (None, outcome.unpacked()) if failed else (outcome, None)


def serve(fd: int) -> NoReturn:
    """The child's main function: make the object, then answer calls."""
    try:
        asyncio.run(_answer_calls(child_connection(fd)))
    finally:
        end_child()


async def _answer_calls(connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[bytes | None] = asyncio.Queue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(requests.put_nowait, connection.recv_bytes())
        loop.call_soon_threadsafe(requests.put_nowait, None)

    threading.Thread(target=receive, name="headrace-requests", daemon=True).start()
    sender = ThreadPoolExecutor(1, "headrace-answers")
    target: object = None
    running: set[asyncio.Task[None]] = set()
    while (request := await requests.get()) is not None:
        if target is None:
            target = _made(request)
            continue
        task = loop.create_task(_answer(target, request, connection, sender))
        running.add(task)
        task.add_done_callback(running.discard)


def _made(request: bytes) -> object:
    try:
        make, arguments = pickle.loads(request)
        return make(*arguments)
    except BaseException as error:  # noqa: BLE001 - process boundary: each call receives the error
        return Portable.of(error)


async def _answer(target: object, request: bytes, connection: Connection, sender: ThreadPoolExecutor) -> None:
    number, method, arguments = pickle.loads(request)
    failed = isinstance(target, Portable)
    try:
        outcome = target if failed else await getattr(target, method)(*arguments)
        packed = pickle.dumps(outcome, protocol=5)
    except BaseException as error:  # noqa: BLE001 - process boundary: the caller receives the error
        failed, packed = True, pickle.dumps(Portable.of(error), protocol=5)
    message = pickle.dumps((number, failed, packed), protocol=5)
    with contextlib.suppress(OSError):  # the parent is gone, and so is this process soon
        await asyncio.get_running_loop().run_in_executor(sender, connection.send_bytes, message)
