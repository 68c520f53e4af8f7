"""A separate process that holds one object and answers several calls at the same time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.errors import WorkerDiedError
from headrace.processes.link import LinkedProcess
from headrace.processes.portable import UnsendableError, pack_request


class ActorProcess:
    """A process that makes an object and calls its methods there. Thread-safe.

    Args:
        make: importable by name; returns an object with async methods.
        arguments: picklable.
        environment, cores: see `LinkedProcess`.

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
        self._process = LinkedProcess(pack_request((make, arguments), "an argument"), environment, cores)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[object]] = {}
        self._numbers = itertools.count()
        self._ended: str | None = None
        self._sender = ThreadPoolExecutor(1, "headrace-actor-send")  # the caller may be an event loop
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
        try:
            packed = pack_request((method, arguments), "an argument")
        except UnsendableError as error:
            future.set_exception(error)
            return future
        with self._lock:
            if self._ended is not None:
                future.set_exception(WorkerDiedError(self._ended))
                return future
            number = next(self._numbers)
            self._calls[number] = future
            self._sender.submit(self._process.send, number, packed)
        return future

    def kill(self) -> None:
        """Kill the process and those it started. Safe to call twice."""
        self._end(self._process.kill())

    def _receive(self) -> None:
        try:
            while (answer := self._process.receive()) is not None:
                with self._lock:
                    future = self._calls.pop(answer.number, None)
                if future is None:
                    continue
                if answer.error is not None:
                    future.set_exception(answer.error)
                else:
                    future.set_result(answer.result)
        except WorkerDiedError as error:
            self._end(str(error))

    def _end(self, how: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = how
            calls, self._calls = self._calls, {}
        self._sender.shutdown(wait=False)
        for future in calls.values():
            future.set_exception(WorkerDiedError(how))
