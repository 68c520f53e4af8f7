"""An event loop on a thread of its own: for one coroutine, or (`LoopThread`) for many."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_on_thread(
    main: Coroutine[Any, Any, object], name: str, context: contextvars.Context | None = None
) -> threading.Thread:
    """Run a coroutine on an event loop of its own, on a daemon thread that ends with it.

    Args:
        main: the coroutine.
        name: of the thread.
        context: what the coroutine sees; a copy of the caller's by default.
    """
    run = (context or contextvars.copy_context()).run
    thread = threading.Thread(target=run, args=(asyncio.run, main), name=name, daemon=True)
    thread.start()
    return thread


class LoopThread:
    """An event loop on a daemon thread, in the context of whoever creates it.

    For what belongs to one loop (connections, an engine's tasks) while its callers come and go with loops of their
    own or have none. Every method may be called from any thread but the loop's own.
    """

    def __init__(self, name: str) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        self._thread = run_on_thread(self._serve(started), name)
        self._loop = started.result()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        self._serving = asyncio.current_task()
        started.set_result(asyncio.get_running_loop())
        await self._closing.wait()

    def submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine there. To cancel its future is to cancel the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine there, and wait for its result here."""
        return self.submit(coroutine).result()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function there."""
        self._loop.call_soon_threadsafe(callback)

    def cancel_all(self) -> None:
        """Ask everything that runs there to end, and do not wait for it."""
        self.call_soon(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks() - {self._serving}:
            task.cancel()

    def close(self) -> None:
        """Cancel what still runs there, then end the loop and its thread. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
