"""The fourth stage: decide from its answer whether a record is done, retried or held back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from headrace.batching.results import own
from headrace.engines.profile import profile_of
from headrace.engines.requests.formed import Try
from headrace.errors import (
    OUT_OF_THREADS,
    BrokenOffError,
    EngineDeadError,
    ProcessTimeoutError,
    StoppedError,
    is_out_of_threads,
)
from headrace.events import DuplicatesFound
from headrace.jobs.answer_form import InvalidAnswerError
from headrace.jobs.pipeline.blocks import BlockRows, RowsDone
from headrace.jobs.pipeline.dedupe import Deduplicator
from headrace.jobs.pipeline.job import Job
from headrace.jobs.pipeline.memory_budget import Memory
from headrace.jobs.pipeline.suspects import SuspectFailures
from headrace.jobs.pipeline.waiting_retries import Retry, RetryQueue
from headrace.jobs.pipeline.work import (
    MAX_RUN,
    Answered,
    PreparedChunk,
    RefusedError,
    StepAnswer,
    UnfinishedOutput,
    Work,
)
from headrace.records import Failed, Ok, Outcome
from headrace.retry import RetryPolicy

MOST_PARKED = 4096
"""Maximum records waiting for a retry or for an equal record; reading pauses above this number."""
LOOK_S = 0.25
"""Seconds between checks for a stop request while waiting."""


class Settling:
    """Decides the outcome of every record, whether its answer comes from the reader, user code or the engine.

    Holds records without an outcome: to be retried, equal to one in progress, or suspected failures.
    """

    def __init__(self, job: Job, memory: Memory) -> None:
        self._job = job
        self._memory = memory
        limits, config = job.settings.limits, job.settings.config
        self._retries = RetryQueue(RetryPolicy(limits.max_attempts, limits.retry_wait_s))
        self._dedupe: Deduplicator | None = None
        """Made for the first record that may be equal to another."""
        self._suspects = SuspectFailures(profile_of(job.engine).kind, config.call_timeout_s)
        self._in_flight = self._done = 0
        self._began = math.inf
        self._settled = asyncio.Event()
        self.handed_back = 0
        """Records returned unprocessed because of a stop request."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._dedupe is not None:
            self._dedupe.close()

    # -- in --------------------------------------------------------------------------------------------------------

    async def sort_out(self, chunk: PreparedChunk) -> tuple[list[Work], Answered]:
        """Split a chunk into records for the engine, and those already answered, such as refused or equal ones."""
        work = chunk.work
        answered: list[tuple[Work, object]] = [*chunk.answered]
        if self._dedupe is None and any(item.key is not None for item in work):
            self._dedupe = Deduplicator()
        if self._dedupe is not None:
            work, known = await self._dedupe.sort_out(work)
            self._count_duplicates(len(known))
            answered += [(item._replace(key=None), output) for item, output in known]
        self._in_flight += len(work) + len(answered) + sum(block.to_run for block in chunk.blocks)
        self._began = min(self._began, time.monotonic())
        return work, ([item for item, _ in answered], [answer for _, answer in answered], True)

    def settle(self, run: Sequence[Work], answers: Sequence[object], some_failed: bool) -> Sequence[Outcome | RowsDone]:
        """The outcomes of these answers. A record may have none yet, or release those of others.

        Raises:
            BrokenOffError: the engine died, which is not a record failure.
        """
        self._in_flight -= len(run)
        self._done += len(run)
        if self._job.stop.requested:
            self._job.stop.judge(self._in_flight, self._done / max(time.monotonic() - self._began, 1e-3))
        self._memory.release_prepared(run)
        self._settled.set()
        if isinstance(run, BlockRows):
            return self._settle_rows(run, answers, some_failed)
        if not some_failed and self._dedupe is None and self._job.form is None:
            return self._suspects.release() + [
                self._ok(work, answer) for work, answer in zip(run, answers, strict=True)
            ]
        outcomes: list[Outcome] = []
        for work, answer in zip(run, answers, strict=True):
            self._settle_one(work, answer, outcomes)
        return outcomes

    def _settle_rows(
        self, run: BlockRows, answers: Sequence[object], some_failed: bool
    ) -> Sequence[Outcome | RowsDone]:
        """The outcomes of rows of a block: those that have an output stay together."""
        failed = [place for place, answer in enumerate(answers) if isinstance(answer, Exception)] if some_failed else []
        if not failed:
            return [*self._suspects.release(), RowsDone(run.block, run.rows, answers)]
        outcomes: list[Outcome] = []
        good = sorted(set(range(len(run))).difference(failed))
        if good:
            outcomes += self._suspects.release()
        for place in failed:
            self._settle_one(run[place], answers[place], outcomes)
        if not good:
            return outcomes
        return [*outcomes, RowsDone(run.block, run.rows[good], [answers[place] for place in good])]

    def rest(self) -> list[Outcome]:
        """Outcomes still held back at the end of the input."""
        return self._suspects.release()

    # -- out, to be tried again --------------------------------------------------------------------------------------

    def to_try_again(self) -> list[Retry]:
        return self._retries.take(time.monotonic(), MAX_RUN)

    def next_try_in(self) -> float | None:
        return self._retries.due_in(time.monotonic())

    @property
    def has_room(self) -> bool:
        return self._parked < MOST_PARKED

    @property
    def unsettled(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._in_flight or self._parked)

    async def wait(self) -> None:
        """Wait until records are settled or a retry is due, at most `LOOK_S` seconds."""
        due_in = self.next_try_in()
        self._settled.clear()
        try:
            async with asyncio.timeout(LOOK_S if due_in is None else min(due_in, LOOK_S)):
                await self._settled.wait()
        except TimeoutError:
            pass

    # -- one record --------------------------------------------------------------------------------------------------

    def _settle_one(self, work: Work, answer: object, outcomes: list[Outcome]) -> None:
        if isinstance(answer, ProcessTimeoutError):
            answer = self._suspects.judged(answer)
        answer = self._with_form(answer)
        likewise: list[Work] = []
        if self._dedupe is not None:
            likewise = (
                self._dedupe.given_up(work) if isinstance(answer, Exception) else self._dedupe.computed(work, answer)
            )
            self._memory.release_prepared(likewise)
            self._count_duplicates(0 if isinstance(answer, Exception) else len(likewise))
        for item in (work, *likewise):
            if not isinstance(answer, Exception):
                outcomes += [*self._suspects.release(), self._ok(item, answer)]
            elif self._job.stop.requested and isinstance(answer, StoppedError):
                self.handed_back += 1
            elif self._retries.wants(answer, item.attempt):
                self._retries.add(item.original, item.attempt, time.monotonic(), item.tries)
            elif isinstance(answer, InvalidAnswerError) and answer.may_pass and self._asks_again(item):
                tries = (*item.tries, Try(answer.text, str(answer)))
                self._retries.again(Retry(item.original, item.attempt, tries), time.monotonic())
            else:
                self._suspects.add(answer, _failed(item, answer), outcomes)

    def _with_form(self, answer: object) -> object:
        """The answer as its form has it, or its error."""
        form = self._job.form if self._job.samples is None else None  # which checks each answer itself
        if form is None or isinstance(answer, Exception) or type(answer) is StepAnswer:
            return answer
        try:
            return form.checked(answer)
        except InvalidAnswerError as error:
            return error

    def _asks_again(self, work: Work) -> bool:
        return self._job.form is not None and len(work.tries) < self._job.form.reask

    def _count_duplicates(self, records: int) -> None:
        if records:
            self._job.listener(DuplicatesFound(records, time.monotonic()))

    def _ok(self, work: Work, output: object) -> Ok:
        if type(output) is StepAnswer:
            return Ok(work.record, output.output, 0, work.row)
        if self._job.user.finishes:  # it may change the output, which equal records share
            output = UnfinishedOutput(work.mapped, output if self._dedupe is None else own(output))
        return Ok(work.record, output, work.cost, work.row)

    @property
    def _parked(self) -> int:
        return len(self._retries) + (self._dedupe.waiting if self._dedupe is not None else 0)


def _failed(work: Work, error: Exception) -> Outcome:
    if isinstance(error, RefusedError):
        return error.failed
    if isinstance(error, (EngineDeadError, StoppedError)):
        raise BrokenOffError(
            f"the engine cannot continue: {error}; finished records are kept; run again to continue"
        ) from error
    if is_out_of_threads(error):
        raise BrokenOffError(f"{OUT_OF_THREADS}; finished records are kept; run again to continue") from error
    failed = Failed.of(work.original, error, work.attempt + len(work.tries))
    if isinstance(error, InvalidAnswerError):
        tries = (*work.tries, *error.before, Try(error.text, str(error)))
        failed = replace(failed, answers=[one._asdict() for one in tries])
    return failed
