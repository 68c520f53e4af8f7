"""The second stage: prepare rows for the engine, several chunks at once and a bounded distance ahead."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeGuard, TypeVar

from headrace.batching.callables import unfinished
from headrace.batching.pending import checked_results, own_copy
from headrace.batching.policy.cost import MOST_COST, checked_cost
from headrace.engines.base import AnyEngine, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import (
    BadResultError,
    BrokenOffError,
    EngineDeadError,
    ProcessTimeoutError,
    RecordError,
    StoppedEarly,
)
from headrace.events import PipelineWaited, StageDone
from headrace.io.base import Chunk
from headrace.jobs.pipeline.columns import Columns
from headrace.jobs.pipeline.concurrency_tuner import ConcurrencyTuner
from headrace.jobs.pipeline.dedupe import RepeatCounter, key_of
from headrace.jobs.pipeline.job import Job, Tally
from headrace.jobs.pipeline.memory_budget import Memory, value_bytes
from headrace.jobs.pipeline.read import Reader
from headrace.jobs.pipeline.retries import Retry
from headrace.jobs.pipeline.settle import LOOK_S, Settling
from headrace.jobs.pipeline.suspects import MOST_IN_A_ROW
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import Carried, PreparedChunk, Work, unreadable
from headrace.records import Failed, Record

T = TypeVar("T")

_ROWS = 64
"""Records prepared per time limit if the engine has no batch size."""


class Preparing:
    """Takes chunks from the reader, and records to retry from `settling`.

    At most `workers + 1` chunks are read or prepared at once, and none is read while `memory` has no room, so memory
    does not grow with the input. `tally` counts the records read.
    """

    def __init__(self, job: Job, reader: Reader, settling: Settling, tally: Tally, memory: Memory) -> None:
        self._job = job
        self._reader = reader
        self._settling = settling
        self._tally = tally
        self._memory = memory
        counts = (
            job.dedupe is None and profile_of(job.engine).batching == "batches"
        )  # others generate, perhaps by chance
        self._preparation = Preparation(
            job.columns, job.engine, job.user, job.dedupe, InTime(job.engine_timeout_s),
            RepeatCounter() if counts else None,
        )  # fmt: skip
        self._concurrency = ConcurrencyTuner(job.limits.workers, os.cpu_count() or 1)
        self._workers = ThreadPoolExecutor(self._concurrency.most, "headrace-prepare")
        self._ahead: deque[asyncio.Task[PreparedChunk | None]] = deque()
        self._reading = 0
        self._ended = False
        self.exhausted = False
        """Whether every record is settled."""
        self._told = False
        """Whether `next_chunk` has said that no other follows."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                self.exhausted = True
                return None
        return None

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
        """Wait, and tell what for."""
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
        return prepared


class InTime:
    """`prepare_all` with a time limit for each batch of records.

    A batch that takes longer is split in halves until the record that blocks `prepare` fails alone. Each call has its
    own thread: one that hangs cannot be ended, and its result is ignored.

    Args:
        timeout_s: None for no limit.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._in_a_row = 0

    def prepare(self, engine: AnyEngine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The prepared form of each input, or its error.

        Raises:
            BrokenOffError: the engine died, or hangs on every record.
        """
        if self._timeout_s is None:
            return prepare_all(engine, inputs)
        profile = profile_of(engine)
        rows = profile.batch_size if profile.batching == "batches" else _ROWS
        pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
        return [answer for piece in pieces for answer in self._within(engine, piece, self._timeout_s)]

    def _within(
        self, engine: AnyEngine, inputs: Sequence[object], timeout_s: float
    ) -> list[Prepared[object] | Exception]:
        future: Future[list[Prepared[object] | Exception]] = Future()
        threading.Thread(target=_answer, args=(future, engine, inputs), name="headrace-prepare", daemon=True).start()
        try:
            found = future.result(timeout_s)
        except TimeoutError:
            if future.done():  # raised by the engine, not by the wait
                raise
        else:
            self._in_a_row = 0
            return found
        if half := len(inputs) // 2:
            return self._within(engine, inputs[:half], timeout_s) + self._within(engine, inputs[half:], timeout_s)
        self._in_a_row += 1
        limit = f"{timeout_s:g} s (--engine-timeout)"
        if self._in_a_row >= MOST_IN_A_ROW:
            raise BrokenOffError(
                f"the engine's prepare had no result after {limit} for {self._in_a_row} records in a row: the engine "
                "hangs; finished records are kept; run again to continue"
            )
        return [ProcessTimeoutError(f"the engine's prepare had no result after {limit}")]


def _answer(future: Future[list[Prepared[object] | Exception]], engine: AnyEngine, inputs: Sequence[object]) -> None:
    try:
        future.set_result(prepare_all(engine, inputs))
    except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
        future.set_exception(error)


