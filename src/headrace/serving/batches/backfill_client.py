"""Lets a batch job, which runs on its own thread and event loop, use the server's batcher."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, AsyncIterable, Hashable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from headrace.errors import StoppedError
from headrace.io.formats.openai_batch import Answers
from headrace.serving.admission.backfill import Backfill
from headrace.serving.batches.lines import PreparedLine


class PreparedWork(Protocol):
    """A prepared record of a job."""

    @property
    def payload(self) -> PreparedLine:
        """The prepared line."""
        ...


WorkT = TypeVar("WorkT", bound=PreparedWork)


class BackfillClient:
    """The batcher of a job, backed by the server's backfill.

    Args:
        caller: the job's identity for fair batching.
        max_in_flight: maximum inputs read and not yet answered.
    """

    def __init__(
        self, backfill: Backfill, loop: asyncio.AbstractEventLoop, caller: Hashable, max_in_flight: int
    ) -> None:
        self._backfill = backfill
        self._loop = loop
        self._caller = caller
        self._max_in_flight = max_in_flight
        self._open: set[concurrent.futures.Future[Answers]] = set()
        self._stopped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def refuse(self) -> None:
        """Take no more records. Thread-safe."""
        self._stopped = True

    def stop(self) -> None:
        """Take no more records, and cancel unanswered ones. Thread-safe."""
        self.refuse()
        for future in list(self._open):
            future.cancel()

    def _permits(self, work: PreparedWork) -> int:
        """Number of in-flight permits that a record needs."""
        return min(max(len(work.payload.parts), 1), self._max_in_flight)

    async def _answer(self, line: PreparedLine) -> Answers:
        """The outputs of a line. Runs on the server's loop. Raises Exception: the first error of its inputs."""
        if len(line.parts) == 1:
            return line.answers([await self._backfill.run(line.parts[0], self._caller)])
        tasks = [
            self._loop.create_task(self._backfill.run(part, self._caller), name="headrace-batch-input")
            for part in line.parts
        ]
        try:
            return line.answers(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def runs_as_completed(
        self, runs: AsyncIterable[Sequence[WorkT]]
    ) -> AsyncGenerator[tuple[Sequence[WorkT], Sequence[Answers | BaseException], bool], None]:
        """Yield each record with its output or exception as it completes, one at a time."""
        job_loop = asyncio.get_running_loop()
        completed: asyncio.Queue[tuple[WorkT, concurrent.futures.Future[Answers]] | None] = asyncio.Queue()
        permits = asyncio.Semaphore(self._max_in_flight)
        sent = received = 0

        def on_done(work: WorkT, future: concurrent.futures.Future[Answers]) -> None:
            self._open.discard(future)
            if not job_loop.is_closed():
                job_loop.call_soon_threadsafe(completed.put_nowait, (work, future))

        async def feed() -> None:
            nonlocal sent
            async for work in (work async for run in runs for work in run):
                for _ in range(self._permits(work)):
                    await permits.acquire()
                future = asyncio.run_coroutine_threadsafe(self._answer(work.payload), self._loop)
                sent += 1
                self._open.add(future)
                future.add_done_callback(partial(on_done, work))
                if self._stopped:
                    future.cancel()

        feeding = job_loop.create_task(feed(), name="headrace-batch-feed")
        feeding.add_done_callback(lambda _: completed.put_nowait(None))
        try:
            while not feeding.done() or received < sent:
                entry = await completed.get()
                if entry is None:
                    continue
                work, future = entry
                received += 1
                for _ in range(self._permits(work)):
                    permits.release()
                output = _result(future)
                yield (work,), (output,), isinstance(output, Exception)
            feeding.result()
        finally:
            feeding.cancel()
            self.stop()


def _result(future: concurrent.futures.Future[Answers]) -> Answers | BaseException:
    if future.cancelled():
        return StoppedError("the batch was stopped")
    error = future.exception()
    return future.result() if error is None else error
