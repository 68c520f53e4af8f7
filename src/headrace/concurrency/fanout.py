"""`map_concurrent`: one function over many items, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.batching.options import function, number, optional, whole
from headrace.concurrency.attempts import Attempts, AttemptSettings
from headrace.concurrency.loop_thread import LoopThread
from headrace.errors import ConfigError
from headrace.retry import RetryPolicy

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_END = object()


def map_concurrent(  # noqa: PLR0913 - keyword-only settings, each one a line in the caller's code
    fn: Callable[[ItemT], Awaitable[ResultT] | ResultT],
    items: Iterable[ItemT] | AsyncIterable[ItemT],
    *,
    concurrency: int = 10,
    retries: int = 0,
    backoff_s: float = 0.5,
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception,
    timeout_s: float | None = None,
    ordered: bool = True,
    return_exceptions: bool = False,
    look_ahead: int | None = None,
) -> FanOut[ResultT]:
    """Results of `fn` for each item, `concurrency` calls at a time: `async for`, `await` (a list), or plain `for`.

        async for page in headrace.map_concurrent(fetch, urls, concurrency=20, retries=5): ...
        pages = await headrace.map_concurrent(fetch, urls)
        for page in headrace.map_concurrent(fetch, urls): ...       # no event loop needed

    Args:
        fn: `async def`, or a plain function, which runs on threads.
        items: also a generator, an endless one too; the next is taken when a call is free for it. They are taken on
            the event loop's thread.
        concurrency: calls under way at a time.
        retries: further tries of a call that failed with one of `retry_on`.
        backoff_s: the n-th wait before a further try is drawn from 0 to `backoff_s` × 2ⁿ⁻¹ seconds, at most 60.
        timeout_s: of one try; it fails with TimeoutError. A thread cannot be stopped: what runs there runs on unheard.
        ordered: in the order of the items, or else as they complete.
        return_exceptions: an exception stands in its result's place; otherwise the first ends it, once what is before
            it (in the order asked for) has been handed out.
        look_ahead: most items begun and not yet handed out, so that a slow one does not let the rest pile up;
            4 × `concurrency` by default.

    What still runs is cancelled when the loop over the results is left, by an error too.

    Raises:
        ConfigError: a parameter is out of range.
    """
    concurrency = whole("concurrency", concurrency, 1)
    optional("timeout_s", timeout_s, above=0)
    ahead = 4 * concurrency if look_ahead is None else whole("look_ahead", look_ahead, 1)
    if not isinstance(items, (Iterable, AsyncIterable)):
        raise ConfigError(f"items is {items!r}; it must be iterable")
    policy = RetryPolicy(whole("retries", retries, 0) + 1, number("backoff_s", backoff_s, minimum=0))
    settings = AttemptSettings(policy, retry_on, timeout_s)
    call = function("fn", fn, needed=True)
    bounds = _Bounds(concurrency, ahead, ordered, fail_fast=not return_exceptions)
    return FanOut(lambda: _TaskPool(items, Attempts(call, settings, concurrency), bounds), return_exceptions)


class FanOut(Generic[ResultT]):
    """Calls to be made: they begin when the results are asked for."""

    def __init__(self, crew: Callable[[], _TaskPool], return_exceptions: bool) -> None:
        self._crew = crew
        self._return_exceptions = return_exceptions

    async def __aiter__(self) -> AsyncIterator[ResultT]:
        """The results, on the running event loop."""
        crew = self._crew()
        try:
            while await crew.wait():
                while crew.ready:
                    yield self._open(crew.take())
                    crew.refill()
        finally:
            await crew.stop()

    def __await__(self) -> Generator[Any, None, list[ResultT]]:
        """All results, as a list."""
        return self._collect().__await__()

    async def _collect(self) -> list[ResultT]:
        return [result async for result in self]

    def __iter__(self) -> Iterator[ResultT]:
        """The results, from an event loop on a thread of its own: also where this thread runs one already."""
        crew = self._crew()
        with closing(LoopThread("headrace-map-loop")) as loop:
            try:
                while loop.run(crew.wait()):
                    while crew.ready:
                        yield self._open(crew.take())
                        if crew.has_idle:
                            loop.call_soon(crew.refill)
            finally:
                loop.run(crew.stop())

    def _open(self, result: Any) -> Any:
        if type(result) is _Failure:
            if not (self._return_exceptions and result.of_item):
                raise result.error
            return result.error
        return result


class _Failure:
    __slots__ = ("error", "of_item")

    def __init__(self, error: Exception, of_item: bool) -> None:
        self.error = error
        self.of_item = of_item
        """False where it is the items' own: there is no next one."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    concurrency: int
    ahead: int
    ordered: bool
    fail_fast: bool
    """Take no more items once one has failed."""


