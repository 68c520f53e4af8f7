"""The first stage: read chunks of the input, in order, on one thread, check that no id occurs twice, and read ahead."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, Self, TypeVar

from headrace.engines.capabilities import COLUMNS
from headrace.engines.profile import profile_of
from headrace.errors import BrokenOffError, JobError
from headrace.events import InputLeftOut, PipelineWaited, StageDone
from headrace.io.base import Chunk, ColumnSource
from headrace.io.sources.unique_ids import Found, SeenIds
from headrace.io.storage.row_tables import SourceTable
from headrace.io.storage.rows import positions_todo
from headrace.jobs.pipeline import arrow
from headrace.jobs.pipeline.concurrency_tuner import ConcurrencyTuner
from headrace.jobs.pipeline.dedupe import RepeatCounter
from headrace.jobs.pipeline.inputs import id_text, table_columns
from headrace.jobs.pipeline.job import Job, Tally
from headrace.jobs.pipeline.memory_budget import Memory, chunk_bytes
from headrace.jobs.pipeline.ordering import Ordering
from headrace.jobs.pipeline.prepare import Preparation
from headrace.jobs.pipeline.prepare_calls import InTime
from headrace.jobs.pipeline.settle import LOOK_S, Settling
from headrace.jobs.pipeline.work import PreparedChunk
from headrace.jobs.state.job_state import Pass
from headrace.records import Record, has_value, keep_exact, value_at
from headrace.wording import shown

T = TypeVar("T")

_FIRST_ROWS = 512
"""Rows of a block at first, and while the engine is slow, unless its window is long."""
_IN_WINDOW = 8
"""Such blocks in a window of records that wait for the engine: a stop meets all of them."""
_QUICK_S = 2.5e-4
"""Seconds a row below which a job is fast."""
_QUICK_BLOCKS = 8
"""Blocks in a row that must be asked for quickly before they become longer: more than are read ahead."""
_BLOCK_S = 0.5
"""Seconds that a longer block may take."""
_LONG_ROW_BYTES = 64 * 1024
"""Rows of more bytes go one by one: what they cost a job is little beside their length, but as objects, which an output
may need, they take several times the memory of their table."""
_ALL_ROWS = 1 << 20
"""For an engine without `prepare_rows`: chunks are prepared as read."""


class Reader:
    """Reads the unfinished records, in the order of work."""

    def __init__(self, job: Job, todo: Pass, ordering: Ordering | None, memory: Memory) -> None:
        self._ordering = ordering
        self._job = job
        self._todo = todo
        self._source = job.source
        self._memory = memory
        self._seen: SeenIds | None = None
        """Made on the thread, because it reads files."""
        if job.in_blocks and ordering is None and job.columns.are_plain and isinstance(self._source, ColumnSource):
            self._source = self._source.in_columns(job.columns.used())
        chunks = self._with_unique_ids() if job.unique_ids else self._source.chunks(todo.next_todo)
        self._kept = job.columns.keep if job.columns.exact else ()
        chunks = _keeping(chunks, self._kept)
        if ordering is not None:
            chunks = ordering.chunks(chunks)
        profile = profile_of(job.engine)
        pace = Pace(profile.prepare_rows or _ALL_ROWS, profile.window // _IN_WINDOW if profile.runs_batches else 0)
        self._chunks = portions(chunks, pace)
        self._thread = ThreadPoolExecutor(1, "headrace-read")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ordering is not None:
            self._ordering.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._chunks, self._seen = iter(()), None  # the digests of ids are large, and in a circle with this

    async def read(self) -> Chunk | None:
        """The next chunk; None at the end of the input. Calls are served in order.

        Raises:
            JobError: reading the input failed.
        """
        loaded = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        for chosen in self._ordering.chosen() if self._ordering is not None else ():
            self._job.listener(chosen)
        if loaded is None:
            return None
        chunk, size, event = loaded
        self._job.listener(event)
        for left_out in chunk.left_out:
            self._job.listener(InputLeftOut(left_out, event.at))
        self._memory.hold(*chunk.extent(self._todo.place), size)
        return chunk

    async def check_ids(self, chunk: PreparedChunk | None) -> None:
        """Check the ids that user code made for the next chunk and drop finished records; pass None at the end.

        Raises:
            JobError: an id occurs twice, or in a retry another record is at the place of the one that failed.
        """
        if chunk is not None and (may_be := self._todo.may_be) is not None:
            rows = [work.record for work in (*chunk.work, *(work for work, _ in chunk.answered))]
            for record in itertools.chain(rows, *(block.identities() for block in chunk.blocks)):
                if not may_be(record.position, record.id):
                    raise JobError(
                        f"record {record.position} has the id {shown(record.id)}, and is not the one that "
                        "failed there: put all rows back to their places, or run the whole job again with "
                        "``overwrite=True``"
                    )
        if self._seen is None or not self._job.user.prepares:
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
        seen.add([id_text(record.id) for record in new], [record.position for record in new], end)
        done = [position for position in positions if self._todo.next_todo(position) != position]
        chunk.drop(frozenset(done))
        return done

    def _with_unique_ids(self) -> Iterator[Chunk]:
        """The unfinished rows. Their ids are unique so far; those that user code makes are left to `check_ids`.

        Finished rows are read again if no run in the working folder contains their ids.
        """
        job, next_todo = self._job, self._todo.next_todo
        column, later = job.columns.id or "", job.user.prepares
        seen = self._seen = SeenIds(job.output.scratch, functools.partial(self._all_ids, column), column)
        known = seen.known
        for chunk in self._source.chunks(seen.unseen(next_todo)):
            if later:
                yield chunk
                continue
            _add_ids(seen, chunk, column, known)
            yield _unfinished(chunk, next_todo)
        if not later:
            seen.look()

    def _all_ids(self, column: str) -> Iterator[Found]:
        """The position and the id of each record of the input, read once more."""
        for chunk in self._source.chunks(lambda position: position):
            for _, record in self._job.user.prepared(chunk.records):
                if isinstance(record, Record):
                    yield record.position, _id_in(record, column)

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
        if (table := chunk.table) is not None and (
            table.nbytes > _LONG_ROW_BYTES * len(table) or table_columns(self._job.columns, table) is None
        ):
            # Its rows become Python objects: they are counted as such, and the table is not held beside them.
            [chunk] = _keeping(iter([replace(chunk, records=list(chunk.records), table=None)]), self._kept)
        size = chunk_bytes(chunk)
        ended = time.monotonic()
        return chunk, size, StageDone("load", chunk.rows, ended - started, ended, bytes=chunk.bytes)


class Prefetcher:
    """Takes chunks from the reader, and records to retry from `settling`.

    At most `workers + 1` chunks are read or prepared at once, and none is read while `memory` has no room, so memory
    does not grow with the input. `tally` counts the records read.
    """

    def __init__(self, job: Job, todo: Pass, reader: Reader, settling: Settling, tally: Tally, memory: Memory) -> None:
        self._job = job
        self._reader = reader
        self._settling = settling
        self._tally = tally
        self._memory = memory
        settings = job.settings
        # Engines of other kinds generate, perhaps by chance.
        counts = settings.dedupe is None and profile_of(job.engine).runs_batches
        self._preparation = Preparation(
            job.columns, job.engine, job.user, settings.dedupe, InTime(settings.config.call_timeout_s),
            RepeatCounter() if counts else None, in_blocks=job.in_blocks, place=todo.place,
            preparer=job.preparers or COLUMNS.of(job.engine), form=job.form, samples=job.samples,
        )  # fmt: skip
        self._concurrency = ConcurrencyTuner(settings.limits.workers, os.cpu_count() or 1)
        self._workers = ThreadPoolExecutor(self._concurrency.most, "headrace-prepare")
        self._ahead: deque[asyncio.Task[PreparedChunk | None]] = deque()
        self._reading = 0
        self._ended = False
        self._told = False
        """Whether `next_chunk` has said that no other follows."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def next_chunk(self) -> PreparedChunk | None:
        """The next prepared chunk, in input order; None when every record is settled or the job is asked to stop.

        An empty one says that no other follows before records are settled.

        Raises:
            JobError: reading the input failed, or the engine died.
        """
        settling = self._settling
        while not self._job.stop.requested:
            if again := settling.to_try_again():
                self._told = False
                return await self._prepare(self._preparation.prepare_again, again)
            if not self._ended and settling.has_room:
                if (ready := await self._next_read(settling.next_try_in())) is not None:
                    self._told = False
                    return ready
            elif settling.unsettled and not self._told:
                self._told = True
                return PreparedChunk()
            elif settling.unsettled:
                await self._wait("retry" if settling.next_try_in() is not None else None, settling.wait())
            else:
                return None
        return None

    async def is_exhausted(self) -> bool:
        """Whether every record of the input is settled. After a stop request too: its last ones may be in time.

        Raises:
            JobError: reading the input failed.
        """
        if self._settling.unsettled:
            return False
        if not self._ended and await self._next_read(LOOK_S) is not None:
            return False  # records that were read and are not run, perhaps the last ones
        return self._ended

    async def _next_read(self, at_most_s: float | None) -> PreparedChunk | None:
        """The next chunk, merged with later ones that are ready too; None if the time is up or the input has ended."""
        while len(self._ahead) <= self._concurrency.now and self._memory.has_room(self._reading):
            self._reading += 1
            self._ahead.append(asyncio.create_task(self._read_and_prepare(), name="headrace-prepare"))
        if not self._ahead:
            room = self._memory.wait_for_room(LOOK_S if at_most_s is None else min(at_most_s, LOOK_S))
            await self._wait("sink" if self._memory.committing else "memory", room)
            return None
        started = time.monotonic()
        if not (await asyncio.wait({self._ahead[0]}, timeout=at_most_s))[0]:
            return None
        self._concurrency.waited(time.monotonic() - started)
        ready: PreparedChunk | None = None
        while self._ahead and self._ahead[0].done():
            if ready and self._ahead[0].exception() is not None:
                break  # return the earlier chunks first
            chunk = self._ahead.popleft().result()
            await self._reader.check_ids(chunk)
            if chunk is None:
                self._ended = True
                break
            self._tally.expect(len(chunk), chunk.bytes)
            if ready is None:
                ready = chunk
            else:
                ready.add(chunk)
        return ready or None

    async def _wait(self, on: Literal["sink", "memory", "retry"] | None, wait: Awaitable[None]) -> None:
        started = time.monotonic()
        await wait
        if on is not None:
            ended = time.monotonic()
            self._job.listener(PipelineWaited(on, ended - started, ended))

    async def _read_and_prepare(self) -> PreparedChunk | None:
        """The next chunk. Tasks start in order of creation and share one reader, so chunks keep their order."""
        try:
            chunk = await self._reader.read()
        finally:
            self._reading -= 1
        if chunk is None:
            return None
        prepared = await self._prepare(self._preparation.prepare, chunk)
        prepared.bytes, prepared.in_order = chunk.bytes, chunk.in_order
        return prepared

    async def _prepare(self, call: Callable[[T], tuple[PreparedChunk, StageDone]], argument: T) -> PreparedChunk:
        prepared, event = await asyncio.get_running_loop().run_in_executor(self._workers, call, argument)
        self._concurrency.prepared(event.duration_s)
        self._job.listener(event)
        self._memory.hold_prepared(prepared.work)
        for block in prepared.blocks:
            self._memory.prepared += block.row_bytes * block.to_run
        return prepared


