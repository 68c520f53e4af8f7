"""Maps a stream of records through a batcher: bounded look-ahead, results in input order or as they complete."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

from headrace.errors import ConfigError

_SPIN_S = 0.005
"""A plain iterable is read so long, in seconds, before the loop gets a turn."""


class Slot:
    """A mapped record and, once `finished`, its result or exception: what a future is to `submit`, at a lower price."""

    __slots__ = ("arrival", "cost", "failed", "finished", "home", "left", "record", "result", "stream")

    def __init__(self, record: Any, stream: Stream) -> None:
        self.record = record
        self.stream = stream
        self.finished = False
        self.failed = False
        self.left = False
        self.home: Any = None
        self.result: Any = None

    def done(self) -> bool:
        """Whether there is a result, or nobody wants it any more."""
        return self.finished or self.left

    def cancelled(self) -> bool:
        """Whether nobody wants the result any more."""
        return self.left

    def cancel(self) -> None:
        """Nobody wants the result any more."""
        if not self.finished:
            self.left = True
            if self.home is not None:
                self.home.discard(self)

    def set_result(self, result: Any) -> None:
        """End the wait with a result."""
        self.result = result
        self.finished = True
        stream = self.stream
        if stream.completed is not None:
            stream.completed.append(self)
        if stream.reader is not None:
            stream.finished(self)

    def set_exception(self, exception: Any) -> None:
        """End the wait with an exception."""
        self.failed = True
        self.set_result(exception)


class Stream:
    """The slots of one mapped input, from the record's reading until its result is handed out.

    `put(slot)` lets a slot into the batcher and waits for room; `limit` bounds the slots not yet handed out.
    """

    def __init__(self, put: Callable[[Slot], Any], hurry: Callable[[], None], limit: int, *, ordered: bool) -> None:
        self._put = put
        self._hurry = hurry
        self._limit = limit
        self._slots: deque[Slot] | set[Slot] = deque() if ordered else set()
        self.completed: deque[Slot] | None = None if ordered else deque()
        self.reader: asyncio.Future[None] | None = None
        """Not None while the reader waits for a result."""
        self._feeder_waits: asyncio.Future[None] | None = None
        self._ended = False

    async def slots(self, records: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Slot]:
        """Finished slots. An error of `records` itself is raised once all that came before it has been handed out."""
        feeder = asyncio.get_running_loop().create_task(self._feed(records), name="headrace-map-feeder")
        feeder.add_done_callback(self._fed)
        try:
            while True:
                while (slot := self._next()) is not None:
                    yield slot
                if self._ended and not self._slots:
                    await feeder
                    return
                self.reader = asyncio.get_running_loop().create_future()
                try:
                    await self.reader
                finally:
                    self.reader = None
        finally:
            feeder.cancel()
            for slot in self._slots:
                slot.cancel()
            await asyncio.wait({feeder})

    def finished(self, slot: Slot) -> None:
        """Wake the reader if `slot` is what it waits for."""
        if (self.completed is not None or self._slots[0] is slot) and not self.reader.done():  # type: ignore[index,union-attr]
            self.reader.set_result(None)  # type: ignore[union-attr]

    def _next(self) -> Slot | None:
        slots = self._slots
        if isinstance(slots, deque):
            if not slots or not slots[0].finished:
                return None
            slot = slots.popleft()
        else:
            if not self.completed:
                return None
            slot = self.completed.popleft()
            slots.discard(slot)
        if self._feeder_waits is not None and len(slots) <= self._limit // 2:
            _wake(self._feeder_waits)
        return slot

    def _fed(self, _: asyncio.Task[None]) -> None:
        self._ended = True
        self._hurry()
        _wake(self.reader)

    async def _feed(self, records: Iterable[Any] | AsyncIterable[Any]) -> None:
        if isinstance(records, AsyncIterable):
            async for record in records:
                await self._place(record)
            return
        if not isinstance(records, Iterable):
            raise ConfigError(f"records is a {type(records).__name__}: it must be an iterable or an async iterable")
        clock = asyncio.get_running_loop().time
        turn_ends = clock() + _SPIN_S
        for count, record in enumerate(records):
            await self._place(record)
            if not count % 16 and clock() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = clock() + _SPIN_S

    async def _place(self, record: Any) -> None:
        slots = self._slots
        while len(slots) >= self._limit:
            self._feeder_waits = asyncio.get_running_loop().create_future()
            try:
                await self._feeder_waits
            finally:
                self._feeder_waits = None
        slot = Slot(record, self)
        if isinstance(slots, deque):
            slots.append(slot)
        else:
            slots.add(slot)
        waiting = self._put(slot)
        if waiting is not None:
            await waiting


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
