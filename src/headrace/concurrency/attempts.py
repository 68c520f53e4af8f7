"""Calls with retries, time limits and backoff; plain functions run on threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.batching.callables import is_async
from headrace.batching.results import own
from headrace.errors import ProcessError
from headrace.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """How often to try a call, and how long each attempt may take."""

    policy: RetryPolicy
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception
    timeout_s: float | None = None
    """Time limit of one attempt; a slower one is cancelled and fails with TimeoutError."""


class Attempts:
    """Calls `fn` with one item, with retries.

    A coroutine function runs on the event loop. A plain function runs on a pool of `threads` threads; an awaitable that
    it returns (a Ray reference, a future) is awaited.
    """

    def __init__(self, fn: Callable[[Any], Any], settings: AttemptSettings, threads: int) -> None:
        self._fn = fn
        self._settings = settings
        on_loop = is_async(fn)
        self._pool = None if on_loop else ThreadPoolExecutor(threads, "headrace-map")
        once: Callable[[object], Awaitable[object]] = self._awaited if on_loop else self._threaded
        if settings.timeout_s is not None:
            once = _limited(once, settings.timeout_s)
        self._once = once

    async def call(self, item: object) -> object:
        """The result of the first successful attempt.

        Raises:
            Exception: raised by the last attempt.
            ProcessError: `fn` cancelled itself.
        """
        policy, attempt = self._settings.policy, 1
        while True:
            try:
                return await self._once(item)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # this task was cancelled
                raise ProcessError("the call raised CancelledError although it was not cancelled") from error
            except self._settings.retry_on:
                if not policy.allows(attempt):
                    raise
            await asyncio.sleep(policy.wait_s(attempt))
            attempt += 1

    async def _awaited(self, item: object) -> object:
        return own(await self._fn(item))

    async def _threaded(self, item: object) -> object:
        context = contextvars.copy_context()
        result = await asyncio.get_running_loop().run_in_executor(self._pool, context.run, _plain, self._fn, item)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Shut down the threads without waiting for running calls."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _plain(fn: Callable[[object], object], item: object) -> object:
    try:
        return own(fn(item))  # before the function can fill the same object again
    except StopIteration as error:  # a future cannot hold it, so its caller would hang
        raise RuntimeError("the call raised StopIteration") from error


def _limited(once: Callable[[object], Awaitable[object]], timeout_s: float) -> Callable[[object], Awaitable[object]]:
    async def limited(item: object) -> object:
        async with asyncio.timeout(timeout_s):
            return await once(item)

    return limited
