"""The last stage: order, encode and commit finished records, on one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeAlias

from headrace.errors import BrokenOffError, JobError, RecordError, text_of
from headrace.events import Event, PartCommitted, PipelineWaited, RecordFailed, StageDone
from headrace.io.storage.parts import Interval
from headrace.jobs.pipeline.coalescer import Coalescer
from headrace.jobs.pipeline.job import Job, Tally
from headrace.jobs.pipeline.memory_budget import PARTS, Memory, outputs_bytes
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import UnfinishedOutput, failure
from headrace.jobs.state.passes import Pass
from headrace.jobs.state.run_time import RunTimeLog
from headrace.records import Failed, Ok, Outcome, Record

_BACKLOG_RUNS = 2
"""Maximum full runs that wait for the disk; above this number `put` waits."""
_FIRST_FINISHED = 64
"""Records passed to `finish` together until the size of its outputs is known."""
_SHARE_AT_RISK = 0.01
"""Fraction of the run time that a kill may lose: longer runs wait longer, so that slow engines make fewer parts."""
_LONGEST_WAIT_S = 60.0


def least_wait_s(age_s: float) -> float:
    """Minimum seconds that rows wait to fill their part, in a run of that age."""
    return min(age_s * _SHARE_AT_RISK, _LONGEST_WAIT_S)


class Sink:
    """Takes outcomes in any order. Commits finished records on exit, also after an error."""

    def __init__(self, job: Job, todo: Pass, tally: Tally, memory: Memory) -> None:
        limits = job.limits
        self._output = job.output
        self._parts = todo.sink
        self._run_time = RunTimeLog(job.output.work)
        self._user = job.user
        self._listener = job.listener
        self._stop = job.stop
        self._tally = tally
        self._memory = memory
        self._tick_s = limits.commit_interval_s / 2
        self._began = time.monotonic()
        self._coalescer = Coalescer(limits.part_records, limits.commit_interval_s, todo.place)
        self._thread = ThreadPoolExecutor(1, "headrace-sink")
        self._wake = asyncio.Event()
        memory.on_wait = self._wake.set
        self._part_records = limits.part_records
        self._finished_bytes = 0.0
        """Mean size of an output after `finish`, in bytes."""
        self._room = asyncio.Event()
        self._closing = False
        self._committer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._committer = asyncio.create_task(self._commit_all(), name="headrace-sink")
        self._committer.add_done_callback(lambda _: self._room.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._committer is not None, "entered"
        self._closing = True
        self._wake.set()
        try:
            await asyncio.shield(self._committer)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._run_time.close)
        finally:
            self._thread.shutdown(wait=True)

    async def put(self, outcomes: Sequence[Outcome]) -> None:
        """Take outcomes. Waits while the disk is behind.

        Raises:
            JobError: the output cannot be written.
            TooManyErrorsError: more records have failed than the job allows.
        """
        coalescer, memory = self._coalescer, self._memory
        memory.outputs += outputs_bytes(outcomes)
        coalescer.part_records = memory.part_rows(self._part_records)
        coalescer.add(outcomes, time.monotonic())
        failures = [outcome for outcome in outcomes if type(outcome) is Failed]
        self._report(failures)
        self._tally.count(len(outcomes), failures)
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
        self._listener(PipelineWaited("sink", ended - started, ended))

    def _report(self, failures: Sequence[Failed]) -> None:
        for failed in failures:
            self._listener(RecordFailed(failed.record.position, failed.reason, failed.message))

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
                    self._listener(event)
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
        return float("-inf") if self._stop.requested else time.monotonic()

    def _release(self, interval: Interval) -> None:
        """Release the memory of committed outcomes."""
        places = range(interval.start, interval.end)
        self._memory.release(places)
        self._memory.release_outputs(len(places) / (len(places) + len(self._coalescer)))

    def _commit(self, interval: Interval, outcomes: list[Outcome]) -> tuple[tuple[Event, ...], list[Failed]]:
        """Finish, encode and write a run on the sink's thread. Returns events and new failures.

        Writes several parts if `finish` makes the outputs longer than a part's share of memory.
        """
        started = time.monotonic()
        if not self._user.finishes:
            return self._write(interval, outcomes, [], started)
        room, size, done = self._memory.limit / PARTS, 0, 0
        events: tuple[Event, ...] = ()
        unfinished: list[Failed] = []
        held: list[Outcome] = []  # outcomes of the current part
        failed: list[Failed] = []  # failures of the current part
        while done < len(outcomes):
            rows = max(1, int(room / self._finished_bytes)) if self._finished_bytes else _FIRST_FINISHED
            finished, failures = finish_all(outcomes[done : done + rows], self._user)
            finished_bytes = outputs_bytes(finished)
            self._finished_bytes = max(finished_bytes / len(finished), 1.0)
            held, failed, size, done = held + finished, failed + failures, size + finished_bytes, done + len(finished)
            if size >= room or done == len(outcomes):
                part = Interval(interval.start + done - len(held), interval.start + done)
                more, bad = self._write(part, held, failed, started)
                events, unfinished = events + more, unfinished + bad
                held, failed, size, started = [], [], 0, time.monotonic()
        return events, unfinished

    def _write(
        self, interval: Interval, outcomes: list[Outcome], unfinished: list[Failed], started: float
    ) -> tuple[tuple[Event, ...], list[Failed]]:
        encoded, unwritable, nulled = self._encode([outcome for outcome in outcomes if type(outcome) is Ok])
        unfinished = unfinished + unwritable
        failures = [outcome for outcome in outcomes if type(outcome) is Failed]
        if unwritable:
            failures = sorted([*failures, *unwritable], key=lambda failed: failed.record.position)
        dead_letters = self._output.writer.encode_failures(failures)
        finished = time.monotonic()
        try:
            self._parts.commit(interval, encoded, dead_letters)
            self._run_time.note()
        except OSError as error:
            raise BrokenOffError(
                f"cannot write to {self._parts.path}: {error.strerror or error}; "
                "committed records are kept; run again to continue"
            ) from error
        ended = time.monotonic()
        size = len(encoded) + len(dead_letters)
        events = (
            StageDone("finish", len(outcomes), finished - started, finished),
            StageDone("write", len(outcomes), ended - finished, ended, bytes=size, nulled=nulled),
            PartCommitted(interval.start, interval.end, len(failures), size, ended),
        )
        return events, unfinished

    def _encode(self, rows: list[Ok]) -> tuple[bytes, list[Failed], int]:
        """The encoded rows, the rows that cannot be encoded, and the count of numbers written as null."""
        writer = self._output.writer
        before = writer.nulled
        try:
            return writer.encode(rows), [], writer.nulled - before
        except JobError:
            raise
        except BaseException:  # noqa: BLE001 - an object's own methods may raise anything; signals go to the main thread
            good, bad = sort_out(rows, writer.encode)
        before = writer.nulled
        encoded = writer.encode(good)
        return encoded, [failure(as_read(row), error, 1) for row, error in bad], writer.nulled - before


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
                outcome = failure(as_read(outcome), output, 1)
                failures.append(outcome)
            else:
                outcome = Ok(outcome.record, output, outcome.cost, outcome.row)
        done.append(outcome)
    return done, failures


def as_read(done: Ok) -> Record:
    """The record as it was read, for its dead letter."""
    return Record(done.record.position, done.record.id, done.row)


Bad: TypeAlias = list[tuple[Ok, Exception]]


def sort_out(rows: list[Ok], encode: Callable[[list[Ok]], object]) -> tuple[list[Ok], Bad]:
    """Split rows, by halving, into those that can be written together and the others with their errors."""
    good, bad = _each_alone(rows, encode)
    if _error(good, encode) is None:
        return good, bad
    together, more = _add(good, [], encode)  # each of them can be written, and not with the others
    return together, sorted(bad + more, key=lambda one: one[0].record.position)


def _error(rows: list[Ok], encode: Callable[[list[Ok]], object]) -> Exception | None:
    try:
        encode(rows)
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 - a format library may raise anything; only the record fails
        return error
    except BaseException as error:  # noqa: BLE001 - likewise, from an object's own methods
        return RecordError(f"writing it raised {type(error).__name__}: {text_of(error)}")
    return None


def _each_alone(rows: list[Ok], encode: Callable[[list[Ok]], object]) -> tuple[list[Ok], Bad]:
    """Split off the rows that cannot be written even alone."""
    error = _error(rows, encode)
    if error is None:
        return rows, []
    if len(rows) == 1:
        return [], [(rows[0], error)]
    good, bad = _each_alone(rows[: len(rows) // 2], encode)
    more_good, more_bad = _each_alone(rows[len(rows) // 2 :], encode)
    return good + more_good, bad + more_bad


def _add(rows: list[Ok], to: list[Ok], encode: Callable[[list[Ok]], object]) -> tuple[list[Ok], Bad]:
    """Append the rows that can be written together with `to`."""
    error = _error(to + rows, encode)
    if error is None:
        return to + rows, []
    if len(rows) == 1:
        return to, [(rows[0], error)]
    to, bad = _add(rows[: len(rows) // 2], to, encode)
    to, more = _add(rows[len(rows) // 2 :], to, encode)
    return to, bad + more
