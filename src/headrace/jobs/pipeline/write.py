"""The last stage: order, encode and commit finished records, on one thread."""

from __future__ import annotations

import asyncio
import itertools
import operator
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, TypeAlias

from headrace.errors import BrokenOffError
from headrace.events import Event, PartCommitted, PipelineWaited, RecordFailed, StageDone
from headrace.io.storage.parts import Interval
from headrace.jobs.pipeline.blocks import Block, BlockPiece, RecordPiece, RowsDone, outputs_size
from headrace.jobs.pipeline.job import Job, Tally
from headrace.jobs.pipeline.memory_budget import PARTS, Memory, outputs_bytes
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import UnfinishedOutput
from headrace.jobs.state.job_state import Pass
from headrace.records import Failed, Ok, Outcome

SMALL_RUN = 32
"""A run of fewer rows waits longer in proportion, a single row 32 intervals. Its neighbours are probably in flight, and
a file for each fragment would cost more than computing the fragment again after a kill."""
_BACKLOG_RUNS = 2
"""Maximum full runs that wait for the disk; above this number `put` waits."""
_FIRST_FINISHED = 64
"""Records passed to `finish` together until the size of its outputs is known."""
SHARE_AT_RISK = 0.01
"""Fraction of the run time that a kill may lose: longer runs wait longer, so that slow engines make fewer parts."""
_LONGEST_WAIT_S = 60.0
_PART_S = 0.25
"""Seconds of work in a part: of fewer, finding a place for it on the disk costs more than its rows."""
_LEAST_ROWS, _MOST_ROWS = 4096, 1 << 16
"""Rows of such a part."""


def least_wait_s(age_s: float) -> float:
    """Minimum seconds that rows wait to fill their part, in a run of that age."""
    return min(age_s * SHARE_AT_RISK, _LONGEST_WAIT_S)


def part_rows(done: int, age_s: float) -> int:
    """Rows of a part in a run of that age that has finished `done` rows."""
    return min(max(int(done / max(age_s, _PART_S) * _PART_S), _LEAST_ROWS), _MOST_ROWS)


OutcomePiece: TypeAlias = RecordPiece | BlockPiece
_start = operator.attrgetter("start")


@dataclass(slots=True)
class _Stretch:
    start: int
    end: int
    oldest: float
    pieces: list[OutcomePiece]


class Coalescer:
    """Holds finished outcomes by place and returns runs of consecutive ones. Pure: reads no clock.

    A run is due when it has `part_records` rows, or when its oldest row has waited `interval_s` seconds (longer if it
    has fewer than 32 rows). A run has fewer rows than 2 × `part_records` plus those added last. `place` numbers the
    positions if they have gaps.

    The rows of a block are held by the block, and become a part of a run when all have an outcome, or when one of them
    has waited for long.
    """

    def __init__(self, part_records: int, interval_s: float, place: Callable[[int], int] | None = None) -> None:
        self.part_records = part_records
        """Rows of a full run; a change applies to rows added later."""
        self._interval_s = interval_s
        self._place = place
        self._count = 0
        self._by_start: dict[int, _Stretch] = {}
        self._by_end: dict[int, _Stretch] = {}
        self._full: deque[_Stretch] = deque()
        self._blocks: list[Block] = []
        """Those that have rows without an outcome, by their first place, ascending."""

    def __len__(self) -> int:
        return self._count

    @property
    def full_runs(self) -> int:
        """Number of full runs."""
        return len(self._full)

    def open(self, block: Block) -> None:
        """Expect the outcomes of a block's rows."""
        insort(self._blocks, block, key=_start)

    def add_rows(self, done: RowsDone, now: float) -> None:
        """Add outputs of rows of a block that is open."""
        block = done.block
        block.put(done.rows, done.outputs)
        self._added(block, len(done.rows), now)

    def add(self, outcomes: Sequence[Outcome], now: float) -> None:
        """Add outcomes, each position once. Fastest for consecutive positions."""
        places = [outcome.record.position for outcome in outcomes]
        if self._place is not None:
            places = list(map(self._place, places))
        if self._blocks:
            alone = [not self._add_to_block(*pair, now) for pair in zip(places, outcomes, strict=True)]
            places = list(itertools.compress(places, alone))
            outcomes = list(itertools.compress(outcomes, alone))
        start = 0
        for end in range(1, len(outcomes) + 1):
            if end == len(outcomes) or places[end] != places[end - 1] + 1:
                self._count += end - start
                self._add_run(places[start], RecordPiece(outcomes[start:end]), now)
                start = end

    def _add_to_block(self, place: int, outcome: Outcome, now: float) -> bool:
        """Add an outcome to the open block that has this place; returns whether there is one."""
        at = bisect_right(self._blocks, place, key=_start) - 1
        if at < 0 or place >= self._blocks[at].end:
            return False
        block = self._blocks[at]
        block.put_one(place - block.start, outcome)
        self._added(block, 1, now)
        return True

    def _added(self, block: Block, rows: int, now: float) -> None:
        self._count += rows
        block.oldest = min(block.oldest, now)
        if not block.open:
            self._blocks.remove(block)
            self._give_out(block)

    def _give_out(self, block: Block) -> None:
        """Make runs of the rows of a block that have an outcome."""
        oldest = block.oldest
        rows = self.part_records
        for start, stop in block.give():
            for begin in range(start, stop, rows):
                end = min(begin + rows, stop)
                self._add_run(block.start + begin, BlockPiece(block, begin, end), oldest)

    def _add_run(self, start: int, piece: OutcomePiece, now: float) -> None:
        run = _Stretch(start, start + len(piece), now, [piece])
        if (left := self._by_end.pop(start, None)) is not None:
            run = _Stretch(left.start, run.end, min(left.oldest, now), left.pieces)
            run.pieces.append(piece)
        if (right := self._by_start.pop(run.end, None)) is not None:
            run.end, run.oldest = right.end, min(run.oldest, right.oldest)
            run.pieces += right.pieces
        self._by_start[run.start] = self._by_end[run.end] = run
        if run.end - run.start >= self.part_records:
            self._close(run)
            self._full.append(run)

    def take(self, now: float, least_wait_s: float = 0.0) -> tuple[Interval, list[OutcomePiece]] | None:
        """The interval and the pieces, in order, of a run that is due; None if none is.

        Args:
            least_wait_s: minimum seconds that the oldest row of a run waits, unless the run is full.
        """
        if not self._full:
            for block in self._blocks:
                if now - block.oldest >= max(least_wait_s, self._interval_s):
                    self._give_out(block)
        if self._full:
            return self._give(self._full.popleft())
        for run in self._by_start.values():
            if now - run.oldest >= max(least_wait_s, self._interval_s * max(1.0, SMALL_RUN / (run.end - run.start))):
                self._close(run)
                return self._give(run)
        return None

    def _close(self, run: _Stretch) -> None:
        del self._by_start[run.start]
        del self._by_end[run.end]

    def _give(self, run: _Stretch) -> tuple[Interval, list[OutcomePiece]]:
        self._count -= run.end - run.start
        return Interval(run.start, run.end), run.pieces


