"""Maps a stream of records through a batcher: bounded look-ahead, results in input order or as they complete."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

from headrace.batching.pending import Home, fail, own_copy
from headrace.batching.tasks import ends_the_task
from headrace.errors import ConfigError

RUN = 64
"""Most records of a plain iterable that are read, and wait, together."""

Chunk: TypeAlias = tuple[Sequence[Any], Sequence[Any], bool]
"""Records, their results, and whether one of these is an exception."""

_SPIN_S = 0.001
"""A plain iterable is read so long at a time, in seconds, before the loop gets a turn."""


class Run:
    """Records read together, and their results."""

    __slots__ = ("failed", "missing", "records", "results")

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records
        self.results: list[Any] = [None] * len(records)
        self.missing = len(records)
        self.failed = False
        """Whether a result is an exception."""


class Part:
    """Some records of a run, as an `Entry`: what a future is to `submit`, for many records at once."""

    __slots__ = ("arrival", "cost", "end", "home", "run", "start", "stream")

    def __init__(self, stream: Stream, run: Run, start: int, end: int) -> None:
        self.stream = stream
        self.run = run
        self.start = start
        self.end = end
        self.cost = 0.0
        self.arrival = 0.0
        self.home: Home | None = None

    @property
    def count(self) -> int:
        """How many records."""
        return self.end - self.start

    @property
    def records(self) -> Sequence[Any]:
        """The records."""
        return self.run.records[self.start : self.end]

    def split(self, count: int) -> Part:
        """Cut off the first `count` records."""
        first = Part(self.stream, self.run, self.start, self.start + count)
        first.cost, first.arrival, first.home = self.cost, self.arrival, self.home
        self.start += count
        self.stream.parts.add(first)
        return first

    def done(self) -> bool:
        """Whether the results are there, or nobody wants them any more."""
        return self.stream.closed or self not in self.stream.parts

    def set_result(self, result: Any) -> None:
        """The one record's result."""
        self.set_results([result])

    def set_exception(self, exception: Any) -> None:
        """The one record's exception."""
        self.set_results([exception])

    def set_results(self, results: Sequence[Any]) -> None:
        """Each record's result or exception, once.

        Raises:
            asyncio.InvalidStateError: they are there already, or nobody wants them any more.
        """
        if self.done():
            raise asyncio.InvalidStateError("the results are there, or nobody wants them any more")
        run = self.run
        run.results[self.start : self.end] = results
        run.missing -= self.end - self.start
        if not run.failed and any(isinstance(result, BaseException) for result in results):
            run.failed = True
        self.stream.finished(self)


class Port(Protocol):
    """What a stream needs of the batcher it feeds."""

    def cost(self, record: Any) -> float:
        """What a record costs; may raise what the user's estimator raises."""
        ...

    def shared_cost(self, records: Sequence[Any]) -> float | None:
        """What each of the records costs, if that is known to be the same without asking each."""
        ...

    def enter(self, part: Part, reserved: int) -> bool:
        """Admit the part, or as many of its first records as there is room for; whether none is left.

        `reserved` records may enter in any case.
        """
        ...

    async def wait_for_room(self, cost: float) -> None:
        """Wait until a record of this cost may enter; that room is then the caller's, until it next awaits."""
        ...

    def flush(self) -> None:
        """No more is coming for a while."""
        ...


