"""How a request waits for its records: until they are answered, its time is up, or its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from headrace.errors import DeadlineExceededError
from headrace.serving.errors import ClientGoneError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LOOK_AFTER_S = 0.2
"""Whether the client is still there is asked only of requests that take longer: for the others it would cost more than
it could save."""


class CancelScope:
    """Ends the wait for some futures early, by cancelling them, which takes their records out of the batcher.

    Args:
        receive: the request's, its body already read.
        timeout_s: how long it may take from now.
    """

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._timeout_s = timeout_s
        # One timer, which nearly no request lives to see.
        self._timer = loop.call_later(min(timeout_s, LOOK_AFTER_S), self._is_slow)
        self._looking: asyncio.Task[None] | None = None
        self._futures: Sequence[asyncio.Future[Any]] = ()
        self.cause: Exception | None = None
        """Why the wait ended early, if it did."""

    async def all(self, futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Their results in order; the first error ends the wait for all.

        Raises:
            DeadlineExceededError: the time was up.
            ClientGoneError: the client has closed its connection.
        """
        self.watch(futures)
        try:
            return [await future for future in futures]
        except asyncio.CancelledError:
            if self.cause is None:
                raise
            raise self.cause from None
        finally:
            self.close()

    def watch(self, futures: Sequence[asyncio.Future[Any]]) -> None:
        """Cancel these when the wait ends early; `cause` then says why."""
        self._futures = futures
        if self.cause is not None:
            self._cancel()

    def close(self) -> None:
        """Wait for nothing more; what is not answered is given up."""
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._cancel()

    def _expire(self) -> None:
        self._end(DeadlineExceededError(f"the request was not finished within {self._timeout_s:g} s"))

    def _is_slow(self) -> None:
        """Begin to look whether the client is there, for the rest of the time."""
        if self._timeout_s <= LOOK_AFTER_S:
            self._expire()
            return
        self._timer = self._loop.call_later(self._timeout_s - LOOK_AFTER_S, self._expire)
        self._looking = self._loop.create_task(self._until_gone(), name="headrace-client-watch")

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGoneError("the client closed the connection"))

    def _end(self, cause: Exception) -> None:
        if self.cause is None:
            self.cause = cause
            self._cancel()

    def _cancel(self) -> None:
        for future in self._futures:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # read: the first error stands for all
