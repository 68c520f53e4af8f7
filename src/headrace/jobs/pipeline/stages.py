"""What happens to a chunk of records between the input and the output, each stage on a thread of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headrace.batching.callables import PROMISES, unfinished
from headrace.batching.pending import checked_results
from headrace.engines.base import BatchEngine, Engine, StreamEngine
from headrace.engines.profile import profile_of
from headrace.errors import (
    BrokenOffError,
    EngineDeadError,
    ProcessError,
    ProcessTimeoutError,
    RecordError,
    StoppedEarly,
    StoppedError,
    text_of,
)
from headrace.events import StageDone
from headrace.io.base import Chunk
from headrace.jobs.pipeline.columns import Columns
from headrace.jobs.pipeline.dedupe import key_of
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.preparing import InTime
from headrace.jobs.pipeline.retries import Retry
from headrace.jobs.pipeline.sizes import rows_bytes, value_bytes
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.state.in_flight import InFlight
from headrace.records import Failed, Ok, Outcome, Record
from headrace.retry import TRANSIENT

MAX_RUN = 512
"""Most records that go to the batcher together."""
MOST_MESSAGE = 4096
"""Characters of an error's message that are kept."""


class Work(NamedTuple):
    """A record ready for the engine."""

    record: Record
    """What is kept of it once it is done: position and id."""
    row: Any
    """The row as the source read it."""
    payload: Any
    cost: int
    attempt: int = 1
    mapped: Any = None
    """The row as user code prepared it, where `finish` is to see it."""
    key: bytes | None = None
    """Equal for records that are computed once; None where each is computed."""
    bytes: int = 0
    """Of the payload, beside the row."""


class UnfinishedOutput(NamedTuple):
    """An output that a user's `finish` has not seen yet, and the row it wants to see."""

    row: Any
    output: Any


@dataclass(slots=True)
class PreparedChunk:
    """What became of the records of a chunk."""

    work: list[Work] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    transient: list[tuple[Record, int, Exception]] = field(default_factory=list)
    """Records that failed for a reason that may pass, their attempt, and the reason."""
    tokens: int = 0
    truncated: int = 0
    bytes: int = 0
    """Of the input that these were read from."""

    def __bool__(self) -> bool:
        return bool(self.work or self.failures or self.transient)

    def positions(self) -> list[int]:
        """Of all records, ascending."""
        found = [work.record.position for work in self.work] + [failed.record.position for failed in self.failures]
        return sorted(found + [record.position for record, _, _ in self.transient])

    def drop(self, done: frozenset[int]) -> None:
        """Leave out the records at these positions."""
        if done:
            self.work = [work for work in self.work if work.record.position not in done]
            self.failures = [failed for failed in self.failures if failed.record.position not in done]
            self.transient = [item for item in self.transient if item[0].position not in done]

    def refuse(self, record: Record, error: Exception, attempt: int) -> None:
        """Note that a record has failed at this attempt, for good unless the reason may pass."""
        if isinstance(error, TRANSIENT):
            self.transient.append((record, attempt, error))
        else:
            self.failures.append(failure(record, error, attempt))

    def add(self, other: PreparedChunk) -> None:
        """Take in what became of the next chunk."""
        self.work += other.work
        self.failures += other.failures
        self.transient += other.transient
        self.tokens += other.tokens
        self.truncated += other.truncated


