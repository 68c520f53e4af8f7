"""Maps a stream of records through a batcher with bounded look-ahead; results in input or completion order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from headrace.batching.dispatch.submission import Submission
from headrace.batching.foreign_calls import Raised, attempt, must_propagate
from headrace.batching.pending import EntryHolder, fail, own_copy
from headrace.errors import ConfigError

RecordT = TypeVar("RecordT")

RUN = 64
"""Maximum records of a plain iterable that are read and queued together."""

MappedRun: TypeAlias = tuple[Sequence[Any], Sequence[Any], bool]
"""Records, their results (a list, or an array for columns), and whether any result is an exception."""

_SPIN_S = 0.001
"""How long to read a plain iterable before yielding to the event loop, in seconds."""


class RecordRun:
    """Records read together, and their results if these are yielded together."""

    __slots__ = ("failed", "missing", "records", "results")

    def __init__(self, records: Sequence[object], *, together: bool) -> None:
        self.records = records
        self.results: list[object] = [None] * len(records) if together else []
        self.missing = len(records)
        self.failed = False
        """Whether any result is an exception."""


class RunSlice:
    """Some records of a run as a queue entry: like the future of `submit`, for many records."""

    __slots__ = ("arrival", "cost", "end", "failed", "holder", "results", "run", "start", "stream")

    def __init__(self, stream: MappedStream, run: RecordRun, start: int, end: int) -> None:
        self.stream = stream
        self.run = run
        self.start = start
        self.end = end
        self.cost = 0.0
        self.arrival = 0.0
        self.holder: EntryHolder | None = None
        self.results: Sequence[object] = ()
        self.failed = False
        """Whether any result is an exception."""

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def records(self) -> Sequence[object]:
        return self.run.records[self.start : self.end]

    def split(self, count: int) -> RunSlice:
        first = RunSlice(self.stream, self.run, self.start, self.start + count)
        first.cost, first.arrival, first.holder = self.cost, self.arrival, self.holder
        self.start += count
        self.stream.entries.add(first)
        return first

    def done(self) -> bool:
        """Whether the results are set or the stream is closed."""
        return self.stream.closed or self not in self.stream.entries

    def set_result(self, result: object) -> None:
        self.set_results([result], False)

    def set_exception(self, exception: BaseException) -> None:
        self.set_results([exception], True)

    def set_results(self, results: Sequence[object], failed: bool) -> None:
        if self.done():
            raise asyncio.InvalidStateError("the results are already set or the stream is closed")
        self.results, self.failed = results, failed
        self.stream.finished(self)


class MappedStream:
    """One mapped input, from reading its records to yielding their results.

    Args:
        caller: takes turns with other callers; the queue remembers it for a while.
        limit: most records that are read before their results are yielded.
        flush: whether records that wait at the end of the input are batched immediately.
    """

    def __init__(
        self,
        submission: Submission,
        caller: object,
        limit: int,
        *,
        ordered: bool,
        priority: int = 0,
        flush: bool = True,
    ) -> None:
        self._submission = submission
        self._caller = caller
        self._priority = priority
        self._flush_at_end = flush
        self._limit = limit
        self._runs: deque[RecordRun] = deque()
        self._completed: deque[RunSlice] | None = None if ordered else deque()
        self._ahead = 0
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self._feeder_waits: asyncio.Future[None] | None = None
        self.entries: set[RunSlice] = set()
        """Entries without results."""
        self.closed = False

    def chunks(self, records: Iterable[object] | AsyncIterable[object]) -> AsyncGenerator[MappedRun, None]:
        """Yield chunks of results as they become ready.

        An exception raised by `records` is re-raised after all earlier results.
        """
        return self._chunks(self._feed(records))

    def run_chunks(self, runs: AsyncIterable[Sequence[object]]) -> AsyncGenerator[MappedRun, None]:
        """`chunks` for runs of records, lists or `RecordColumn`s; all records of a run cost as much as its first.

        An empty run says that no run follows before results do: records that wait are batched immediately.
        """
        return self._chunks(self._feed_runs(runs))

    async def _chunks(self, feed: Coroutine[object, None, None]) -> AsyncGenerator[MappedRun, None]:
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
            for entry in self.entries:
                if entry.holder is not None:
                    entry.holder.discard(entry)
            await asyncio.wait({feeder})

    def finished(self, entry: RunSlice) -> None:
        """The entry's results are set."""
        self.entries.discard(entry)
        if self._completed is not None:
            self._completed.append(entry)
        else:
            run = entry.run
            run.results[entry.start : entry.end] = entry.results
            run.missing -= entry.count
            run.failed |= entry.failed
            if run.missing or run is not self._runs[0]:
                return
        _wake(self._reader)

    def _next(self) -> MappedRun | None:
        if self._completed is None:
            if not self._runs or self._runs[0].missing:
                return None
            run = self._runs.popleft()
            chunk: MappedRun = run.records, run.results, run.failed
        elif self._completed:
            entry = self._completed.popleft()
            chunk = entry.records, entry.results, entry.failed
        else:
            return None
        self._ahead -= len(chunk[0])
        if self._ahead <= self._limit // 2:
            _wake(self._feeder_waits)
        return chunk

    def _fed(self, _: asyncio.Task[None]) -> None:
        self._ended = True
        if self._flush_at_end:
            self._submission.dispatcher.flush()
        _wake(self._reader)

    async def _feed(self, records: Iterable[object] | AsyncIterable[object]) -> None:
        if isinstance(records, AsyncIterable):
            async for record in records:
                await self._place([record])
            return
        if not isinstance(records, Iterable):
            raise ConfigError(f"records is a {type(records).__name__}: it must be an iterable or an async iterable")
        clock = asyncio.get_running_loop().time
        yield_at = clock() + _SPIN_S
        for chunk in read_ahead(records, clock):
            if isinstance(chunk, Exception):
                raise chunk
            await self._place(chunk)
            if clock() > yield_at:
                await asyncio.sleep(0)
                yield_at = clock() + _SPIN_S

    async def _feed_runs(self, runs: AsyncIterable[Sequence[object]]) -> None:
        async for records in runs:
            if records:
                await self._place(records, alike=True)
            else:
                self._submission.dispatcher.flush()
            del records  # no run may stay referenced while the next one is made

    async def _place(self, records: Sequence[object], *, alike: bool = False) -> None:
        while self._ahead >= self._limit:
            self._feeder_waits = asyncio.get_running_loop().create_future()
            try:
                await self._feeder_waits
            finally:
                self._feeder_waits = None
        run = RecordRun(records, together=self._completed is None)
        self._ahead += len(records)
        if self._completed is None:
            self._runs.append(run)
        rest = RunSlice(self, run, 0, len(records))
        self.entries.add(rest)
        with _FailsWith(rest):  # for example when the batcher has stopped
            shared = self._submission.run_cost(records) if alike else self._submission.shared_cost(records)
            while shared is None and rest.count > 1:
                await self._enter_alone(rest.split(1))
            await (self._enter_alone(rest) if shared is None else self._enter(rest, shared))

    async def _enter_alone(self, entry: RunSlice) -> None:
        cost = attempt(self._submission.cost, entry.records[0])
        if not isinstance(cost, Raised):
            await self._enter(entry, cost)
        elif must_propagate(cost.cause):
            raise cost.cause
        else:  # by the user's estimator: it fails this record, not the stream
            entry.set_exception(own_copy(cost.cause))

    async def _enter(self, entry: RunSlice, cost: float) -> None:
        entry.cost, reserved = cost, 0
        with _FailsWith(entry):
            while not self._submission.enter(entry, reserved, self._priority, self._caller):
                await self._submission.admission.enter(cost)
                reserved = 1


class _FailsWith:
    """An entry that fails with what its `with` block raises: it must not wait for a place that it never gets."""

    __slots__ = ("_entry",)

    def __init__(self, entry: RunSlice) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            fail([self._entry], error)


def read_ahead(records: Iterable[RecordT], clock: Callable[[], float]) -> Iterator[list[RecordT] | Exception]:
    """Read lists of records: one record from a slow input, up to `RUN` from a fast one. Its exception comes last."""
    source = iter(records)
    size = 1
    while True:
        chunk: list[RecordT] = []
        started = clock()
        read = attempt(chunk.extend, islice(source, size))  # the records before an error are in the chunk
        slow = clock() - started > _SPIN_S
        if isinstance(read, Raised) and not isinstance(read.cause, Exception):
            raise read.cause
        if chunk:
            yield chunk
        if isinstance(read, Raised):
            assert isinstance(read.cause, Exception)
            yield read.cause
            return
        if len(chunk) < size:
            return
        size = max(size // 4, 1) if slow else min(size * 2, RUN)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
