"""The first stage: read chunks of the input, in order, on one thread, and check that no id occurs twice."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from headrace.engines.profile import profile_of
from headrace.errors import BrokenOffError
from headrace.events import InputLeftOut, StageDone
from headrace.io.base import Chunk
from headrace.io.sources.unique_ids import Found, SeenIds
from headrace.jobs.pipeline.job import Job
from headrace.jobs.pipeline.memory_budget import Memory, rows_bytes
from headrace.jobs.pipeline.ordering import Ordering
from headrace.jobs.pipeline.work import PreparedChunk
from headrace.jobs.state.passes import Pass
from headrace.records import Record

_ALL_ROWS = 1 << 20
"""For an engine without `prepare_rows`: chunks are prepared as read."""


class Reader:
    """Reads the unfinished records, in the order of work."""

    def __init__(self, job: Job, todo: Pass, ordering: Ordering | None, memory: Memory) -> None:
        self._ordering = ordering
        self._place = todo.place
        self._next_todo = todo.next_todo
        self._listener = job.listener
        self._source = job.source
        self._user = job.user
        self._memory = memory
        self._seen: SeenIds | None = None
        """Made on the thread, because it reads files."""
        chunks = self._with_unique_ids(job) if job.unique_ids else job.source.chunks(todo.next_todo)
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
        if self._seen is None or not self._user.prepares:
            return
        before = [] if chunk is None else chunk.work
        done = await asyncio.get_running_loop().run_in_executor(self._thread, self._check_made, self._seen, chunk)
        if chunk is not None:
            self._memory.release(done)
            self._memory.release_prepared(before)
            self._memory.hold_prepared(chunk.work)

    def _check_made(self, seen: SeenIds, chunk: PreparedChunk | None) -> list[int]:
        """Look at the ids of a chunk and drop its finished records; returns their positions. Runs on the thread."""
        if chunk is None:
            seen.look()
            return []
        positions = chunk.positions()
        new = [work.record for work in chunk.work if work.record.position >= seen.known]
        end = positions[-1] + 1 if positions else 0
        seen.add([id_digest(record.id) for record in new], [record.position for record in new], end)
        done = [position for position in positions if self._next_todo(position) != position]
        chunk.drop(frozenset(done))
        return done

    def _with_unique_ids(self, job: Job) -> Iterator[Chunk]:
        """The unfinished rows. Their ids are unique so far; those that user code makes are left to `check_ids`.

        Finished rows are read again if no run in the working folder contains their ids.

        Raises:
            JobError: an id is duplicated.
        """
        column, next_todo, later = job.columns.id or "", self._next_todo, self._user.prepares
        seen = self._seen = SeenIds(job.output.scratch, functools.partial(self._all_ids, column), column)
        known = seen.known
        for chunk in self._source.chunks(lambda position: next_todo(position) if position < known else position):
            if later:
                yield chunk
                continue
            new = [row for row in chunk.records if row.position >= known]
            last = [*chunk.records[-1:], *(failed.record for failed in chunk.failures)]
            end = max((row.position + 1 for row in last), default=0)
            seen.add([id_digest(row.data.get(column)) for row in new], [row.position for row in new], end)
            yield _todo_of(chunk, next_todo)
        if not later:
            seen.look()

    def _all_ids(self, column: str) -> Iterator[Found]:
        """The position and the id of each record of the input, read once more."""
        for chunk in self._source.chunks(lambda position: position):
            for _, record in self._user.prepared(chunk.records):
                if isinstance(record, Record):
                    yield record.position, record.data.get(column)

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


def id_digest(value: object) -> bytes:
    """An eight-byte digest; empty if the value is not an id."""
    if type(value) is not str and type(value) is not int:
        return b""
    return hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _todo_of(chunk: Chunk, next_todo: Callable[[int], int]) -> Chunk:
    """The rows of a chunk that are not finished."""
    return replace(
        chunk,
        records=[record for record in chunk.records if next_todo(record.position) == record.position],
        failures=[failed for failed in chunk.failures if next_todo(failed.record.position) == failed.record.position],
    )


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