class Stream:
    """One mapped input, from the reading of its records until their results are handed out.

    `limit` bounds the records read whose results are not yet handed out. With `flush`, what waits at the end of the
    input is batched at once.
    """

    def __init__(self, port: Port, limit: int, *, ordered: bool, flush: bool = True) -> None:
        self._port = port
        self._hurry = flush
        self._limit = limit
        self._runs: deque[Run] = deque()
        self._completed: deque[Part] | None = None if ordered else deque()
        self._ahead = 0
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self._feeder_waits: asyncio.Future[None] | None = None
        self.parts: set[Part] = set()
        """Those whose results are not there."""
        self.closed = False

    def chunks(self, records: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Chunk, None]:
        """What is ready, piece by piece.

        An error of `records` itself is raised once all that came before it has been handed out.
        """
        return self._chunks(self._feed(records))

    def run_chunks(self, runs: AsyncIterable[Sequence[Any]]) -> AsyncGenerator[Chunk, None]:
        """`chunks` of records that come in runs: the first of each is asked what it costs, the others cost the same."""
        return self._chunks(self._feed_runs(runs))

    async def _chunks(self, feed: Coroutine[Any, Any, None]) -> AsyncGenerator[Chunk, None]:
        feeder = asyncio.get_running_loop().create_task(feed, name="headrace-map-feeder")
        feeder.add_done_callback(self._fed)
        try:
            while True:
                while (chunk := self._next()) is not None:
                    yield chunk
                if self._ended and not self._ahead:
                    await feeder
                    return
                self._reader = asyncio.get_running_loop().create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None
        finally:
            self.closed = True
            feeder.cancel()
            for part in self.parts:
                if part.home is not None:
                    part.home.discard(part)
            await asyncio.wait({feeder})

    def finished(self, part: Part) -> None:
        """The part's results are there."""
        self.parts.discard(part)
        if self._completed is not None:
            self._completed.append(part)
        elif part.run.missing or part.run is not self._runs[0]:
            return
        _wake(self._reader)

    def _next(self) -> Chunk | None:
        if self._completed is None:
            if not self._runs or self._runs[0].missing:
                return None
            run = self._runs.popleft()
            chunk = run.records, run.results, run.failed
        elif self._completed:
            part = self._completed.popleft()
            chunk = part.records, part.run.results[part.start : part.end], part.run.failed
        else:
            return None
        self._ahead -= len(chunk[0])
        if self._ahead <= self._limit // 2:
            _wake(self._feeder_waits)
        return chunk

    def _fed(self, _: asyncio.Task[None]) -> None:
        self._ended = True
        if self._hurry:
            self._port.flush()
        _wake(self._reader)

    async def _feed(self, records: Iterable[Any] | AsyncIterable[Any]) -> None:
        if isinstance(records, AsyncIterable):
            async for record in records:
                await self._place([record])
            return
        if not isinstance(records, Iterable):
            raise ConfigError(f"records is a {type(records).__name__}: it must be an iterable or an async iterable")
        clock = asyncio.get_running_loop().time
        turn_ends = clock() + _SPIN_S
        for chunk in read_ahead(records, clock):
            if isinstance(chunk, Exception):
                raise chunk
            await self._place(chunk)
            if clock() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = clock() + _SPIN_S

    async def _feed_runs(self, runs: AsyncIterable[Sequence[Any]]) -> None:
        async for records in runs:
            await self._place(records, alike=True)

    async def _place(self, records: Sequence[Any], *, alike: bool = False) -> None:
        while self._ahead >= self._limit:
            self._feeder_waits = asyncio.get_running_loop().create_future()
            try:
                await self._feeder_waits
            finally:
                self._feeder_waits = None
        run = Run(records)
        self._ahead += len(records)
        if self._completed is None:
            self._runs.append(run)
        rest = Part(self, run, 0, len(records))
        self.parts.add(rest)
        try:
            shared = self._port.cost(records[0]) if alike else self._port.shared_cost(records)
            while shared is None and rest.count > 1:
                await self._enter_alone(rest.split(1))
            await (self._enter_alone(rest) if shared is None else self._enter(rest, shared))
        except BaseException as exc:  # the batcher has stopped, say: nobody may wait for what did not get in
            fail([rest], exc)
            raise

    async def _enter_alone(self, part: Part) -> None:
        try:
            cost = self._port.cost(part.records[0])
        except BaseException as exc:  # of the user's estimator: it costs this record, not the stream
            if ends_the_task(exc):
                raise
            part.set_exception(own_copy(exc))
        else:
            await self._enter(part, cost)

    async def _enter(self, part: Part, cost: float) -> None:
        part.cost = cost
        try:
            entered = self._port.enter(part, 0)
            while not entered:
                await self._port.wait_for_room(cost)
                entered = self._port.enter(part, 1)
        except BaseException as exc:
            fail([part], exc)
            raise


def read_ahead(records: Iterable[Any], clock: Callable[[], float]) -> Iterator[list[Any] | Exception]:
    """Runs of records: single ones of a slow input, up to `RUN` of a fast one. The input's own error comes last."""
    source = iter(records)
    size = 1
    while True:
        chunk: list[Any] = []
        error: Exception | None = None
        started = clock()
        try:
            chunk.extend(islice(source, size))
        except Exception as exc:  # noqa: BLE001  # of the user's input: what came before it is handed on first
            error = exc
        slow = clock() - started > _SPIN_S
        if chunk:
            yield chunk
        if error is not None:
            yield error
            return
        if len(chunk) < size:
            return
        size = max(size // 4, 1) if slow else min(size * 2, RUN)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
