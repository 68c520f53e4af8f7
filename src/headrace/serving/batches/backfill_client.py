"""A batcher for a bulk job on a thread of its own, which in truth is the server's, shared with its requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, AsyncIterable, Hashable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from headrace.errors import StoppedError
from headrace.io.formats.openai_batch import Answers
from headrace.serving.admission.backfill import Backfill
from headrace.serving.batches.lines import Line


class PreparedWork(Protocol):
    """A record of a job, ready for the engine."""

    @property
    def payload(self) -> Line:
        """What the engine is to do."""
        ...


class BackfillClient:
    """What a job needs of a batcher, over the server's backfill.

    Args:
        backfill: lets records into the batcher.
        loop: the server's.
        caller: whose share of the batches the job counts on.
        ahead: inputs that are read and not yet answered, at most.
    """

    def __init__(self, backfill: Backfill, loop: asyncio.AbstractEventLoop, caller: Hashable, ahead: int) -> None:
        self._backfill = backfill
        self._loop = loop
        self._caller = caller
        self._ahead = ahead
        self._open: set[concurrent.futures.Future[Any]] = set()
        self._stopped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Give up what is not answered; from any thread."""
        self._stopped = True
        for future in list(self._open):
            future.cancel()

    def _places(self, work: PreparedWork) -> int:
        """How much of what may be under way a record takes."""
        return min(max(len(work.payload.parts), 1), self._ahead)

    async def _answer(self, line: Line) -> Answers:
        """A line's outputs. Runs on the server's loop.

        Raises:
            Exception: the first of its inputs that has none.
        """
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
        self, runs: AsyncIterable[Sequence[PreparedWork]]
    ) -> AsyncGenerator[tuple[Sequence[Any], Sequence[Any], bool], None]:
        """Records that come in runs, each with its output or exception as it ends, one at a time."""

        async def each() -> AsyncGenerator[PreparedWork, None]:
            async for run in runs:
                for work in run:
                    yield work

        async with aclosing(self.as_completed(each())) as ended:
            async for work, output in ended:
                yield (work,), (output,), isinstance(output, Exception)

    async def as_completed(self, records: AsyncIterable[PreparedWork]) -> AsyncGenerator[tuple[Any, Any], None]:
        """Each record with its output, or with its exception, as it ends."""
        own = asyncio.get_running_loop()
        ended: asyncio.Queue[tuple[Any, concurrent.futures.Future[Any]] | None] = asyncio.Queue()
        room = asyncio.Semaphore(self._ahead)
        sent = got = 0

        def over(work: PreparedWork, future: concurrent.futures.Future[Any]) -> None:
            self._open.discard(future)
            if not own.is_closed():
                own.call_soon_threadsafe(ended.put_nowait, (work, future))

        async def feed() -> None:
            nonlocal sent
            async for work in records:
                for _ in range(self._places(work)):
                    await room.acquire()
                future = asyncio.run_coroutine_threadsafe(self._answer(work.payload), self._loop)
                sent += 1
                self._open.add(future)
                future.add_done_callback(partial(over, work))
                if self._stopped:
                    future.cancel()

        feeding = own.create_task(feed(), name="headrace-batch-feed")
        feeding.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            while not feeding.done() or got < sent:
                entry = await ended.get()
                if entry is None:
                    continue
                got += 1
                for _ in range(self._places(entry[0])):
                    room.release()
                yield entry[0], _result(entry[1])
            feeding.result()
        finally:
            feeding.cancel()
            self.stop()


def _result(future: concurrent.futures.Future[Any]) -> Any:
    if future.cancelled():
        return StoppedError("the batch was stopped")
    error = future.exception()
    return future.result() if error is None else error
