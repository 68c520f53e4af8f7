"""`RowStream`: the rows of a source with a loaded model's outputs, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from headrace.app.jobs.plan import Plan, output_column
from headrace.app.jobs.running import RunningModel
from headrace.app.jobs.tables import ListedRow
from headrace.batching.blocking import current_loop
from headrace.concurrency.loop_thread import LoopThread
from headrace.errors import ConfigError, EngineDeadError
from headrace.io.formats.writer import row_of
from headrace.jobs.pipeline.chunks import answers
from headrace.jobs.pipeline.infer import in_order, longest_first
from headrace.jobs.pipeline.prepare import Preparation
from headrace.jobs.pipeline.work import PreparedChunk, RefusedError, StepAnswer, Work
from headrace.records import Failed, Ok


class RowStream:
    """The rows of a source with their outputs: loop over it with `for` or `async for`, once or several times.

    Leaving the loop cancels the rows that are not finished.

    Args:
        loop: that of the model.
        open_rows: begins to read, and gives lists of finished rows on that loop. Blocks.
    """

    def __init__(self, loop: LoopThread, open_rows: Callable[[], AsyncGenerator[list[ListedRow], None]]) -> None:
        self._loop = loop
        self._open = open_rows

    def __iter__(self) -> Iterator[ListedRow]:
        """Each row.

        Raises:
            ConfigError: a file, column or setting cannot be used; or an event loop runs here.
            JobError: the input cannot be read further, after all rows before that.
        """
        if current_loop() is not None:
            raise ConfigError("this loop would block the running event loop: use `async for` there")
        rows = self._open()
        try:
            while some := self._loop.run(_following(rows)):
                yield from some
        finally:
            self._loop.run(rows.aclose())

    async def __aiter__(self) -> AsyncIterator[ListedRow]:
        """Each row. Raises as `__iter__`."""
        rows = await asyncio.to_thread(self._open)
        try:
            while some := await asyncio.wrap_future(self._loop.submit(_following(rows))):
                for row in some:
                    yield row
        finally:
            await asyncio.wrap_future(self._loop.submit(_closed(rows)))


async def _following(rows: AsyncGenerator[list[ListedRow], None]) -> list[ListedRow]:
    return await anext(rows, [])


async def _closed(rows: AsyncGenerator[list[ListedRow], None]) -> None:
    await rows.aclose()


async def finished_rows(model: RunningModel, plan: Plan, *, ordered: bool) -> AsyncGenerator[list[ListedRow], None]:
    """Lists of finished rows, none of which is empty. Runs on the loop of the model, and closes the plan."""
    feed = _RowFeed(model, plan, ordered=ordered)
    try:
        async with aclosing(answers(model.batcher, feed.runs())) as answered:
            async for run, outputs, _ in answered:
                for work, output in zip(run, outputs, strict=True):
                    feed.ended(work, output)
                if rows := feed.take():
                    yield rows
        if rows := feed.take():
            yield rows
    finally:
        feed.close()


class _RowFeed:
    """Reads and prepares the rows of a source, and gives out those that are finished."""

    def __init__(self, model: RunningModel, plan: Plan, *, ordered: bool) -> None:
        self._plan = plan
        self._column = output_column(plan.settings)
        self._preparation = Preparation(plan.columns, model.engine, plan.user, dedupe=False)
        self._runs = in_order if model.profile.caches_prefixes else longest_first
        self._chunks = plan.source.chunks(lambda position: position)
        self._thread = ThreadPoolExecutor(1, "headrace-stream")
        self._most = 2 * model.profile.window if model.profile.runs_batches else 4 * model.profile.width
        self._waiting: deque[int] | None = deque() if ordered else None
        """The positions of the rows that were read and not given out, in the order of the input."""
        self._done: dict[int, ListedRow] = {}
        self._moved = asyncio.Event()

    async def runs(self) -> AsyncGenerator[Sequence[Work], None]:
        """Runs of rows for the batcher. At most some batches of rows are read ahead of those that are given out."""
        loop = asyncio.get_running_loop()
        while (chunk := await loop.run_in_executor(self._thread, self._read)) is not None:
            if self._waiting is not None:
                works = [*(work for work, _ in chunk.answered), *chunk.work]
                self._waiting += sorted(work.record.position for work in works)
            for work, answer in chunk.answered:
                self.ended(work, answer)
            for run in self._runs(chunk.work):
                yield run
            while self._waiting is not None and len(self._waiting) > self._most:
                yield ()  # no row need wait for others
                self._moved.clear()
                await self._moved.wait()

    def ended(self, work: Work, answer: object) -> None:
        """A row has its output, or its error. Raises EngineDeadError: no later row can be computed."""
        if isinstance(answer, EngineDeadError):
            raise answer
        self._done[work.record.position] = self._row(work, answer.output if isinstance(answer, StepAnswer) else answer)

    def take(self) -> list[ListedRow]:
        if self._waiting is None:
            rows = list(self._done.values())
            self._done.clear()
            return rows
        rows = []
        while self._waiting and self._waiting[0] in self._done:
            rows.append(self._done.pop(self._waiting.popleft()))
        self._moved.set()
        return rows

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._plan.close()

    def _read(self) -> PreparedChunk | None:
        """The next rows, prepared. Runs on the thread."""
        chunk = next(self._chunks, None)
        return None if chunk is None else self._preparation.prepare(chunk)[0]

    def _row(self, work: Work, answer: object) -> ListedRow:
        record = work.record
        if not isinstance(answer, Exception):
            return row_of(Ok(record, answer, work.cost, work.row), self._column)
        failed = answer.failed if isinstance(answer, RefusedError) else Failed.of(work.original, answer, work.attempt)
        return failed.as_row()
