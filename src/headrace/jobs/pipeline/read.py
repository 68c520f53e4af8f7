"""The first stage: read chunks of the input, in order, on one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from headrace.engines.profile import profile_of
from headrace.errors import BrokenOffError
from headrace.events import InputLeftOut, StageDone
from headrace.io.base import Chunk
from headrace.jobs.pipeline.job import Job
from headrace.jobs.pipeline.memory_budget import Memory, rows_bytes
from headrace.jobs.pipeline.ordering import Ordering
from headrace.jobs.pipeline.work import PreparedChunk
from headrace.jobs.state.passes import Pass

_ALL_ROWS = 1 << 20
"""For an engine without `prepare_rows`: chunks are prepared as read."""


class Reader:
    """Reads the unfinished records, in the order of work."""

    def __init__(self, job: Job, todo: Pass, ordering: Ordering | None, memory: Memory) -> None:
        self._ordering = ordering
        self._place = todo.place
        self._listener = job.listener
        self._ids = job.ids
        self._memory = memory
        source = job.ids or job.source
        chunks = source.chunks(todo.next_todo)
        if ordering is not None:
            chunks = ordering.chunks(chunks)
        self._chunks = portions(chunks, profile_of(job.engine).prepare_rows or _ALL_ROWS)
        self._thread = ThreadPoolExecutor(1, "headrace-read")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ordering is not None:
            self._ordering.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self) -> Chunk | None:
        """The next chunk; None at the end of the input. Calls are served in order.

        Raises:
            JobError: reading the input failed.
        """
        loaded = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        for chosen in self._ordering.chosen() if self._ordering is not None else ():
            self._listener(chosen)
        if loaded is None:
            return None
        chunk, size, event = loaded
        self._listener(event)
        for left_out in chunk.left_out:
            self._listener(InputLeftOut(left_out, event.at))
        self._memory.hold(*chunk.extent(self._place), size)
        return chunk

    async def check_ids(self, chunk: PreparedChunk | None) -> None:
        """Check the ids that user code made for the next chunk and drop finished records; pass None at the end.

        Raises:
            JobError: an id occurs twice.
        """
        if self._ids is None:
            return None
        loop = asyncio.get_running_loop()
        if chunk is None:
            return await loop.run_in_executor(self._thread, self._ids.finish)
        before = chunk.work
        self._memory.release(await loop.run_in_executor(self._thread, self._ids.check, chunk))
        self._memory.release_prepared(before)
        self._memory.hold_prepared(chunk.work)
        return None

    def _load(self) -> tuple[Chunk, int, StageDone] | None:
        """The next chunk and its bytes in memory. Runs on the thread."""
        started = time.monotonic()
        try:
            chunk = next(self._chunks, None)
        except OSError as error:
            raise BrokenOffError(
                f"cannot read more of the input: {error}; finished records are kept; run again to continue"
            ) from error
        if chunk is None:
            return None
        size = rows_bytes(chunk.records, chunk.failures)
        ended = time.monotonic()
        records = len(chunk.records) + len(chunk.failures)
        return chunk, size, StageDone("load", records, ended - started, ended, bytes=chunk.bytes)


def portions(chunks: Iterator[Chunk], rows: int) -> Iterator[Chunk]:
    """Split chunks into chunks of at most `rows` records."""
    for chunk in chunks:
        if len(chunk.records) <= rows:
            yield chunk
        else:
            yield replace(chunk, records=chunk.records[:rows])
            for start in range(rows, len(chunk.records), rows):
                yield Chunk(chunk.records[start : start + rows], (), 0, in_order=chunk.in_order)
        del chunk  # no rows may stay referenced while the next ones are read
