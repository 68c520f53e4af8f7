"""The thread that runs a TorchServe handler, with a time limit per call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.errors import EngineDeadError, attempted

T = TypeVar("T")


class HandlerThread:
    """Runs a handler's calls in sequence on one thread, as a TorchServe worker does, each with a time limit.

    Resources that a handler opens, such as a SQLite connection, may be bound to its thread. The thread is a daemon: a
    call that never returns blocks neither its caller nor the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._dead = ""
        threading.Thread(target=self._work, name=f"headrace-handler-{name}", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_s: float, limit: str) -> T:
        """Call `function` on the thread; returns or raises what it does.

        Raises:
            EngineDeadError: this call or an earlier one exceeded its time limit.
        """
        if self._dead:
            raise EngineDeadError(self._dead)
        future: Future[T] = Future()
        self._calls.put((function, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the handler raised it
                raise
            self._dead = (
                f"handler {self._name} has not returned within {timeout_s:g} s; if it is slow but does not hang, raise "
                f"{limit} in its model-config.yaml"
            )
            raise EngineDeadError(self._dead) from None

    def close(self) -> None:
        """End the thread after its current call. Does not wait."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            outcome = attempted(function)
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
            del call, function, future, outcome  # an idle thread must not keep a batch alive