@dataclass(frozen=True, slots=True)
class Preparation:
    """How records are made ready: user code, columns, then the engine."""

    columns: Columns
    engine: Engine[Any, Any]
    user: UserCode
    dedupe: bool
    in_time: InTime = field(default_factory=InTime)
    """How long the engine may take for it."""

    def load(self, chunks: Iterator[Chunk]) -> tuple[Chunk, int, StageDone] | None:
        """The next chunk of the input and the bytes it holds; None at its end. Runs on the reader thread.

        Raises:
            JobError: the input cannot be read on.
        """
        started = time.monotonic()
        try:
            chunk = next(chunks, None)
        except OSError as error:
            raise BrokenOffError(
                f"cannot read the input on: {error}; what is finished is kept, run again to continue"
            ) from error
        if chunk is None:
            return None
        size = rows_bytes(chunk.records, chunk.failures)
        ended = time.monotonic()
        records = len(chunk.records) + len(chunk.failures)
        return chunk, size, StageDone("load", records, ended - started, ended, bytes=chunk.bytes)

    def prepare(self, chunk: Chunk) -> tuple[PreparedChunk, StageDone]:
        """Make a chunk of the input ready. Runs on a worker thread."""
        return self._prepare(chunk.records, chunk.failures, {})

    def prepare_again(self, again: Sequence[Retry]) -> tuple[PreparedChunk, StageDone]:
        """Make records ready that have failed before."""
        return self._prepare([item.record for item in again], (), {a.record.position: a.attempt for a in again})

    def _prepare(
        self, rows: Sequence[Record], failures: Sequence[Failed], attempts: Mapping[int, int]
    ) -> tuple[PreparedChunk, StageDone]:
        started = time.monotonic()
        done = PreparedChunk(failures=list(failures))
        selected, inputs = self._select(rows, attempts, done)
        keys = [key_of(value) for value in inputs] if self.dedupe else itertools.repeat(None)
        sees = self.user.finishes
        in_tokens = profile_of(self.engine).counts_tokens
        answers = self.in_time.prepare(self.engine, inputs) if inputs else []
        for (row, mapped, kept), value, prepared, key in zip(selected, inputs, answers, keys, strict=False):
            attempt = attempts.get(row.position, 1) if attempts else 1
            if isinstance(prepared, Exception):
                done.refuse(Record(row.position, kept.id, row.data), prepared, attempt)
                continue
            cost, payload = prepared.cost, prepared.payload
            size = 0 if payload is value else value_bytes(payload)
            done.work.append(Work(kept, row.data, payload, cost, attempt, mapped.data if sees else None, key, size))
            done.tokens += cost if in_tokens else 0
            done.truncated += prepared.truncated
        ended = time.monotonic()
        event = StageDone("prepare", len(rows), ended - started, ended, tokens=done.tokens, truncated=done.truncated)
        return done, event

    def _select(
        self, rows: Sequence[Record], attempts: Mapping[int, int], done: PreparedChunk
    ) -> tuple[list[tuple[Record, Record, Record]], list[Any]]:
        """Each record as it was read, as user code left it and as it is kept; and what the engine is to be given."""
        selected: list[tuple[Record, Record, Record]] = []
        inputs: list[Any] = []
        identify, input_of = self.columns.identify, self.columns.input_of
        for row, mapped in self.user.prepared(rows):
            if isinstance(mapped, Exception):
                done.refuse(self._named(row), mapped, attempts.get(row.position, 1))
                continue
            kept = row
            try:
                kept = identify(mapped)
                value = input_of(mapped)
            except StoppedEarly:
                raise
            except BaseException as error:  # noqa: BLE001 - a row may be a mapping of the user's own, with any content
                words = f"the row raised {type(error).__name__} when it was read"
                own = error if isinstance(error, Exception) else RecordError(words)
                done.refuse(Record(row.position, kept.id, row.data), own, attempts.get(row.position, 1))
            else:
                selected.append((row, mapped, kept))
                inputs.append(value)
        return selected, inputs

    def _named(self, row: Record) -> Record:
        """A row that user code has not got through, with its id where that is among its own columns."""
        try:
            return Record(row.position, self.columns.identify(row).id, row.data)
        except BaseException:  # noqa: BLE001 - as above
            return row


def portions(chunks: Iterator[Chunk], rows: int) -> Iterator[Chunk]:
    """The same rows in chunks of at most so many records, where an engine prepares fewer at a time than are read."""
    for chunk in chunks:
        yield replace(chunk, records=chunk.records[:rows])
        for start in range(rows, len(chunk.records), rows):
            yield Chunk(chunk.records[start : start + rows], (), 0)


def prepared_bytes(work: Sequence[Work]) -> int:
    """What the payloads hold."""
    return sum([item.bytes for item in work])


def longest_first(work: list[Work]) -> Iterator[list[Work]]:
    """Runs of equal cost, the costliest first: what may run out of memory comes early, and the end has no long tail."""
    if not work:
        return
    cost = work[0].cost
    if any(item.cost != cost for item in work):
        work = sorted(work, key=_cost, reverse=True)  # equal ones stay in input order
    start = 0
    while start < len(work):
        cost, end = work[start].cost, start + 1
        most = min(start + MAX_RUN, len(work))
        while end < most and work[end].cost == cost:
            end += 1
        yield work[start:end]
        start = end


