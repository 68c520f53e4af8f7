"""`RunningJob`: a bulk job that runs in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import Generic, TypeVar

from headrace.batching.blocking import current_loop
from headrace.errors import ConfigError, JobError, attempted
from headrace.events import Event
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.live.meter import Meter, Snapshot
from headrace.tracebacks import public

ResultT = TypeVar("ResultT")


class RunningJob(Generic[ResultT]):
    """A job that runs on a thread of its own: `await` it for what `headrace.run` would return.

    Args:
        run: runs the job with a stop request, and with settings that it changes by the function that it gets.
    """

    def __init__(self, run: Callable[[StopRequest, Callable[[JobSettings], JobSettings]], ResultT]) -> None:
        self._stop = StopRequest()
        self._meter = Meter()
        self._lock = threading.Lock()
        self._ended: Future[ResultT] = Future()
        self._ended.set_running_or_notify_cancel()
        threading.Thread(target=self._work, args=(run,), name="headrace-job", daemon=True).start()

    def __await__(self) -> Generator[object, None, ResultT]:
        """What `headrace.run` would return; cancelling the task that waits cancels the job.

        Raises:
            JobError: the job was cancelled, or cannot continue. Finished records are kept.
        """
        return self._wait().__await__()

    @public
    def result(self, timeout: float | None = None) -> ResultT:
        """What `await` gives, from a thread that may block; waits at most `timeout` seconds.

        Raises:
            TimeoutError: the job still runs.
            JobError: as `await`.
        """
        if current_loop() is not None:
            raise ConfigError("result() would block the running event loop: await the job instead")
        return self._ended.result(timeout)

    def cancel(self) -> None:
        """Stop reading, commit what is finished and end; the same job continues there when it is run again."""
        self._stop.request()

    @property
    def is_done(self) -> bool:
        return self._ended.done()

    @property
    def progress(self) -> Snapshot:
        """Records finished and failed so far, the rates of the last 20 seconds, and the time that is left."""
        with self._lock:
            return self._meter.snapshot(time.monotonic())

    async def _wait(self) -> ResultT:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._ended))
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _work(self, run: Callable[[StopRequest, Callable[[JobSettings], JobSettings]], ResultT]) -> None:
        try:
            result = attempted(run, self._stop, self._watched)
            if isinstance(result, BaseException):
                self._ended.set_exception(result)
            else:
                self._ended.set_result(result)
        finally:
            if not self._ended.done():
                self._ended.set_exception(JobError("the process ends; run the job again to continue"))

    def _watched(self, settings: JobSettings) -> JobSettings:
        return replace(settings, listeners=(*settings.listeners, self._hear))

    def _hear(self, event: Event) -> None:
        with self._lock:
            self._meter.add(event)


def refuse_cancelled(state: str, records: int) -> None:
    """Raise the error of a job that was cancelled, if that is how it ended."""
    if state == "interrupted":
        raise JobError(
            f"the job was cancelled when {records:,} records were finished; they are kept; run it again to continue"
        )
