"""One call, tried several times: time limits, waits that grow, plain functions on threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.batching.callables import is_async
from headrace.errors import ProcessError
from headrace.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """How often a call is tried, and how long one try may take."""

    policy: RetryPolicy
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception
    timeout_s: float | None = None
    """Of one try; one that takes longer is cancelled and has failed with TimeoutError."""


class Attempts:
    """Calls `fn` with one item, as often as it takes.

    A coroutine function runs on the event loop. A plain one runs on one of `threads` threads of its own, and what it
    returns is awaited where that can be awaited (a Ray reference, a future).
    """

    def __init__(self, fn: Callable[[Any], Any], settings: AttemptSettings, threads: int) -> None:
        self._fn = fn
        self._settings = settings
        on_loop = is_async(fn)
        self._pool = None if on_loop else ThreadPoolExecutor(threads, "headrace-map")
        once: Callable[[Any], Awaitable[Any]] = fn if on_loop else self._threaded
        if settings.timeout_s is not None:
            once = _limited(once, settings.timeout_s)
        self._once = once

    async def call(self, item: Any) -> Any:
        """The result of the first try that succeeds.

        Raises:
            Exception: that of the last try.
            ProcessError: `fn` cancelled itself.
        """
        policy, attempt = self._settings.policy, 1
        while True:
            try:
                return await self._once(item)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # from outside: nobody wants the result any more
                raise ProcessError("the call was cancelled from within") from error
            except self._settings.retry_on:
                if not policy.allows(attempt):
                    raise
            await asyncio.sleep(policy.wait_s(attempt))
            attempt += 1

    async def _threaded(self, item: Any) -> Any:
        context = contextvars.copy_context()
        result = await asyncio.get_running_loop().run_in_executor(self._pool, context.run, _plain, self._fn, item)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let the threads go, without waiting for what they do."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _plain(fn: Callable[[Any], Any], item: Any) -> Any:
    try:
        return fn(item)
    except StopIteration as error:  # which no future can hold: its waiter would hang
        raise RuntimeError("the call raised StopIteration") from error


def _limited(once: Callable[[Any], Awaitable[Any]], timeout_s: float) -> Callable[[Any], Awaitable[Any]]:
    async def limited(item: Any) -> Any:
        async with asyncio.timeout(timeout_s):
            return await once(item)

    return limited
