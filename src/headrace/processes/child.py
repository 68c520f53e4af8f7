"""A process for one function, which may crash or hang without affecting this process; it is started again as needed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from headrace.errors import EngineDeadError, ProcessTimeoutError, WorkerDiedError
from headrace.processes.link import LinkedProcess
from headrace.processes.portable import pack, pack_request, unpack


class ChildProcess:
    """A process that calls what `make(*arguments)` returns there. Starts on first use; not thread-safe.

    Args:
        make: importable by name; returns a callable `(request) -> list of results`, which may have `facts` and `close`.
        arguments: picklable.

    Raises:
        UnsendableError: an argument cannot be pickled.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self._packed_make = pack_request((make, arguments), "an argument")
        self._process: LinkedProcess | None = None
        self._facts: object = None

    def start(self) -> Any:
        """Start the process if needed; returns the `facts` of the object made there.

        Raises:
            EngineDeadError: the process ended before it was ready.
            Exception: what `make` raised.
        """
        if self._process is None:
            self._process = LinkedProcess(pack_request((_Callee, (self._packed_make,))))
            with ExitStack() as undo:
                undo.callback(self.kill)
                try:
                    self._facts = self._answer(pack_request(("facts", ())))
                except WorkerDiedError as error:
                    raise EngineDeadError(f"{error} before it was ready") from None
                undo.pop_all()
        return self._facts

    def call(self, request: object, timeout_s: float | None = None) -> list[object]:
        """The results for a request; starts the process if needed.

        Raises:
            WorkerDiedError: the process ended during the call.
            UnsendableError: the request cannot be pickled; nothing was sent.
            ProcessTimeoutError: the call took longer than `timeout_s`; the process was killed.
            Exception: what the call or the start of the process raised.
        """
        packed = pack_request(("results", (request,)))
        self.start()
        return unpack(cast("bytes", self._answer(packed, timeout_s)))

    def kill(self) -> None:
        """Kill the process; the next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ask the process to end; kill it if it takes too long. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _answer(self, packed: bytes, timeout_s: float | None = None) -> object:
        assert self._process is not None, "started"
        self._process.send(0, packed)
        try:
            answer = self._process.receive(timeout_s)
        except WorkerDiedError:
            self._process = None
            raise
        if answer is None:
            self.kill()
            raise ProcessTimeoutError(f"there was no result after {timeout_s:g} s, and the process was killed")
        return answer.value()


class _Callee:
    """The function in its process. Its results travel one by one: one that cannot be pickled fails alone."""

    def __init__(self, packed_make: bytes) -> None:
        make, arguments = pickle.loads(packed_make)
        self._function = make(*arguments)

    def facts(self) -> object:
        return getattr(self._function, "facts", None)

    def results(self, request: object) -> bytes:
        return pack(self._function(request))

    def close(self) -> None:
        getattr(self._function, "close", int)()