class OutcomeWriter:
    """Takes outcomes in any order. Commits finished records on exit, also after an error."""

    def __init__(self, job: Job, todo: Pass, tally: Tally, memory: Memory) -> None:
        limits = job.settings.limits
        self._parts = todo.sink
        self._job = job
        self._tally = tally
        self._memory = memory
        self._tick_s = limits.commit_interval_s / 2
        self._began = time.monotonic()
        self._part_records = limits.part_records or (_LEAST_ROWS if job.output.table is not None else None)
        self._coalescer = Coalescer(self._part_records or _LEAST_ROWS, limits.commit_interval_s, todo.place)
        self._taken = 0
        self._thread = ThreadPoolExecutor(1, "headrace-sink")
        self._wake = asyncio.Event()
        memory.on_wait = self._wake.set
        self._finished_bytes = 0.0
        """Mean size of an output after `finish`, in bytes."""
        self._room = asyncio.Event()
        self._closing = False
        self._committer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._committer = asyncio.create_task(self._commit_all(), name="headrace-sink")
        self._committer.add_done_callback(lambda _: self._room.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._committer is not None, "entered"
        self._closing = True
        self._wake.set()
        try:
            await asyncio.shield(self._committer)
        finally:
            self._thread.shutdown(wait=True)

    def open(self, blocks: Sequence[Block]) -> None:
        """Expect the outcomes of the rows of these blocks."""
        for block in blocks:
            self._coalescer.open(block)

    async def put(self, settled: Sequence[Outcome | RowsDone]) -> None:
        """Take outcomes. Waits while the disk is behind.

        Raises:
            JobError: the output cannot be written.
            TooManyErrorsError: more records have failed than the job allows.
        """
        coalescer, memory = self._coalescer, self._memory
        now, count = time.monotonic(), 0
        most = self._part_records or part_rows(self._taken, now - self._began)
        coalescer.part_records = memory.part_rows(most)
        outcomes: list[Outcome] = []
        for one in settled:
            if isinstance(one, RowsDone):
                memory.outputs += outputs_size(one.outputs)
                coalescer.add_rows(one, now)
                count += len(one.rows)
            else:
                outcomes.append(one)
        memory.outputs += outputs_bytes(outcomes)
        coalescer.add(outcomes, now)
        failures = [outcome for outcome in outcomes if type(outcome) is Failed]
        self._report(failures)
        self._taken += count + len(outcomes)
        self._tally.count(count + len(outcomes), failures)
        if coalescer.full_runs or memory.wants(len(coalescer)):
            self._wake.set()
            if coalescer.full_runs > _BACKLOG_RUNS:
                await self._wait_for_room()
        self._raise_if_dead()

    async def _wait_for_room(self) -> None:
        """Wait until fewer full runs wait for the disk."""
        started = time.monotonic()
        while self._coalescer.full_runs > _BACKLOG_RUNS:
            self._room.clear()
            self._raise_if_dead()
            await self._room.wait()
        ended = time.monotonic()
        self._job.listener(PipelineWaited("sink", ended - started, ended))

    def _report(self, failures: Sequence[Failed]) -> None:
        for failed in failures:
            self._job.listener(RecordFailed(failed.record.position, failed.reason, failed.message))

    def _raise_if_dead(self) -> None:
        if self._committer is not None and self._committer.done():
            self._committer.result()

    async def _commit_all(self) -> None:
        """Commit runs when they are due; checked twice per interval."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            closing = self._closing
            wait_s = least_wait_s(time.monotonic() - self._began)
            while run := self._coalescer.take(self._now(closing), wait_s):
                self._memory.committing = True
                events, unfinished = await loop.run_in_executor(self._thread, self._commit, *run)
                self._release(run[0])
                for event in events:
                    self._job.listener(event)
                self._report(unfinished)
                self._tally.count(0, unfinished)
                self._room.set()
            self._memory.committing = False
            if closing:
                return
            try:
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _now(self, closing: bool) -> float:
        """The time; infinity to commit all rows, minus infinity to commit full runs only.

        While a job stops, rows wait for the rows between them, because every gap makes one more part.
        """
        if closing or self._memory.wants(len(self._coalescer)):
            return float("inf")
        return float("-inf") if self._job.stop.requested else time.monotonic()

    def _release(self, interval: Interval) -> None:
        places = range(interval.start, interval.end)
        self._memory.release(places)
        self._memory.release_outputs(len(places) / (len(places) + len(self._coalescer)))

    def _commit(self, interval: Interval, pieces: list[OutcomePiece]) -> tuple[tuple[Event, ...], list[Failed]]:
        """Finish, encode and write a run on the sink's thread. Returns events and new failures.

        Writes several parts if `finish` makes the outputs longer than a part's share of memory.
        """
        started = time.monotonic()
        if not self._job.user.finishes:
            return self._write(interval, pieces, [], started)
        outcomes = [outcome for piece in pieces if isinstance(piece, RecordPiece) for outcome in piece.outcomes]
        room, size, done = self._memory.limit / PARTS, 0, 0
        events: tuple[Event, ...] = ()
        unfinished: list[Failed] = []
        held: list[Outcome] = []  # outcomes of the current part
        failed: list[Failed] = []  # failures of the current part
        while done < len(outcomes):
            rows = max(1, int(room / self._finished_bytes)) if self._finished_bytes else _FIRST_FINISHED
            finished, failures = finish_all(outcomes[done : done + rows], self._job.user)
            finished_bytes = outputs_bytes(finished)
            self._finished_bytes = max(finished_bytes / len(finished), 1.0)
            held, failed, size, done = held + finished, failed + failures, size + finished_bytes, done + len(finished)
            if size >= room or done == len(outcomes):
                part = Interval(interval.start + done - len(held), interval.start + done)
                more, bad = self._write(part, [RecordPiece(held)], failed, started)
                events, unfinished = events + more, unfinished + bad
                held, failed, size, started = [], [], 0, time.monotonic()
        return events, unfinished

    def _write(
        self, interval: Interval, pieces: Sequence[OutcomePiece], unfinished: list[Failed], started: float
    ) -> tuple[tuple[Event, ...], list[Failed]]:
        try:
            written = self._parts.write(interval, pieces, self._job.output.writer)
        except OSError as error:
            raise BrokenOffError(
                f"cannot write to {self._parts.path}: {error.strerror or error}; "
                "committed records are kept; run again to continue"
            ) from error
        ended, encoded_at, rows = time.monotonic(), written.encoded_at, sum(map(len, pieces))
        events = (
            StageDone("finish", rows, encoded_at - started, encoded_at),
            StageDone("write", rows, ended - encoded_at, ended, bytes=written.size, nulled=written.nulled),
            PartCommitted(interval.start, interval.end, written.failed, written.size, ended),
        )
        return events, [*unfinished, *written.unwritable]


def finish_all(outcomes: Sequence[Outcome], user: UserCode) -> tuple[list[Outcome], list[Failed]]:
    """The outcomes after the user's `finish`, and its failures. Runs on the sink's thread."""
    pairs = [outcome.output for outcome in outcomes if type(outcome) is Ok and type(outcome.output) is UnfinishedOutput]
    outputs = iter(user.finished(pairs))
    done: list[Outcome] = []
    failures: list[Failed] = []
    for outcome in outcomes:
        if type(outcome) is Ok and type(outcome.output) is UnfinishedOutput:
            output = next(outputs)
            if isinstance(output, Exception):
                outcome = Failed.of(outcome.as_read, output, 1)
                failures.append(outcome)
            else:
                outcome = Ok(outcome.record, output, outcome.cost, outcome.row)
        done.append(outcome)
    return done, failures
