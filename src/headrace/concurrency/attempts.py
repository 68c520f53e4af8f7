"""One call, tried several times: time limits, waits that grow, plain functions on threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.batching.callables import is_async
from headrace.errors import ProcessError

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call that failed is tried again, and how long one try may take."""

    retries: int = 0
    """Further tries after the first."""
    backoff_s: float = 0.5
    """The n-th wait is drawn from 0 to this × 2ⁿ⁻¹ seconds, at most 60: "full jitter"."""
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception
    timeout_s: float | None = None
    """Of one try; one that takes longer is cancelled and has failed with TimeoutError."""


class Attempts:
    """Calls `fn` with one item, as often as it takes.

    A coroutine function runs on the event loop. A plain one runs on one of `threads` threads of its own, and what it
    returns is awaited where that can be awaited (a Ray reference, a future).
    """

    def __init__(self, fn: Callable[[Any], Any], patience: RetryPolicy, threads: int) -> None:
        self._fn = fn
        self._patience = patience
        on_loop = is_async(fn)
        self._pool = None if on_loop else ThreadPoolExecutor(threads, "headrace-map")
        once: Callable[[Any], Awaitable[Any]] = fn if on_loop else self._threaded
        if patience.timeout_s is not None:
            once = _limited(once, patience.timeout_s)
        self._once = once

    async def call(self, item: Any) -> Any:
        """The result of the first try that succeeds.

        Raises:
            Exception: that of the last try.
            ProcessError: `fn` cancelled itself.
        """
        attempt = 1
        while True:
            try:
                return await self._once(item)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # from outside: nobody wants the result any more
                raise ProcessError("the call was cancelled from within") from error
            except self._patience.retry_on:
                if attempt > self._patience.retries:
                    raise
            ceiling = min(self._patience.backoff_s * 2.0 ** (attempt - 1), LONGEST_WAIT_S)
            await asyncio.sleep(random.uniform(0.0, ceiling))
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