def _add_ids(seen: SeenIds, chunk: Chunk, column: str, known: int) -> None:
    """Note the ids of the rows from position `known` on."""
    table = chunk.table
    ids = None if table is None else arrow.column_at(table, column)
    end = max((failed.record.position + 1 for failed in chunk.failures), default=0)
    if table is not None and ids is not None and arrow.holds_ids(ids):
        seen.add_column(ids, table.positions, max(end, int(table.positions[-1]) + 1))
        return
    new = [row for row in chunk.records if row.position >= known]
    end = max(end, *(row.position + 1 for row in chunk.records[-1:]), 0)
    seen.add([_id_in(row, column) for row in new], [row.position for row in new], end)


def _id_in(record: Record, column: str) -> str | None:
    """The text of a record's id; None if it has none."""
    return id_text(value_at(record.data, column) if has_value(record.data, column) else None)


def _unfinished(chunk: Chunk, next_todo: Callable[[int], int]) -> Chunk:
    """The rows of a chunk that are not done."""
    failures = [failed for failed in chunk.failures if next_todo(failed.record.position) == failed.record.position]
    table = chunk.table
    if not isinstance(table, SourceTable):
        records = [record for record in chunk.records if next_todo(record.position) == record.position]
        return replace(chunk, records=records, failures=failures, table=None)
    import numpy

    todo = positions_todo(int(table.positions[0]), int(table.positions[-1]) + 1, next_todo)
    rows = numpy.flatnonzero(numpy.isin(table.positions, todo))
    if len(rows) == len(table):
        return replace(chunk, failures=failures)
    left = table.only(rows)
    return replace(chunk, records=left, failures=failures, table=left if len(left) else None)


