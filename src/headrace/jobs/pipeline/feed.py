"""The host side before the engine: chunks are read on one thread and prepared on several, a bounded way ahead."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from headrace.engines.profile import profile_of
from headrace.errors import ProcessTimeoutError, StoppedError
from headrace.events import InputLeftOut
from headrace.jobs.pipeline.concurrency_tuner import ConcurrencyTuner
from headrace.jobs.pipeline.dedupe import Deduplicator
from headrace.jobs.pipeline.job import IdCheck, Job
from headrace.jobs.pipeline.memory_budget import Memory
from headrace.jobs.pipeline.preparing import InTime
from headrace.jobs.pipeline.retries import RetryQueue
from headrace.jobs.pipeline.stages import (
    MAX_RUN,
    Preparation,
    PreparedChunk,
    UnfinishedOutput,
    Work,
    failure,
    finish,
    longest_first,
    portions,
    prepared_bytes,
)
from headrace.jobs.pipeline.suspects import SuspectFailures
from headrace.records import Failed, Ok, Outcome, Record
from headrace.retry import RetryPolicy

MOST_PARKED = 4096
"""Records that may wait for a next try, or for an equal one; with more, nothing is read until some have left."""
_ALL_ROWS = 1 << 20
"""For an engine that says nothing: chunks are prepared as they are read."""
_LOOK_S = 0.25
"""How often a feed that waits for retries looks whether the job is asked to stop."""


class Feed:
    """Reads and prepares ahead of the batcher, and takes back what is to be tried again.

    At most `workers + 1` chunks are read or prepared at once, and none is read while `memory` has no room, so memory
    does not grow with the input. What cannot be read, selected or prepared goes to `on_done`, past the batcher;
    `expect` hears how many records are on their way, and how many bytes of the input they were read from.
    """

    def __init__(
        self,
        job: Job,
        next_todo: Callable[[int], int],
        expect: Callable[[int, int], None],
        on_done: Callable[[Sequence[Outcome]], Awaitable[None]],
        memory: Memory,
    ) -> None:
        self._job = job
        self._memory = memory
        self._preparation = Preparation(job.columns, job.engine, job.user, job.dedupe, InTime(job.engine_timeout_s))
        source = job.ids or job.source
        profile = profile_of(job.engine)
        self._chunks = portions(source.chunks(next_todo), profile.prepare_rows or _ALL_ROWS)
        self._expect = expect
        self._on_done = on_done
        self._ahead: deque[asyncio.Task[PreparedChunk | None]] = deque()
        self._width = ConcurrencyTuner(job.limits.workers, os.cpu_count() or 1)
        self._reader = ThreadPoolExecutor(1, "headrace-read")
        self._workers = ThreadPoolExecutor(self._width.most, "headrace-prepare")
        self._retries = RetryQueue(RetryPolicy(job.limits.max_attempts, job.limits.retry_wait_s))
        self._once: Deduplicator[Work] | None = Deduplicator() if job.dedupe else None
        self._doubts = SuspectFailures(profile.batching, job.engine_timeout_s)
        self._in_flight = self._reading = self._ready = self._done = 0
        self._began = math.inf
        self._settled = asyncio.Event()
        self._ended = False
        self._handed_back = 0
        self._exhausted = False

    @property
    def complete(self) -> bool:
        """Whether the whole input has been given out and nothing of it came back undone."""
        return self._exhausted and not self._handed_back

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
        if self._once is not None:
            self._once.close()

    async def work(self) -> AsyncIterator[list[Work]]:
        """Runs of records of equal cost, ready for the engine; ends early when the job is asked to stop.

        What is ready is ordered, the costliest first; chunks themselves come in input order.
        """
        stop = self._job.stop
        while (ready := await self._next()) is not None:
            self._park(ready.transient)
            if ready.failures:
                await self._on_done(ready.failures)
            work = ready.work
            if self._once is not None:
                work, known = await self._once.sort_out(work)
                if known:
                    self._memory.prepared -= prepared_bytes([item for item, _ in known])
                    await self._on_done([self._ok(item, output) for item, output in known])
            self._ready = len(work)
            for run in longest_first(work):
                if stop.is_over:
                    return
                self._ready -= len(run)
                self._in_flight += len(run)
                self._began = min(self._began, time.monotonic())
                yield run

    def settle(self, run: Sequence[Work], results: Sequence[Any], some_failed: bool) -> list[Outcome]:
        """What the engine's answers mean. Records to be tried again, or not begun before a stop, have no outcome yet.

        Raises:
            BrokenOffError: the engine is gone, which is no record's fault.
        """
        self._in_flight -= len(run)
        self._done += len(run)
        if self._job.stop.requested:
            waiting = self._in_flight + self._ready
            self._job.stop.judge(waiting, self._done / max(time.monotonic() - self._began, 1e-3))
        if self._memory.prepared:
            self._memory.prepared -= prepared_bytes(run)
        if self._ended:
            self._settled.set()
        if not some_failed and self._once is None:
            return self._doubts.dispel() + [self._ok(work, result) for work, result in zip(run, results, strict=True)]
        outcomes: list[Outcome] = []
        for work, result in zip(run, results, strict=True):
            self._settle_one(work, result, outcomes)
        return outcomes

    def _settle_one(self, work: Work, result: Any, outcomes: list[Outcome]) -> None:
        failed = isinstance(result, Exception)
        if isinstance(result, ProcessTimeoutError):
            result = self._doubts.judged(result)
        likewise: list[Work] = []
        if self._once is not None:
            likewise = self._once.given_up(work) if failed else self._once.computed(work, result)
            self._memory.prepared -= prepared_bytes(likewise)
        for item in (work, *likewise):
            if not failed:
                outcomes += [*self._doubts.dispel(), self._ok(item, result)]
            elif self._job.stop.requested and isinstance(result, StoppedError):
                self._handed_back += 1
            elif self._retries.wants(result, item.attempt):
                self._retries.add(_original(item), item.attempt, time.monotonic())
            else:
                self._doubts.add(result, finish(item, result), outcomes)

    def _ok(self, work: Work, result: Any) -> Ok:
        output = UnfinishedOutput(work.mapped, result) if self._job.user.finishes else result
        return Ok(work.record, output, work.cost, work.row)

    def _park(self, transient: Sequence[tuple[Record, int, Exception]]) -> None:
        now = time.monotonic()
        for record, attempt, _ in transient:
            self._retries.add(record, attempt, now)

    async def _next(self) -> PreparedChunk | None:
        """What is ready, at least one chunk of it; None when nothing is left or the job is asked to stop."""
        stop = self._job.stop
        while not stop.requested:
            now = time.monotonic()
            if again := self._retries.take(now, MAX_RUN):
                return await self._prepare(self._preparation.prepare_again, again)
            due_in = self._retries.due_in(now)
            parked = len(self._retries) + (self._once.waiting if self._once is not None else 0)
            if not self._ended and parked < MOST_PARKED:
                if (ready := await self._next_chunks(due_in)) is not None:
                    return ready
            elif self._in_flight or parked:
                await self._wait_for_end(due_in)
            else:
                if doubtful := self._doubts.dispel():
                    await self._on_done(doubtful)
                self._exhausted = True
                return None
        return None

    async def _next_chunks(self, at_most_s: float | None) -> PreparedChunk | None:
        """The next chunk, with those behind it that are ready too; None if the time is over or the input has ended."""
        while len(self._ahead) <= self._width.now and self._memory.has_room(self._reading):
            self._reading += 1
            self._ahead.append(asyncio.create_task(self._read_and_prepare(), name="headrace-feed"))
        if not self._ahead:
            await self._memory.wait_for_room(_LOOK_S if at_most_s is None else min(at_most_s, _LOOK_S))
            return None
        started = time.monotonic()
        if not (await asyncio.wait({self._ahead[0]}, timeout=at_most_s))[0]:
            return None
        self._width.waited(time.monotonic() - started)
        ready = PreparedChunk()
        while self._ahead and self._ahead[0].done():
            if ready and self._ahead[0].exception() is not None:
                break  # what came before goes first
            chunk = self._ahead.popleft().result()
            if self._job.ids is not None:
                await self._check_ids(self._job.ids, chunk)
            if chunk is None:
                self._ended = True
                break
            self._expect(len(chunk.work) + len(chunk.failures) + len(chunk.transient), chunk.bytes)
            ready.add(chunk)
        return ready or None

    async def _check_ids(self, ids: IdCheck, chunk: PreparedChunk | None) -> None:
        """Look at the ids of the next chunk, or at the last ones at the end."""
        loop = asyncio.get_running_loop()
        if chunk is None:
            return await loop.run_in_executor(self._reader, ids.finish)
        before = prepared_bytes(chunk.work)
        done = await loop.run_in_executor(self._reader, ids.check, chunk)
        self._memory.release(done)
        self._memory.prepared -= before - prepared_bytes(chunk.work)
        return None

    async def _wait_for_end(self, due_in: float | None) -> None:
        self._settled.clear()
        try:
            async with asyncio.timeout(_LOOK_S if due_in is None else min(due_in, _LOOK_S)):
                await self._settled.wait()
        except TimeoutError:
            pass

    async def _read_and_prepare(self) -> PreparedChunk | None:
        """The next chunk. Tasks start in the order they were made, and there is one reader: chunks keep their order."""
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._reader, self._preparation.load, self._chunks)
        finally:
            self._reading -= 1
        if loaded is None:
            return None
        chunk, size, event = loaded
        self._job.listener(event)
        for left_out in chunk.left_out:
            self._job.listener(InputLeftOut(left_out, event.at))
        self._memory.hold(*chunk.extent, size)
        prepared = await self._prepare(self._preparation.prepare, chunk)
        prepared.bytes = chunk.bytes
        return prepared

    async def _prepare(self, call: Callable[[Any], Any], argument: Any) -> PreparedChunk:
        prepared: PreparedChunk
        prepared, event = await asyncio.get_running_loop().run_in_executor(self._workers, call, argument)
        self._width.prepared(event.duration_s)
        self._job.listener(event)
        self._memory.prepared += prepared_bytes(prepared.work)
        prepared.transient, lasting = self._sift(prepared.transient)
        prepared.failures += lasting
        return prepared

    def _sift(
        self, transient: Sequence[tuple[Record, int, Exception]]
    ) -> tuple[list[tuple[Record, int, Exception]], list[Failed]]:
        """Those to be tried again, and those that have been tried often enough."""
        again = [item for item in transient if self._retries.wants(item[2], item[1])]
        return again, [failure(r, e, n) for r, n, e in transient if not self._retries.wants(e, n)]


def _original(work: Work) -> Record:
    return Record(work.record.position, work.record.id, work.row)
