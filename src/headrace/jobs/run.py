"""The main path of a bulk job: source → skip what is done → prepare → submit → finish → sink."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Literal

from headrace.errors import BrokenOffError, TooManyErrorsError
from headrace.events import JobDone, JobStarted, StageDone
from headrace.jobs.feed import Feed
from headrace.jobs.job import Job, JobEnd, Tally
from headrace.jobs.ledger import Ledger
from headrace.jobs.output import Finished
from headrace.jobs.sink import Sink


async def pump(job: Job, ledger: Ledger, tally: Tally) -> bool:
    """Take every record that is still to do through the engine to the sink. Returns whether none is left.

    Raises:
        JobError: a stage cannot go on; what was finished by then is committed.
        TooManyErrorsError: more records have failed than the job allows.
    """
    async with (
        Sink(job, tally) as sink,
        Feed(job, ledger.next_todo, tally.expect, sink.put) as feed,
        job.batcher as batcher,
        aclosing(batcher.runs_as_completed(feed.work())) as results,
    ):
        async for run, outputs, some_failed in results:
            await sink.put(feed.settle(run, outputs, some_failed))
    return feed.complete


def run(job: Job) -> JobEnd:
    """Run a job to its end, or until it is asked to stop; what an earlier run has committed is not done again.

    Raises:
        OutputLockedError: another process writes the same output.
        ResumeMismatchError: the output was begun with something else.
        JobError: the job cannot go on; run again to continue after mending the cause.
    """
    with job.output.locked():
        done = job.output.begin(job.fingerprint, job.overwrite)
        records = done.records if isinstance(done, Finished) else done.done
        job.listener(JobStarted(job.source.total_bytes, job.source.total_records, records, time.monotonic()))
        state: Literal["finished", "interrupted", "failed"] = "failed"
        try:
            end = JobEnd("already_finished", records, done.failed) if isinstance(done, Finished) else _work(job, done)
            state = "interrupted" if end.state == "interrupted" else "finished"
        except OSError as error:
            raise BrokenOffError(f"cannot write {job.output.target}: {error}; run again to continue") from error
        finally:
            job.user.close()
            job.listener(JobDone(state, time.monotonic()))
        return end


def _work(job: Job, ledger: Ledger) -> JobEnd:
    """What is left of the job, and its end where nothing is left."""
    output = job.output
    tally = Tally(ledger.done, output.parts.count_errors(), job.limits)
    try:
        complete = asyncio.run(pump(job, ledger, tally))
        if complete:
            tally.check()
    except TooManyErrorsError:
        output.parts.merge_errors(output.errors)  # where the user looks for what is wrong
        raise
    if not complete:
        return JobEnd("interrupted", tally.records, tally.failed)
    started = time.monotonic()
    finished = output.finish(job.fingerprint)
    ended = time.monotonic()
    job.listener(StageDone("write", 0, ended - started, ended, bytes=finished.bytes))
    return JobEnd("finished", finished.records, finished.failed)
