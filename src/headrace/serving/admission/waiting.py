"""Waits for the records of a request until they are answered, the request times out or the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive

from headrace.engines.base import Chunks
from headrace.errors import DeadlineExceededError
from headrace.serving.errors import ClientGoneError

WATCH_AFTER_S = 0.2
"""Seconds after which a request watches for a disconnect. For faster requests it would cost more than it saves."""


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class CancelScope:
    """Cancels futures, and so their records in the batcher, on a timeout or a disconnect.

    Args:
        receive: the ASGI receive function, after the body was read.
        timeout_s: seconds from now.
    """

    __slots__ = ("_futures", "_loop", "_receive", "_timeout_s", "_timer", "_turn", "_watcher", "cause")

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._timeout_s = timeout_s
        # Most requests finish before this timer fires.
        self._timer = loop.call_later(min(timeout_s, WATCH_AFTER_S), self._start_watching)
        self._watcher: asyncio.Task[None] | None = None
        self._futures: Sequence[asyncio.Future[object]] = ()
        self._turn: asyncio.Future[None] | None = None
        self.cause: Exception | None = None
        """Why the futures were cancelled, if they were."""

    async def all(self, futures: Sequence[asyncio.Future[object]]) -> list[object]:
        """The results in order. The first error cancels the others.

        Raises:
            DeadlineExceededError: the request timed out.
            ClientGoneError: the client has disconnected.
        """
        self.watch(futures)
        try:
            return [await future for future in futures]
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self.close()

    async def wait(self, turn: asyncio.Future[None]) -> None:
        """Wait for a turn; the futures that are watched stay so.

        Raises:
            DeadlineExceededError: the request timed out.
            ClientGoneError: the client has disconnected.
        """
        self.check()
        self._turn = turn
        try:
            await turn
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._turn = None

    def check(self) -> None:
        """Raise what has ended the request, if anything has."""
        if self.cause is not None:
            raise self.cause from None

    def watch(self, futures: Sequence[asyncio.Future[object]]) -> None:
        """Cancel these futures on a timeout or disconnect; `cause` then holds the reason."""
        self._futures = futures
        if self.cause is not None:
            self._cancel()

    def close(self) -> None:
        """Stop the timers and cancel unfinished futures."""
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        self._cancel()

    def _expire(self) -> None:
        self._end(DeadlineExceededError(f"the request did not finish within {self._timeout_s:g} s"))

    def _start_watching(self) -> None:
        if self._timeout_s <= WATCH_AFTER_S:
            self._expire()
            return
        self._timer = self._loop.call_later(self._timeout_s - WATCH_AFTER_S, self._expire)
        self._watcher = self._loop.create_task(self._watch_client(), name="headrace-client-watch")

    async def _watch_client(self) -> None:
        await disconnected(self._receive)
        self._end(ClientGoneError("the client disconnected"))

    def _end(self, cause: Exception) -> None:
        if self.cause is None:
            self.cause = cause
            self._cancel()

    def _cancel(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        for future in self._futures:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # mark as retrieved: only the first error is reported


async def run_chunks(chunks: Chunks[object], run: Callable[[object, int], Awaitable[object]]) -> object:
    """The output of a long record. `run` makes the output of a part, given its cost; all run at the same time.

    If one part fails, or the call is cancelled, the others are cancelled.

    Raises:
        Exception: the error of the first part that failed.
    """
    parts = [asyncio.ensure_future(run(part, cost)) for part, cost in zip(chunks.parts, chunks.costs, strict=True)]
    try:
        outputs = await asyncio.gather(*parts)
    finally:
        for part in parts:
            part.cancel()
    output = chunks.join(outputs, chunks.weights)
    return await run_chunks(output, run) if isinstance(output, Chunks) else output