async def stream_longest_first(work: list[Work]) -> AsyncIterator[list[Work]]:
    """The same, for a batcher that takes a stream."""
    for run in longest_first(work):
        yield run


def _cost(work: Work) -> int:
    return work.cost


def infer(
    work: list[Work],
    engine: BatchEngine[Any, Any, Any],
    stop: StopRequest,
    max_attempts: int,
    in_flight: InFlight | None = None,
) -> list[Any]:
    """One batch through the engine. What has not begun by the end of a stop's grace is handed back unprocessed.

    Raises:
        Exception: what the engine raised. The batcher runs the batch again in halves.
    """
    if stop.is_over:
        return [StoppedError("the job was asked to stop")] * len(work)
    try:
        results = checked_results(_forward(work, engine, in_flight), len(work), "the engine")
    except StoppedError as error:
        raise sound(error) from error
    except ProcessTimeoutError:
        raise
    except TRANSIENT as error:
        # Most likely no record's fault: each is tried again later. At the last attempt one of them may be at fault.
        if any(item.attempt >= max_attempts for item in work):
            raise
        return [error] * len(work)
    return list(map(sound, results))


def _forward(work: list[Work], engine: BatchEngine[Any, Any, Any], in_flight: InFlight | None) -> Any:
    if in_flight is None:
        return engine.forward([item.payload for item in work])
    in_flight.enter([item.record.position for item in work])
    try:
        return engine.forward([item.payload for item in work])
    finally:
        in_flight.leave()


async def infer_one(work: Work, engine: StreamEngine[Any, Any, Any], stop: StopRequest) -> Any:
    """One record through an engine that batches by itself, unless the job is asked to stop before it has begun."""
    if not stop.requested:
        try:
            return sound(await engine.infer(work.payload))
        except StoppedError as error:
            if not stop.requested:
                raise sound(error) from error
        except EngineDeadError:
            if not stop.requested:  # else the signal that asked for it has reached the engine's own processes too
                raise
    return StoppedError("the job was asked to stop")


def sound(result: Any) -> Any:
    """An engine's result; its own StoppedError, which does not mean that this job was stopped, and a coroutine or a
    generator, which nobody would run, as the record's error.
    """
    if isinstance(result, StoppedError):
        return ProcessError(f"the engine raised StoppedError: {text_of(result)}")
    return unfinished("the engine", result) or result if isinstance(result, PROMISES) else result


def finish(work: Work, result: Any) -> Outcome:
    """What the engine's answer means for the record.

    Raises:
        BrokenOffError: the engine is gone, which is no record's fault.
    """
    if isinstance(result, (EngineDeadError, StoppedError)):
        raise BrokenOffError(
            f"the engine cannot go on: {result}; what is finished is kept, run again to continue"
        ) from result
    if isinstance(result, Exception):
        return failure(Record(work.record.position, work.record.id, work.row), result, work.attempt)
    return Ok(work.record, result, work.cost, work.row)


def finish_all(outcomes: Sequence[Outcome], user: UserCode) -> tuple[list[Outcome], list[Failed]]:
    """The outcomes as the user's `finish` leaves them, and which of them failed there. Runs on the sink's thread."""
    pairs = [outcome.output for outcome in outcomes if type(outcome) is Ok]
    outputs = iter(user.finished(pairs))
    done: list[Outcome] = []
    failures: list[Failed] = []
    for outcome in outcomes:
        if type(outcome) is Ok:
            output = next(outputs)
            if isinstance(output, Exception):
                outcome = failure(as_read(outcome), output, 1)
                failures.append(outcome)
            else:
                outcome = Ok(outcome.record, output, outcome.cost, outcome.row)
        done.append(outcome)
    return done, failures


def as_read(done: Ok) -> Record:
    """The record of an output that could not be used, for its dead letter."""
    return Record(done.record.position, done.record.id, done.row)


def failure(record: Record, error: Exception, attempts: int) -> Failed:
    """How a record's own error is kept."""
    words = " ".join(text_of(error)[:MOST_MESSAGE].split())
    raised = (error.__cause__ or error) if type(error) is ProcessError else error  # which stands in for another
    if isinstance(error, RecordError):
        return Failed(record, type(raised).__name__, words, attempts, error.code, error.param)
    return Failed(record, type(raised).__name__, words, attempts)