class _TaskPool:
    """Tasks that take items and bring results: at most `ahead` items are begun and not handed out.

    Everything but `take` and `has_idle` belongs to the event loop's thread.
    """

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any], attempts: Attempts, bounds: _Bounds) -> None:
        self.ready: deque[Any] = deque()
        """Results to be handed out next."""
        self._attempts = attempts
        self._concurrency = bounds.concurrency
        self._ahead = bounds.ahead
        self._ordered = bounds.ordered
        self._fail_fast = bounds.fail_fast
        self._aclose: Callable[[], Awaitable[None]] | None = None
        if isinstance(items, AsyncIterable):
            iterator = aiter(items)
            self._next: Callable[[], Any] = iterator.__anext__
            self._aclose = getattr(iterator, "aclose", None)
            self._lock: asyncio.Lock | None = asyncio.Lock()
        else:
            self._next = iter(items).__next__
            self._lock = None
        self._done: dict[int, Any] = {}
        self._begun = self._placed = self._in_order = self._handed = 0
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._hungry: asyncio.Future[None] | None = None

    def _hire(self) -> None:
        self._tasks.append(asyncio.create_task(self._work(), name="headrace-map"))

    # -- the caller's side -----------------------------------------------------------------------------------------

    async def wait(self) -> bool:
        """Wait until there is a result, having begun at the first call; False where none will come any more."""
        if not self._tasks:
            self._hire()
        while not self.ready:
            if self._ended and self._placed == self._begun:
                return False
            self.refill()
            self._hungry = asyncio.get_running_loop().create_future()
            await self._hungry
        return True

    def take(self) -> Any:
        """The next result, which there must be."""
        self._handed += 1
        return self.ready.popleft()

    @property
    def has_idle(self) -> bool:
        """Whether `refill` would find work for somebody. While half of the room is results, nobody is in a hurry."""
        return bool(self._idle) and 2 * (self._begun - self._handed) <= self._ahead

    def refill(self) -> None:
        """Let those go on who waited for room that there is now."""
        if not self._idle or (self.ready and not self.has_idle):
            return
        for _ in range(min(len(self._idle), self._ahead - (self._begun - self._handed))):
            _wake(self._idle.popleft())

    async def stop(self) -> None:
        """Cancel what runs, and wait for its end."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._aclose is not None:
            await self._aclose()
        self._attempts.close()

    # -- the workers' side -----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        call = self._attempts.call
        while True:
            while self._begun - self._handed >= self._ahead and not self._ended:
                room = asyncio.get_running_loop().create_future()
                self._idle.append(room)
                await room
            if self._ended:
                break
            try:
                item = self._next() if self._lock is None else await self._pull()
            except (StopIteration, StopAsyncIteration):
                break
            except Exception as error:  # noqa: BLE001 - the items' own error goes to whoever asked for the results
                self._place(self._begin(), _Failure(error, of_item=False))
                break
            if item is _END:
                break
            index = self._begin()
            try:
                result = await call(item)
            except Exception as error:  # noqa: BLE001 - the boundary between the caller's function and its results
                result = _Failure(error, of_item=True)
            self._place(index, result)
        self._end()

    async def _pull(self) -> Any:
        assert self._lock is not None
        async with self._lock:
            return _END if self._ended else await self._next()

    def _begin(self) -> int:
        index = self._begun
        self._begun += 1
        if len(self._tasks) < self._concurrency:
            self._hire()
        return index

    def _place(self, index: int, result: Any) -> None:
        self._placed += 1
        if self._fail_fast and type(result) is _Failure:
            self._ended = True  # what is under way may still bring what comes before it
        if not self._ordered:
            self.ready.append(result)
        else:
            self._done[index] = result
            while self._in_order in self._done:
                self.ready.append(self._done.pop(self._in_order))
                self._in_order += 1
        if self.ready:
            self._feed()

    def _end(self) -> None:
        """No item is left, for none of the others either."""
        self._ended = True
        while self._idle:
            _wake(self._idle.popleft())
        self._feed()

    def _feed(self) -> None:
        if self._hungry is not None:
            _wake(self._hungry)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
