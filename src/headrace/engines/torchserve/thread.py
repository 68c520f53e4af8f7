"""The thread that a TorchServe handler lives in, and the time its calls may take."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.errors import EngineDeadError

T = TypeVar("T")


class HandlerThread:
    """Runs a handler's calls one after the other on one thread, as a TorchServe worker does; each has a time limit.

    What a handler opens when it is initialized may belong to its thread, such as a SQLite connection. The thread is a
    daemon: a call that never returns keeps neither its caller nor the process waiting.

    Args:
        name: the handler's, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._dead = ""
        threading.Thread(target=self._work, name=f"headrace-handler-{name}", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_s: float, limit: str) -> T:
        """What `function` returns or raises, whatever that is.

        Args:
            function: called on the thread.
            timeout_s: how long it may take.
            limit: the setting that the time limit comes from.

        Raises:
            EngineDeadError: it takes longer, or an earlier call did.
        """
        if self._dead:
            raise EngineDeadError(self._dead)
        future: Future[T] = Future()
        self._calls.put((function, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the handler's own
                raise
            self._dead = (
                f"handler {self._name} has not returned within {timeout_s:g} s: it hangs, or is slow; if it is only "
                f"slow, raise {limit} in its model-config.yaml"
            )
            raise EngineDeadError(self._dead) from None

    def close(self) -> None:
        """End the thread once its call returns; does not wait."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller's to bear, who may have gone; the thread lives on
                future.set_exception(error)
            del call, function, future  # an idle thread holds on to no batch