def prepare_all(engine: AnyEngine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    """The prepared form of each input, or its error.

    If the call fails or returns something other than one entry per input, each input is prepared alone.

    Raises:
        BrokenOffError: the engine died, which is not a record failure.
    """
    try:
        return _prepared(engine, inputs)
    except EngineDeadError as error:
        raise BrokenOffError(
            f"the engine cannot continue: {error}; finished records are kept; run again to continue"
        ) from error
    except StoppedEarly:
        raise
    except BaseException as error:  # noqa: BLE001 - an engine may raise anything
        if len(inputs) == 1:
            return [own_copy(error)]
    return [prepare_all(engine, [value])[0] for value in inputs]


def _prepared(engine: AnyEngine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    answers: object = engine.prepare(inputs)
    if type(answers) is not list or len(answers) != len(inputs):
        answers = checked_results(answers, len(inputs), "prepare")
    return [answer if _is_sound(answer) else _checked(answer) for answer in answers]


def _is_sound(answer: object) -> TypeGuard[Prepared[object]]:
    """Whether it is what nearly all answers are: prepared, with a whole number as cost."""
    return type(answer) is Prepared and type(answer.cost) is int and 0 <= answer.cost <= MOST_COST


def _checked(answer: object) -> Prepared[object] | Exception:
    if isinstance(answer, BaseException):
        return answer if isinstance(answer, Exception) else own_copy(answer)
    if not isinstance(answer, Prepared):
        return unfinished("the engine's prepare", answer) or BadResultError(
            f"the engine's prepare returned {type(answer).__name__} for a record; "
            "it must return Prepared or an exception"
        )
    try:
        checked_cost(answer.cost, type(answer.payload))
    except Exception as error:  # noqa: BLE001 - comparing an engine's own cost type may raise anything
        return own_copy(error)
    return answer


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares records: user code, columns, then the engine."""

    columns: Columns
    engine: AnyEngine
    user: UserCode
    dedupe: bool | None
    in_time: InTime = field(default_factory=InTime)
    """Applies the time limit of the engine's `prepare`."""
    repeats: RepeatCounter | None = None
    """Counts equal inputs; None where it makes no difference."""

    def prepare(self, chunk: Chunk) -> tuple[PreparedChunk, StageDone]:
        """Prepare a chunk of the input. Runs on a worker thread."""
        return self._prepare(chunk.records, chunk.failures, {})

    def prepare_again(self, again: Sequence[Retry]) -> tuple[PreparedChunk, StageDone]:
        """Prepare records for a retry."""
        return self._prepare([item.record for item in again], (), {a.record.position: a.attempt for a in again})

    def _prepare(
        self, rows: Sequence[Record], failures: Sequence[Failed], attempts: Mapping[int, int]
    ) -> tuple[PreparedChunk, StageDone]:
        started, cpu = time.monotonic(), time.thread_time()
        done = PreparedChunk(answered=[unreadable(failed) for failed in failures])
        selected, inputs = self._select(rows, attempts, done)
        sees = self.user.finishes
        in_tokens = profile_of(self.engine).counts_tokens
        answers = self.in_time.prepare(self.engine, inputs) if inputs else []
        for (row, mapped, kept), value, prepared in zip(selected, inputs, answers, strict=True):
            attempt = attempts.get(row.position, 1) if attempts else 1
            if isinstance(prepared, Exception):
                done.refuse(row, kept.id, prepared, attempt)
                continue
            key = key_of(value) if self.dedupe or (self.dedupe is None and prepared.greedy) else None
            cost, payload = prepared.cost, prepared.payload
            size = 0 if payload is value else value_bytes(payload)
            done.work.append(Work(kept, row.data, payload, cost, attempt, mapped.data if sees else None, key, size))
            done.tokens += cost if in_tokens else 0
            done.truncated += prepared.truncated
            done.split += prepared.parts > 0
            done.chunks += prepared.parts
        compared = repeated = 0
        if self.repeats is not None and not self.repeats.ends:
            hashes = [hash(value) for value in inputs if type(value) is str]
            compared, repeated = self.repeats.look(hashes, len(inputs))
        ended = time.monotonic()
        event = StageDone(
            "prepare", len(rows), ended - started, ended, tokens=done.tokens, truncated=done.truncated,
            cpu_s=time.thread_time() - cpu, compared=compared, repeated=repeated,
            split=done.split, chunks=done.chunks,
        )  # fmt: skip
        return done, event

    def _select(
        self, rows: Sequence[Record], attempts: Mapping[int, int], done: PreparedChunk
    ) -> tuple[list[tuple[Record, Record, Record]], list[object]]:
        """Each record as read, after user code and as kept for the output; and the inputs for the engine."""
        selected: list[tuple[Record, Record, Record]] = []
        inputs: list[object] = []
        identify, input_of, choice = self.columns.identify, self.columns.input_of, self.columns.choice
        sees = self.user.prepares or self.user.finishes
        for row, mapped in self.user.prepared(rows) if sees else zip(rows, rows, strict=True):
            if isinstance(mapped, Exception):
                done.refuse(row, self._id_of(row), mapped, attempts.get(row.position, 1))
                continue
            kept = row
            try:
                kept = identify(mapped)
                if choice is not None and not choice.takes(row):
                    done.answered.append((Work(kept, row.data), Carried(getattr(row.data, "answer", None))))
                    continue
                value = input_of(mapped)
            except StoppedEarly:
                raise
            except BaseException as error:  # noqa: BLE001 - a row may be a mapping of the user's own, with any content
                words = f"the row raised {type(error).__name__} when it was read"
                own = error if isinstance(error, Exception) else RecordError(words)
                done.refuse(row, kept.id, own, attempts.get(row.position, 1))
            else:
                selected.append((row, mapped, kept))
                inputs.append(value)
        return selected, inputs

    def _id_of(self, row: Record) -> object:
        """The id of a row that user code could not prepare, if the row has the column."""
        try:
            return self.columns.identify(row).id
        except BaseException:  # noqa: BLE001 - as above
            return row.id
