"""`map_concurrent`: calls one function for many items with bounded concurrency."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Generic, TypeAlias, TypeVar

from headrace.batching.callables import is_async
from headrace.batching.foreign_calls import Raised
from headrace.batching.options import function, number, optional, whole
from headrace.batching.results import own
from headrace.concurrency.loop_thread import LoopThread
from headrace.errors import ConfigError, ProcessError
from headrace.retry import RetryPolicy
from headrace.tracebacks import Tidied, public

ErrorKinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]


class Attempts:
    """Calls `fn` with one item, with retries.

    A coroutine function runs on the event loop. A plain function runs on a pool of `threads` threads; an awaitable that
    it returns (a Ray reference, a future) is awaited. An attempt that takes longer than `timeout_s` is cancelled and
    fails with TimeoutError.
    """

    def __init__(
        self, fn: Callable[[Any], Any], policy: RetryPolicy, retry_on: ErrorKinds, timeout_s: float | None, threads: int
    ) -> None:
        self._fn = fn
        self._policy, self._retry_on = policy, retry_on
        on_loop = is_async(fn)
        self._pool = None if on_loop else ThreadPoolExecutor(threads, "headrace-map")
        once: Callable[[object], Awaitable[object]] = self._awaited if on_loop else self._threaded
        if timeout_s is not None:
            once = _limited(once, timeout_s)
        self._once = once

    async def call(self, item: object) -> object:
        """The result of the first successful attempt.

        Raises:
            Exception: raised by the last attempt.
            ProcessError: `fn` cancelled itself.
        """
        policy, attempt = self._policy, 1
        while True:
            try:
                return await self._once(item)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # this task was cancelled
                raise ProcessError("the call raised CancelledError although it was not cancelled") from error
            except self._retry_on:
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


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_END = object()


@public
def map_concurrent(  # noqa: PLR0913 - keyword-only settings, each one a line in the caller's code
    fn: Callable[[ItemT], Awaitable[ResultT] | ResultT],
    items: Iterable[ItemT] | AsyncIterable[ItemT],
    *,
    concurrency: int = 10,
    retries: int = 0,
    backoff_s: float = 0.5,
    retry_on: ErrorKinds = Exception,
    timeout_s: float | None = None,
    ordered: bool = True,
    return_exceptions: bool = False,
    look_ahead: int | None = None,
) -> FanOut[ResultT]:
    """Call `fn` for each item, `concurrency` calls at a time; use `async for`, `await` (a list) or plain `for`.

        async for page in headrace.map_concurrent(fetch, urls, concurrency=20, retries=5): ...
        pages = await headrace.map_concurrent(fetch, urls)
        for page in headrace.map_concurrent(fetch, urls): ...       # no event loop needed

    Args:
        fn: `async def`, or a plain function, which runs on threads.
        items: any iterable or async iterable, even endless; read on the event loop's thread, each item when a call is
            free for it.
        concurrency: maximum concurrent calls.
        retries: extra attempts for a call that failed with one of `retry_on`.
        backoff_s: the wait before the n-th retry is random, from 0 to `backoff_s` × 2ⁿ⁻¹ seconds, at most 60.
        timeout_s: time limit of one attempt, which then fails with TimeoutError. A thread cannot be stopped: its call
            continues, and its result is ignored.
        ordered: yield results in the order of the items, otherwise as they complete.
        return_exceptions: yield exceptions as results; otherwise the first one is raised after the results before it.
        look_ahead: maximum items begun whose results are not yet yielded; 4 × `concurrency` by default.

    Leaving the loop over the results, also by an error, cancels the running calls.

    Raises:
        ConfigError: a parameter is out of range.
    """
    concurrency = whole("concurrency", concurrency, 1)
    optional("timeout_s", timeout_s, above=0)
    ahead = 4 * concurrency if look_ahead is None else whole("look_ahead", look_ahead, 1)
    if not isinstance(items, (Iterable, AsyncIterable)):
        raise ConfigError(f"items is {items!r}; it must be iterable")
    policy = RetryPolicy(whole("retries", retries, 0) + 1, number("backoff_s", backoff_s, minimum=0))
    call = function("fn", fn, needed=True)

    def pool() -> _TaskPool:
        attempts = Attempts(call, policy, retry_on, timeout_s, concurrency)
        return _TaskPool(items, attempts, concurrency, ahead, ordered=ordered, fail_fast=not return_exceptions)

    return FanOut(pool, return_exceptions)


class FanOut(Generic[ResultT]):
    """Calls that begin when the results are read."""

    def __init__(self, pool: Callable[[], _TaskPool], return_exceptions: bool) -> None:
        self._make_pool = pool
        self._return_exceptions = return_exceptions

    async def __aiter__(self) -> AsyncIterator[ResultT]:
        pool = self._make_pool()
        try:
            while await pool.wait():
                while pool.ready:
                    yield self._open(pool.take())
                    pool.refill()
        finally:
            await pool.stop()

    def __await__(self) -> Generator[object, None, list[ResultT]]:
        return self._collect().__await__()

    async def _collect(self) -> list[ResultT]:
        return [result async for result in self]

    def __iter__(self) -> Iterator[ResultT]:
        """The results, from an event loop on a separate thread; works even if this thread runs a loop."""
        pool = self._make_pool()
        with Tidied(), closing(LoopThread("headrace-map-loop")) as loop:
            try:
                while loop.run(pool.wait()):
                    while pool.ready:
                        yield self._open(pool.take())
                        if pool.has_idle:
                            loop.call_soon(pool.refill)
            finally:
                loop.run(pool.stop())

    def _open(self, result: object) -> Any:
        if isinstance(result, Raised):
            if not self._return_exceptions or isinstance(result, _ItemsFailed):
                raise result.cause
            return result.cause
        return result


class _ItemsFailed(Raised):
    """Raised by the items themselves, which ends them."""


class _TaskPool:
    """Worker tasks that process items; at most `ahead` items are begun whose results are not yet taken.

    With `fail_fast`, no more items are taken after a failure. Only `take` and `has_idle` may be used outside the event
    loop's thread.
    """

    def __init__(
        self,
        items: Iterable[object] | AsyncIterable[object],
        attempts: Attempts,
        concurrency: int,
        ahead: int,
        *,
        ordered: bool,
        fail_fast: bool,
    ) -> None:
        self.ready: deque[object] = deque()
        """Results to yield next."""
        self._attempts = attempts
        self._concurrency, self._ahead = concurrency, ahead
        self._ordered, self._fail_fast = ordered, fail_fast
        self._aclose: Callable[[], Awaitable[None]] | None = None
        if isinstance(items, AsyncIterable):
            iterator = aiter(items)
            self._next: Callable[[], Any] = iterator.__anext__
            self._aclose = getattr(iterator, "aclose", None)
            self._lock: asyncio.Lock | None = asyncio.Lock()
        else:
            self._next = iter(items).__next__
            self._lock = None
        self._done: dict[int, object] = {}
        self._begun = self._placed = self._in_order = self._taken = 0
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._consumer: asyncio.Future[None] | None = None

    def _start_worker(self) -> None:
        self._tasks.append(asyncio.create_task(self._work(), name="headrace-map"))

    # -- called by the consumer -------------------------------------------------------------------------------------

    async def wait(self) -> bool:
        """Wait for a result; the first call starts the work. False when there are no more results."""
        if not self._tasks:
            self._start_worker()
        while not self.ready:
            if self._ended and self._placed == self._begun:
                return False
            self.refill()
            self._consumer = asyncio.get_running_loop().create_future()
            await self._consumer
        return True

    def take(self) -> object:
        self._taken += 1
        return self.ready.popleft()

    @property
    def has_idle(self) -> bool:
        """Whether idle workers can continue and less than half of the look-ahead is in use."""
        return bool(self._idle) and 2 * (self._begun - self._taken) <= self._ahead

    def refill(self) -> None:
        """Wake the idle workers for which there is room now."""
        if not self._idle or (self.ready and not self.has_idle):
            return
        for _ in range(min(len(self._idle), self._ahead - (self._begun - self._taken))):
            _wake(self._idle.popleft())

    async def stop(self) -> None:
        self._ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._aclose is not None:
            await self._aclose()
        self._attempts.close()

    # -- called by the workers -------------------------------------------------------------------------------------

    async def _work(self) -> None:
        call = self._attempts.call
        while True:
            while self._begun - self._taken >= self._ahead and not self._ended:
                room = asyncio.get_running_loop().create_future()
                self._idle.append(room)
                await room
            if self._ended:
                break
            index = -1
            try:  # here and not in a function: it runs for every item
                item = self._next() if self._lock is None else await self._pull()
                if item is _END:
                    break
                index = self._begin()
                result = await call(item)
            except Exception as error:  # noqa: BLE001 - the user's items and function may raise anything
                if index >= 0:
                    result = Raised(error)
                elif isinstance(error, (StopIteration, StopAsyncIteration)):
                    break
                else:
                    self._place(self._begin(), _ItemsFailed(error))
                    break
            self._place(index, result)
        self._end()

    async def _pull(self) -> object:
        assert self._lock is not None
        async with self._lock:
            return _END if self._ended else await self._next()

    def _begin(self) -> int:
        index = self._begun
        self._begun += 1
        if len(self._tasks) < self._concurrency:
            self._start_worker()
        return index

    def _place(self, index: int, result: object) -> None:
        self._placed += 1
        if self._fail_fast and isinstance(result, Raised):
            self._ended = True  # running calls still finish, as their results may come first
        if not self._ordered:
            self.ready.append(result)
        else:
            self._done[index] = result
            while self._in_order in self._done:
                self.ready.append(self._done.pop(self._in_order))
                self._in_order += 1
        if self.ready:
            self._wake_consumer()

    def _end(self) -> None:
        """No items are left: end the idle workers too."""
        self._ended = True
        while self._idle:
            _wake(self._idle.popleft())
        self._wake_consumer()

    def _wake_consumer(self) -> None:
        if self._consumer is not None:
            _wake(self._consumer)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
