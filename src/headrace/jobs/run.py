"""The main path of a bulk job: read → prepare → infer → settle → write."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

from headrace.concurrency.garbage_collection import fewer_collections
from headrace.engines.profile import profile_of
from headrace.errors import BrokenOffError, TooManyErrorsError
from headrace.events import JobDone, JobStarted, PartDamaged, StageDone
from headrace.jobs.pipeline.blocks import Block
from headrace.jobs.pipeline.chunks import answers, expected_cost
from headrace.jobs.pipeline.infer import in_order, longest_first
from headrace.jobs.pipeline.job import Job, JobEnd, Length, Tally
from headrace.jobs.pipeline.memory_budget import Memory
from headrace.jobs.pipeline.ordering import in_windows
from headrace.jobs.pipeline.read import Prefetcher, Reader
from headrace.jobs.pipeline.settle import Settling
from headrace.jobs.pipeline.work import Work
from headrace.jobs.pipeline.write import OutcomeWriter
from headrace.jobs.state.job_state import FinishedJob, Pass
from headrace.jobs.state.stalls import judge_stall


async def pump(job: Job, todo: Pass, tally: Tally) -> bool:
    """Read, prepare, infer, settle and write all unfinished records. Returns whether none is left.

    Raises:
        JobError: a stage failed; finished records are committed.
        TooManyErrorsError: more records have failed than the job allows.
    """
    todo, ordering = in_windows(job, todo)
    room = 0 if ordering is None else ordering.room
    by_cost = functools.partial(longest_first, expected=expected_cost(job.batcher))
    keeps_order = job.order is not None and job.order.order == "input"
    portion = profile_of(job.engine).window if job.in_blocks else 0
    memory = Memory(job.settings.limits.buffer_memory - 2 * room)  # a window has its rows and their prompts
    async with (
        OutcomeWriter(job, todo, tally, memory) as sink,
        Settling(job, memory) as settling,
        Reader(job, todo, ordering, memory) as reader,
        Prefetcher(job, todo, reader, settling, tally, memory) as prefetcher,
        job.batching() as batcher,
    ):

        async def prepared() -> AsyncIterator[Sequence[Work]]:
            while (chunk := await prefetcher.next_chunk()) is not None:
                if not chunk:
                    yield []  # no batch need wait for more records
                    continue
                work, answered = await settling.sort_out(chunk)
                blocks, keeps = chunk.blocks, chunk.in_order or keeps_order
                del chunk  # no rows may stay referenced while the next ones are read
                sink.open(blocks)
                await sink.put(settling.settle(*answered))
                del answered
                orders = in_order if keeps else by_cost
                for run in itertools.chain(_popped(blocks, portion, in_order=keeps), orders(work)):
                    if job.stop.is_over:
                        return
                    yield run
                    del run
                del work

        infer = functools.partial(answers, batcher) if job.splits else batcher.runs_as_completed
        async with aclosing(infer(prepared())) as inferred:
            async for answered in inferred:
                await sink.put(settling.settle(*answered))
                del answered
                if job.is_left:
                    return False
        complete = not settling.handed_back and await prefetcher.is_exhausted()
        if complete:
            await sink.put(settling.rest())
    return complete


def _popped(blocks: list[Block], portion: int, *, in_order: bool) -> Iterator[Sequence[Work]]:
    """The runs of blocks, none of which stays referenced once it was run."""
    blocks.reverse()
    while blocks:
        yield from blocks.pop().runs(portion, in_order=in_order)


def run(job: Job) -> JobEnd:
    """Run a job to its end, or until asked to stop. Records that an earlier run committed are skipped.

    Raises:
        OutputLockedError: another process writes the same output.
        ResumeMismatchError: the output was started with other settings.
        JobError: the job cannot continue; fix the cause and run it again.
    """
    with job.output.locked():
        todo = job.output.begin_retry(job.start) if job.settings.retry else job.output.begin(job.start)
        job.listener(_started(job, todo))
        for damage in todo.damaged if isinstance(todo, Pass) else ():
            records = damage.interval.end - damage.interval.start
            job.listener(PartDamaged(str(damage.path), records, damage.reason, time.monotonic()))
        state: Literal["finished", "interrupted", "failed"] = "failed"
        try:
            if isinstance(todo, FinishedJob):
                end = JobEnd("already_finished", todo.records, todo.failed)
            else:
                end = _work(job, todo)
            state = "interrupted" if end.state == "interrupted" else "finished"
        except BrokenOffError as error:
            if isinstance(todo, Pass) and not job.stop.requested:
                judge_stall(job.output.work, todo, error)
            raise
        except OSError as error:
            raise BrokenOffError(f"cannot write {job.output.name}: {error}; run again to continue") from error
        finally:
            job.user.close()
            if job.preparers is not None:
                job.preparers.close()
            if job.in_flight is not None:
                job.in_flight.close()
            job.listener(JobDone(state, time.monotonic()))
        return end


def _started(job: Job, todo: Pass | FinishedJob) -> JobStarted:
    source = job.source
    if isinstance(todo, Pass) and todo.total is not None:
        return JobStarted(None, todo.total, todo.done, time.monotonic(), todo.failed, retry=True)
    done = todo.done if isinstance(todo, Pass) else todo.records
    return JobStarted(source.total_bytes, source.total_records, done, time.monotonic(), todo.failed)


def _work(job: Job, todo: Pass) -> JobEnd:
    # All records of a retry have failed before, so their error rate means nothing.
    job.stop.working = True
    limits, retry = job.settings.limits, job.settings.retry
    if retry:
        limits = replace(limits, max_error_rate=1.0)
    tally = Tally(todo.done, todo.failed, limits, Length(job.source.total_records, job.source.total_bytes))
    try:
        with fewer_collections():
            complete = (job.run_on or asyncio.run)(pump(job, todo, tally))
        if complete:
            tally.check()
    except TooManyErrorsError:
        if not retry:
            job.output.show_errors(job.start, todo.sink)
        raise
    if not complete:
        return JobEnd("interrupted", tally.records, tally.failed)
    started = time.monotonic()
    finished = todo.finish()
    ended = time.monotonic()
    job.listener(StageDone("write", 0, ended - started, ended, bytes=finished.bytes))
    return JobEnd("finished", finished.records, finished.failed)