def _keeping(chunks: Iterator[Chunk], names: Sequence[str]) -> Iterator[Chunk]:
    """The chunks, whose rows hold no more of their tables than the columns to copy."""
    for chunk in chunks:
        for record in chunk.records if chunk.table is None else ():
            keep_exact(record.data, names)
        yield chunk


class Pace:
    """How many rows of a table make a block: more while the job asks for blocks quickly, so that each is work for a
    moment only. A stop or a kill meets what was read and not finished. Pure: takes times, reads no clock.

    Args:
        first: its rows at first, if that is more than 512.
    """

    def __init__(self, most: int, first: int = 0) -> None:
        self.most = most
        self._first = min(max(_FIRST_ROWS, first), most)
        self.rows = self._first
        """Rows of the next block."""
        self._quick, self._quick_s = 0, 0.0

    def asked(self, seconds: float) -> None:
        """Count the seconds from one request for a block to the next."""
        if seconds > _QUICK_S * self.rows:
            self.rows, self._quick, self._quick_s = self._first, 0, 0.0
            return
        self._quick, self._quick_s = self._quick + 1, self._quick_s + seconds
        if self._quick == _QUICK_BLOCKS:
            times = min(4, _BLOCK_S * _QUICK_BLOCKS / max(self._quick_s, 1e-9))
            self.rows = min(max(self.rows, int(times * self.rows)), self.most)
            self._quick, self._quick_s = 0, 0.0


def portions(chunks: Iterator[Chunk], pace: Pace, clock: Callable[[], float] = time.monotonic) -> Iterator[Chunk]:
    """Split chunks into chunks of at most `pace.most` records; those with a table go at the pace of the job."""
    asked = clock()
    for chunk in chunks:
        while len(chunk.records) > (pace.most if chunk.table is None else pace.rows):
            part, chunk = chunk.split(pace.most if chunk.table is None else pace.rows)
            yield part
            del part
            before, asked = asked, clock()
            pace.asked(asked - before)
        yield chunk
        before, asked = asked, clock()
        pace.asked(asked - before)
        del chunk  # no rows may stay referenced while the next ones are read
