"""Event loops on separate threads: for one coroutine, or (`LoopThread`) for many."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def run_on_thread(
    main: Coroutine[object, None, object], name: str, context: contextvars.Context | None = None
) -> threading.Thread:
    """Run a coroutine on a new event loop in a daemon thread that ends with it.

    Args:
        context: the coroutine's context variables; a copy of the caller's by default.
    """
    run = (context or contextvars.copy_context()).run
    thread = threading.Thread(target=run, args=(asyncio.run, main), name=name, daemon=True)
    thread.start()
    return thread


class LoopThread:
    """An event loop on a daemon thread, in the creator's context.

    For objects bound to one loop (connections, an engine's tasks) whose callers run on other loops or on none. Call its
    methods from any thread except the loop's.
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

    def submit(self, coroutine: Coroutine[object, None, ResultT]) -> Future[ResultT]:
        """Run a coroutine on the loop. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[object, None, ResultT]) -> ResultT:
        """Run a coroutine on the loop and wait for its result."""
        return self.submit(coroutine).result()

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(callback)

    def cancel_all(self) -> None:
        """Cancel all tasks of the loop without waiting for them."""
        self.call_soon(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks() - {self._serving}:
            task.cancel()

    def close(self) -> None:
        """Cancel the remaining tasks, then end the loop and its thread. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
