"""The host side before the engine: chunks are read on one thread and prepared on several, a bounded way ahead."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from headrace.engines.base import BatchEngine, Engine, StreamEngine
from headrace.errors import EngineDeadError, JobError, RecordError, StoppedError
from headrace.events import StageDone
from headrace.io.base import Chunk
from headrace.jobs.columns import Columns
from headrace.jobs.job import Job, StopRequest
from headrace.records import Failed, Ok, Outcome, Record

_ALL_ROWS = 1 << 20
"""For an engine that says nothing: chunks are prepared as they are read."""


class Work(NamedTuple):
    """A record ready for the engine."""

    record: Record
    payload: Any
    cost: int
    kept: Mapping[str, Any] | None = None
    """Columns that go to the output."""


@dataclass(frozen=True, slots=True)
class _PreparedChunk:
    work: list[Work]
    failures: list[Failed]
    event: StageDone


class Feed:
    """Reads and prepares ahead of the batcher.

    At most `workers + 1` chunks are read or prepared at once, so memory does not grow with the input. What cannot be
    read, selected or prepared goes to `on_failed`, past the batcher; `expect` hears how many records a chunk has.
    """

    def __init__(
        self,
        job: Job,
        next_todo: Callable[[int], int],
        expect: Callable[[int], None],
        on_failed: Callable[[Failed], Awaitable[None]],
    ) -> None:
        self._job = job
        self._chunks = _portions(job.source.chunks(next_todo), getattr(job.engine, "prepare_rows", _ALL_ROWS))
        self._expect = expect
        self._on_failed = on_failed
        self._ahead: deque[asyncio.Task[_PreparedChunk | None]] = deque()
        self._reader = ThreadPoolExecutor(1, "headrace-read")
        self._workers = ThreadPoolExecutor(job.limits.workers, "headrace-prepare")
        self.exhausted = False
        """Whether the whole input has been given out."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def work(self) -> AsyncIterator[Work]:
        """Records ready for the engine, in input order; ends early when the job is asked to stop."""
        stop = self._job.stop
        while True:
            while len(self._ahead) <= self._job.limits.workers:
                self._ahead.append(asyncio.create_task(self._read_and_prepare(), name="headrace-feed"))
            chunk = await self._ahead[0]
            self._ahead.popleft()
            if chunk is None:
                self.exhausted = True
                return
            self._expect(len(chunk.work) + len(chunk.failures))
            for failed in chunk.failures:
                await self._on_failed(failed)
            for item in chunk.work:
                if stop.requested:
                    return
                yield item

    async def _read_and_prepare(self) -> _PreparedChunk | None:
        """The next chunk. Tasks start in the order they were made, and there is one reader: chunks keep their order."""
        loop, job = asyncio.get_running_loop(), self._job
        loaded = await loop.run_in_executor(self._reader, _load, self._chunks)
        if loaded is None:
            return None
        chunk, event = loaded
        job.listener(event)
        prepared = await loop.run_in_executor(self._workers, _prepare, chunk, job.columns, job.engine)
        job.listener(prepared.event)
        return prepared


def _portions(chunks: Iterator[Chunk], rows: int) -> Iterator[Chunk]:
    """The same rows in chunks of at most so many records, where an engine prepares fewer at a time than are read."""
    for chunk in chunks:
        yield replace(chunk, records=chunk.records[:rows])
        for start in range(rows, len(chunk.records), rows):
            yield Chunk(chunk.records[start : start + rows], (), 0)


def _load(chunks: Iterator[Chunk]) -> tuple[Chunk, StageDone] | None:
    """The next chunk of the input; None at its end. Runs on the reader thread."""
    started = time.monotonic()
    try:
        chunk = next(chunks, None)
    except OSError as error:
        raise JobError(f"cannot read the input on: {error}; what is finished is kept, run again to continue") from error
    if chunk is None:
        return None
    ended = time.monotonic()
    records = len(chunk.records) + len(chunk.failures)
    return chunk, StageDone("load", records, ended - started, ended, bytes=chunk.bytes)


def _prepare(chunk: Chunk, columns: Columns, engine: Engine[Any, Any]) -> _PreparedChunk:
    """Select the columns and let the engine prepare what they hold. Runs on a worker thread."""
    started = time.monotonic()
    failures = list(chunk.failures)
    records: list[Record] = []
    inputs: list[Any] = []
    for record in chunk.records:
        try:
            record = columns.identify(record)
            value = columns.input_of(record)
        except RecordError as error:
            failures.append(failure(record, error))
        else:
            records.append(record)
            inputs.append(value)
    work: list[Work] = []
    tokens = truncated = 0
    for record, prepared in zip(records, engine.prepare(inputs) if inputs else (), strict=True):
        if isinstance(prepared, Exception):
            failures.append(failure(record, prepared))
        else:
            work.append(Work(record, prepared.payload, prepared.cost, columns.kept(record)))
            tokens += prepared.cost
            truncated += prepared.truncated
    ended = time.monotonic()
    event = StageDone("prepare", len(chunk.records), ended - started, ended, tokens=tokens, truncated=truncated)
    return _PreparedChunk(work, failures, event)


def failure(record: Record, error: Exception) -> Failed:
    """How a record's own error is kept."""
    return Failed(record, type(error).__name__, " ".join(str(error).split()))


def infer(work: list[Work], engine: BatchEngine[Any, Any, Any], stop: StopRequest) -> list[Any]:
    """One batch through the engine. What has not begun when the job is asked to stop is handed back unprocessed."""
    if stop.requested:
        return [StoppedError("the job was asked to stop")] * len(work)
    return list(engine.forward([item.payload for item in work]))


async def infer_one(work: Work, engine: StreamEngine[Any, Any, Any], stop: StopRequest) -> Any:
    """One record through an engine that batches by itself, unless the job is asked to stop before it has begun."""
    if not stop.requested:
        try:
            return await engine.infer(work.payload)
        except EngineDeadError:
            if not stop.requested:  # else the signal that asked for it has reached the engine's own processes too
                raise
    return StoppedError("the job was asked to stop")


def finish(work: Work, result: Any) -> Outcome:
    """What the engine's answer means for the record.

    Raises:
        JobError: the engine is gone, which is no record's fault.
    """
    if isinstance(result, (EngineDeadError, StoppedError)):
        raise JobError(
            f"the engine cannot go on: {result}; what is finished is kept, run again to continue"
        ) from result
    if isinstance(result, Exception):
        return failure(work.record, result)
    # Without the row itself: a finished record may wait for its neighbours, and only what is kept is still needed.
    return Ok(Record(work.record.position, work.record.id, work.kept), result, work.cost)
