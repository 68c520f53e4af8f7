"""The end of the line: finished records are put in order, encoded and committed on a thread of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from headrace.errors import JobError
from headrace.events import Event, Listener, PartCommitted, RecordFailed, StageDone
from headrace.io.parts import Interval
from headrace.jobs.coalescer import Coalescer
from headrace.jobs.job import Limits
from headrace.jobs.output import JobOutput
from headrace.records import Failed, Ok, Outcome

_BACKLOG_RUNS = 2
"""Full runs that may wait for the disk; with more, `put` waits."""


class Sink:
    """Takes outcomes in any order. On leaving, what is finished is committed, also when the job ends by an error."""

    def __init__(self, output: JobOutput, limits: Limits, listener: Listener, count: Callable[[Outcome], None]) -> None:
        self._output = output
        self._listener = listener
        self._count = count
        self._tick_s = limits.commit_interval_s / 2
        self._coalescer = Coalescer(limits.part_records, limits.commit_interval_s)
        self._thread = ThreadPoolExecutor(1, "headrace-sink")
        self._wake = asyncio.Event()
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
        finally:
            self._thread.shutdown(wait=True)

    async def put(self, outcome: Outcome) -> None:
        """Take one more; waits while the disk is behind.

        Raises:
            JobError: the output cannot be written.
            TooManyErrorsError: more records have failed than the job allows.
        """
        coalescer = self._coalescer
        coalescer.add(outcome, time.monotonic())
        if isinstance(outcome, Failed):
            self._listener(RecordFailed(outcome.record.position, outcome.reason, outcome.message))
        self._count(outcome)
        if coalescer.full_runs:
            self._wake.set()
            while coalescer.full_runs > _BACKLOG_RUNS:
                self._room.clear()
                self._raise_if_dead()
                await self._room.wait()
        self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self._committer is not None and self._committer.done():
            self._committer.result()

    async def _commit_all(self) -> None:
        """Commit runs as they fall due, looked for twice per interval."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            closing = self._closing
            while run := self._coalescer.take(float("inf") if closing else time.monotonic()):
                for event in await loop.run_in_executor(self._thread, self._commit, *run):
                    self._listener(event)
                self._room.set()
            if closing:
                return
            try:
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _commit(self, interval: Interval, outcomes: list[Outcome]) -> tuple[Event, ...]:
        """Encode and write one part, on the sink's thread."""
        started = time.monotonic()
        rows = [outcome for outcome in outcomes if isinstance(outcome, Ok)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        try:
            encoded = self._output.writer.encode(rows)
            dead_letters = self._output.writer.encode_failures(failures)
        except (TypeError, ValueError) as error:
            raise JobError(
                f"an output between records {interval.start} and {interval.end} cannot be written as "
                f"{self._output.target.suffix}: {error}"
            ) from error
        finished = time.monotonic()
        try:
            self._output.parts.commit(interval, encoded, dead_letters)
        except OSError as error:
            raise JobError(
                f"cannot write to {self._output.parts.path}: {error.strerror or error}; "
                "what is committed is kept, run again to continue"
            ) from error
        ended = time.monotonic()
        size = len(encoded) + len(dead_letters)
        return (
            StageDone("finish", len(outcomes), finished - started, finished),
            StageDone("write", len(outcomes), ended - finished, ended, bytes=size),
            PartCommitted(interval.start, interval.end, len(failures), size, ended),
        )
