"""OpenAI's batches: what is asked, what is running, and what became of it, kept on disk and continued after any end."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import HeadraceError, ResumeMismatchError
from headrace.io.storage.parts import atomic_file
from headrace.openai_protocol import batch_error
from headrace.retry import RetryPolicy, is_transient_state
from headrace.serving.auth import EVERYBODY, Tenant
from headrace.serving.batches.batch import OPEN, Batch, BatchStatus, RequestCounts
from headrace.serving.batches.files import now
from headrace.serving.batches.runs import BatchEnd, BatchRun, BatchServices
from headrace.serving.errors import ApiError

logger = logging.getLogger("headrace")
T = TypeVar("T")

_ID = re.compile(r"batch_[0-9a-f]{32}")
AT_ONCE = 4
"""Batches that run at the same time; others wait in the order they came."""
_LOOK_S = 0.2
"""How often a running batch is asked how far it is."""
_RETRIES = RetryPolicy(max_attempts=None, backoff_s=1.0, max_backoff_s=30.0, jitter=0.0)
"""Of a batch that the server cannot go on with."""


class Batches:
    """All batches of a server.

    A batch ends as failed only for reasons of its own. What the server lacks, such as room on its disk, is waited for.

    Args:
        folder: where they are kept.
        means: what they are done with.
    """

    def __init__(self, folder: Path, means: BatchServices) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._means = means
        self._files = means.files
        self._batches: dict[str, Batch] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancels: dict[str, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._validating = asyncio.Semaphore(1)
        # Of their own: those of the loop are for files, which must not wait for batches.
        self._threads = ThreadPoolExecutor(AT_ONCE + 2, "headrace-batch")
        self._stopping = False
        self.ended: Counter[BatchStatus] = Counter()
        """Batches that have ended since the server started, by status."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continue what is unfinished; on leaving stop it, to be continued by the next server."""
        for path in self._folder.glob("batch_*.json"):
            try:
                batch = Batch.decode(path.read_bytes())
                self._batches[batch.id] = batch
            except (ValueError, KeyError, TypeError) as error:
                logger.error("batch file %s is damaged and left out: %s", path, error)
        for batch in sorted(self._batches.values(), key=lambda batch: batch.created_at):
            if batch.status.is_open:
                self._begin(batch)
        try:
            yield
        finally:
            self._stopping = True
            for run in self._runs.values():
                run.stop()
            waiting = [task for identity, task in self._tasks.items() if identity not in self._runs]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._threads.shutdown(wait=False)

    def counts(self) -> Mapping[str, int]:
        """How many batches have not ended, by status."""
        found = Counter(batch.status for batch in self._batches.values())
        return {status: found[status] for status in OPEN}

    # -- what the routes call ------------------------------------------------------------------------------------

    def create(
        self,
        input_file: str,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        tenant: Tenant = EVERYBODY,
    ) -> Batch:
        """Begin a batch.

        Raises:
            ApiError: 400 or 404, for what cannot be begun.
            OSError: it cannot be kept.
        """
        if endpoint not in self._means.endpoints:
            known = ", ".join(self._means.endpoints) or "none for this model"
            raise ApiError(400, f"endpoint is {endpoint!r:.80}; known: {known}", code="bad_endpoint", param="endpoint")
        if self._files.get(input_file, tenant)["purpose"] != "batch":
            raise ApiError(400, "the input file's purpose is not batch", code="bad_purpose", param="input_file_id")
        created = now()
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file,
            completion_window=window,
            created_at=created,
            expires_at=created + _seconds(window),
            metadata=metadata,
            owner=tenant.name,
        )
        self._keep(batch)
        self._begin(batch)
        return batch

    def get(self, identity: str, tenant: Tenant = EVERYBODY) -> Batch:
        """The batch as it is now; raises ApiError 404 where there is none, or none that this tenant may know of."""
        batch = self._batches.get(identity) if _ID.fullmatch(identity) else None
        if batch is None or not tenant.owns(batch.owner):
            raise ApiError(404, f"there is no batch {identity!r:.80}", code="batch_not_found", param="batch_id")
        return batch

    def list(self, tenant: Tenant = EVERYBODY) -> list[Batch]:
        """A tenant's batches, the newest first."""
        own = (batch for batch in self._batches.values() if tenant.owns(batch.owner))
        return sorted(own, key=lambda batch: (-batch.created_at, batch.id))

    def cancel(self, identity: str, tenant: Tenant = EVERYBODY) -> Batch:
        """Stop a batch, keeping what is finished.

        Raises:
            ApiError: 404 as `get` does, or 409 for one that has ended.
            OSError: it cannot be noted.
        """
        status = self.get(identity, tenant).status
        if not status.is_open:
            raise ApiError(409, f"the batch has ended: it is {status}", code="batch_ended")
        if status is not BatchStatus.CANCELLING:
            self._turn(identity, BatchStatus.CANCELLING)
            self._cancels[identity].set()
            if identity in self._runs:
                self._runs[identity].stop()
        return self._batches[identity]

    def release(self, file: str, tenant: Tenant = EVERYBODY) -> None:
        """Forget a file that no batch needs.

        Raises:
            ApiError: 404 where there is none for this tenant, 409 while a batch reads it.
        """
        self._files.get(file, tenant)
        for batch in self._batches.values():
            if batch.input_file_id == file and batch.status.is_open:
                which = batch.id if tenant.owns(batch.owner) else "another key's"
                raise ApiError(
                    409,
                    f"file {file} is the input of a running batch ({which}): cancel that, or wait for its end",
                    code="file_in_use",
                    param="file_id",
                )
        self._files.forget(file)

    # -- one batch -----------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        cancelled = self._cancels[batch.id] = asyncio.Event()
        if batch.status is BatchStatus.CANCELLING:
            cancelled.set()
        task = asyncio.get_running_loop().create_task(self._live(batch.id), name=f"headrace-{batch.id}")
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._forget(batch.id))

    def _forget(self, identity: str) -> None:
        self._tasks.pop(identity, None)
        self._cancels.pop(identity, None)

    async def _live(self, identity: str) -> None:
        """A batch from where it is to its end."""
        failures, told = 0, ""
        while not self._stopping and (batch := self._batches[identity]).status.is_open:
            if batch.status is BatchStatus.VALIDATING:
                async with self._validating:
                    problem = await self._attempt(identity, self._validate(batch))
            else:
                async with self._slot(identity):
                    problem = await self._attempt(identity, self._work(identity))
            if problem is None:
                failures = 0
                continue
            failures += 1
            if str(problem) != told:
                told = str(problem)
                logger.warning("%s waits: %s", identity, told)
            # Another model is served than the batch was begun with: only another server can go on with it.
            another_model = isinstance(problem, ResumeMismatchError)
            await self._pause(batch, math.inf if another_model else _RETRIES.wait_s(failures))

    @asynccontextmanager
    async def _slot(self, identity: str) -> AsyncIterator[None]:
        """Its turn to run; one that is cancelled needs none."""
        cancelled = asyncio.ensure_future(self._cancels[identity].wait())
        turn = asyncio.ensure_future(self._slots.acquire())
        try:
            await asyncio.wait((cancelled, turn), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            cancelled.cancel()
            if turn.done() and not turn.cancelled():
                self._slots.release()
            turn.cancel()

    async def _pause(self, batch: Batch, seconds: float) -> None:
        """Until it is worth another try, or the batch is cancelled or expires."""
        left_s = max(batch.expires_at - now(), 1)
        cancelled = self._cancels[batch.id]
        if cancelled.is_set():  # it cannot even be ended now
            await asyncio.sleep(min(seconds, _RETRIES.max_backoff_s))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, left_s)):
                await cancelled.wait()

    async def _attempt(self, identity: str, step: Coroutine[Any, Any, None]) -> Exception | None:
        """Take a step with a batch; returns what it has to wait for first, if it cannot be taken."""
        try:
            try:
                await step
            except (HeadraceError, ApiError, OSError) as error:
                if self._stopping:
                    return None  # it was the server's end that it met: the next one continues it
                if is_transient_state(error):
                    return error
                logger.error("%s failed: %s", identity, error)
                await self._fail(identity, error)
            except Exception as error:  # a bug: this task is nobody's else to look at
                logger.exception("%s failed", identity)
                await self._fail(identity, error)
        except OSError as error:  # there is no room even to say so
            return error
        finally:
            self._runs.pop(identity, None)
        return None

    async def _thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _validate(self, batch: Batch) -> None:
        """Look through the input file; what is wrong with it fails the batch before anything is computed."""
        source = self._files.path(batch.input_file_id)

        def stopped() -> bool:
            return self._stopping or self._batches[batch.id].status is not BatchStatus.VALIDATING

        found = await self._thread(partial(self._means.look_through, source, batch.endpoint, stopped))
        if stopped():
            return
        if found.errors:
            self._end(batch.id, BatchStatus.FAILED, errors=tuple(found.errors))
        else:
            self._turn(batch.id, BatchStatus.IN_PROGRESS, counts=RequestCounts(found.requests))

    def _run_of(self, batch: Batch) -> BatchRun:
        source = self._files.path(batch.input_file_id)
        return self._means.make_run(source, self._folder / batch.id, batch.endpoint, batch.owner)

    async def _work(self, identity: str) -> None:
        batch = self._batches[identity]
        folder = self._folder / identity
        # The first turn of a cancelled batch may be its last: nothing is there to be kept.
        begun = folder.exists()
        run = self._run_of(batch)
        end = BatchEnd(complete=False, output=None, errors=None)
        if batch.status is not BatchStatus.CANCELLING and now() < batch.expires_at:
            folder.mkdir(exist_ok=True)
            begun = True
            self._runs[identity] = run
            end = await self._watch(batch, run)
        if self._stopping and not end.complete:
            return
        if not end.complete and begun:
            end = await self._thread(run.salvage)
        self._count(identity, run)
        self._finish(identity, end)

    async def _watch(self, batch: Batch, run: BatchRun) -> BatchEnd:
        """Run to the end, or until it is cancelled or its time is up."""
        working = asyncio.get_running_loop().create_task(self._thread(run.run), name="headrace-batch-run")
        while True:
            done, _ = await asyncio.wait({working}, timeout=_LOOK_S)
            self._count(batch.id, run)
            if done:
                return working.result()
            if now() >= batch.expires_at or self._batches[batch.id].status is BatchStatus.CANCELLING:
                run.stop()

    def _count(self, identity: str, run: BatchRun) -> None:
        """Take over how far a run is; it is kept on disk with the next status."""
        batch = self._batches[identity]
        counts = RequestCounts(batch.counts.total, run.completed, run.failed)
        self._batches[identity] = replace(batch, counts=counts)

    def _finish(self, identity: str, end: BatchEnd) -> None:
        status = self._batches[identity].status
        ended = BatchStatus.COMPLETED
        if not end.complete:
            ended = BatchStatus.CANCELLED if status is BatchStatus.CANCELLING else BatchStatus.EXPIRED
        elif status is not BatchStatus.FINALIZING:
            self._turn(identity, BatchStatus.FINALIZING)
        self._end(identity, ended, **self._adopted(identity, end))

    async def _fail(self, identity: str, error: Exception) -> None:
        """End a batch that cannot go on; what is finished is in its files."""
        files: dict[str, str] = {}
        if (self._folder / identity).exists():
            try:
                run = self._run_of(self._batches[identity])
                end = await self._thread(run.salvage)
            except (HeadraceError, ApiError, OSError) as lost:
                logger.error("what is finished of %s cannot be had: %s", identity, lost)
            else:
                self._count(identity, run)
                files = self._adopted(identity, end)
        message = getattr(error, "detail", None) or " ".join(str(error).split())
        if isinstance(error, OSError):
            message = error.strerror or type(error).__name__
        message = message.replace(str(self._folder.parent), "...")  # nothing of the server's file system
        self._end(identity, BatchStatus.FAILED, errors=(batch_error(type(error).__name__, message),), **files)

    def _adopted(self, identity: str, end: BatchEnd) -> dict[str, str]:
        """Turn the files of a batch over to the store; returns their ids by the fields of a batch."""
        owner, adopted = self._batches[identity].owner, {}
        if end.output is not None:
            name = f"{identity}_output.jsonl"
            adopted["output_file_id"] = self._files.adopt(end.output, f"{identity} output", name, owner)
        if end.errors is not None:
            name = f"{identity}_error.jsonl"
            adopted["error_file_id"] = self._files.adopt(end.errors, f"{identity} errors", name, owner)
        return adopted

    def _end(self, identity: str, status: BatchStatus, **changes: Any) -> None:
        """Say that the batch has ended, then clean up: a kill costs nothing."""
        self._turn(identity, status, **changes)
        self.ended[status] += 1
        shutil.rmtree(self._folder / identity, ignore_errors=True)

    def _turn(self, identity: str, status: BatchStatus, **changes: Any) -> None:
        """The batch's next status, and other fields with it."""
        self._keep(replace(self._batches[identity], **changes).turned(status, now()))

    def _keep(self, batch: Batch) -> None:
        """The batch as it is from now on, on disk before anybody hears of it."""
        with atomic_file(self._folder / f"{batch.id}.json") as file:
            file.write(batch.encode())
        self._batches[batch.id] = batch


def _seconds(window: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,4})([smhd])", window)
    if match is None:
        raise ApiError(
            400,
            f"completion_window is {window!r:.40}: it must be a number and s, m, h or d, such as 24h",
            code="bad_window",
            param="completion_window",
        )
    return int(match[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]]
