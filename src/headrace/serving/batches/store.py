"""The batches of a server: stored on disk, run in order and continued after a restart."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from headrace.errors import HeadraceError, ResumeMismatchError
from headrace.io.storage.atomic import atomic_file
from headrace.openai_protocol import batch_error
from headrace.retry import RetryPolicy, is_transient_state
from headrace.serving.auth import EVERYBODY, Tenant
from headrace.serving.batches.batch import OPEN, BatchStatus, RequestCounts, StoredBatch
from headrace.serving.batches.files import now
from headrace.serving.batches.runs import BatchEnd, BatchRun, BatchServices
from headrace.serving.errors import ApiError
from headrace.wording import shown

logger = logging.getLogger("headrace")
T = TypeVar("T")

_ID = re.compile(r"batch_[0-9a-f]{32}")
AT_ONCE = 4
"""Batches that run concurrently. Others wait in order of creation."""
_POLL_S = 0.2
"""Seconds between progress updates of a running batch."""
_EXPIRY_S = 60.0
"""Seconds between deletions of expired files."""
_RETRIES = RetryPolicy(max_attempts=None, backoff_s=1.0, max_backoff_s=30.0, jitter=0.0)
"""Retries of a batch after transient errors."""


class _Changes(TypedDict, total=False):
    counts: RequestCounts
    errors: Sequence[Mapping[str, object]]
    output_file_id: str
    error_file_id: str


class Batches:
    """All batches of a server.

    A batch fails only because of its own errors. After a transient server error, such as a full disk, it retries.
    """

    def __init__(self, folder: Path, services: BatchServices) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._services = services
        self._files = services.files
        self._batches: dict[str, StoredBatch] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancels: dict[str, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._validating = asyncio.Semaphore(1)
        # Separate from the loop's default executor, so that file requests do not wait for batches.
        self._threads = ThreadPoolExecutor(AT_ONCE + 2, "headrace-batch")
        self._stopping = False
        self.ended: Counter[BatchStatus] = Counter()
        """Batches that have ended since the server started, by status."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continue unfinished batches; on exit stop them, for the next server to continue."""
        for path in self._folder.glob("batch_*.json"):
            try:
                batch = StoredBatch.decode(path.read_bytes())
                self._batches[batch.id] = batch
            except (ValueError, KeyError, TypeError) as error:
                logger.error("skipping damaged batch file %s: %s", path, error)
        for batch in sorted(self._batches.values(), key=lambda batch: batch.created_at):
            if batch.status.is_open:
                self._begin(batch)
        expiring = asyncio.get_running_loop().create_task(self._delete_expired(), name="headrace-expired-files")
        try:
            yield
        finally:
            self._stopping = True
            expiring.cancel()
            for run in self._runs.values():
                run.stop()
            waiting = [task for identity, task in self._tasks.items() if identity not in self._runs]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._threads.shutdown(wait=False)

    async def _delete_expired(self) -> None:
        while True:
            in_use = {batch.input_file_id for batch in self._batches.values() if batch.status.is_open}
            await self._thread(partial(self._files.delete_expired, in_use))
            await asyncio.sleep(_EXPIRY_S)

    def counts(self) -> Mapping[str, int]:
        """Number of open batches by status."""
        found = Counter(batch.status for batch in self._batches.values())
        return {status: found[status] for status in OPEN}

    # -- called by the routes -------------------------------------------------------------------------------------

    def create(  # noqa: PLR0913 - what clients may say of a batch
        self,
        input_file: str,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        tenant: Tenant = EVERYBODY,
        output_expires_after_s: int | None = None,
        requests: int = 0,
    ) -> StoredBatch:
        """Create and start a batch; of how many requests, if that is known.

        Raises:
            ApiError: 400 or 404 for an invalid request.
            OSError: the batch cannot be stored.
        """
        if endpoint not in self._services.endpoints:
            known = ", ".join(self._services.endpoints) or "none for this model"
            raise ApiError(
                400, f"endpoint is {shown(endpoint, 80)}; known: {known}", code="bad_endpoint", param="endpoint"
            )
        if self._files.get(input_file, tenant)["purpose"] != "batch":
            raise ApiError(400, "the input file's purpose is not batch", code="bad_purpose", param="input_file_id")
        created = now()
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file,
            completion_window=window,
            created_at=created,
            expires_at=created + _seconds(window),
            metadata=metadata,
            owner=tenant.name,
            output_expires_after_s=output_expires_after_s,
            counts=RequestCounts(requests),
        )
        self._store(batch)
        self._begin(batch)
        return batch

    def get(self, identity: str, tenant: Tenant = EVERYBODY) -> StoredBatch:
        """The current batch; raises ApiError 404 if it does not exist or belongs to another tenant."""
        batch = self._batches.get(identity) if _ID.fullmatch(identity) else None
        if batch is None or not tenant.owns(batch.owner):
            raise ApiError(404, f"there is no batch {shown(identity, 80)}", code="batch_not_found", param="batch_id")
        return batch

    def list(self, tenant: Tenant = EVERYBODY) -> list[StoredBatch]:
        """A tenant's batches, newest first."""
        own = (batch for batch in self._batches.values() if tenant.owns(batch.owner))
        return sorted(own, key=lambda batch: (-batch.created_at, batch.id))

    def cancel(self, identity: str, tenant: Tenant = EVERYBODY) -> StoredBatch:
        """Cancel a batch. Finished records are kept.

        Raises:
            ApiError: 404 like `get`, or 409 for a batch that has ended.
            OSError: the change cannot be stored.
        """
        status = self.get(identity, tenant).status
        if not status.is_open:
            raise ApiError(409, f"the batch has already ended: its status is {status}", code="batch_ended")
        if status is not BatchStatus.CANCELLING:
            self._update(identity, BatchStatus.CANCELLING)
            self._cancels[identity].set()
            if identity in self._runs:
                self._runs[identity].stop()
        return self._batches[identity]

    def release(self, file: str, tenant: Tenant = EVERYBODY) -> None:
        """Delete the description of a file that no open batch uses.

        Raises:
            ApiError: 404 if the tenant has no such file, 409 while a batch uses it.
        """
        self._files.get(file, tenant)
        for batch in self._batches.values():
            if batch.input_file_id == file and batch.status.is_open:
                which = batch.id if tenant.owns(batch.owner) else "of another key"
                message = (
                    f"file {file} is the input of a running batch ({which}): cancel the batch or wait for it to end"
                )
                raise ApiError(409, message, code="file_in_use", param="file_id")
        self._files.forget(file)

    # -- one batch -----------------------------------------------------------------------------------------------

    def _begin(self, batch: StoredBatch) -> None:
        cancelled = self._cancels[batch.id] = asyncio.Event()
        if batch.status is BatchStatus.CANCELLING:
            cancelled.set()
        task = asyncio.get_running_loop().create_task(self._advance(batch.id), name=f"headrace-{batch.id}")
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._forget(batch.id))

    def _forget(self, identity: str) -> None:
        self._tasks.pop(identity, None)
        self._cancels.pop(identity, None)

    async def _advance(self, identity: str) -> None:
        """Advance a batch from its current status to its end."""
        failures, logged = 0, ""
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
            if str(problem) != logged:
                logged = str(problem)
                logger.warning("%s waits to retry: %s", identity, logged)
            # The batch was started with another model: only a server with that model can continue it.
            another_model = isinstance(problem, ResumeMismatchError)
            await self._pause(batch, math.inf if another_model else _RETRIES.wait_s(failures))

    @asynccontextmanager
    async def _slot(self, identity: str) -> AsyncIterator[None]:
        """Wait for a slot to run in. A cancelled batch does not wait."""
        cancelled = asyncio.ensure_future(self._cancels[identity].wait())
        slot = asyncio.ensure_future(self._slots.acquire())
        try:
            await asyncio.wait((cancelled, slot), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            cancelled.cancel()
            if slot.done() and not slot.cancelled():
                self._slots.release()
            slot.cancel()

    async def _pause(self, batch: StoredBatch, seconds: float) -> None:
        """Wait before a retry, until the batch is cancelled or expires at the latest."""
        left_s = max(batch.expires_at - now(), 1)
        cancelled = self._cancels[batch.id]
        if cancelled.is_set():  # even the end cannot be stored now
            await asyncio.sleep(min(seconds, _RETRIES.max_backoff_s))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, left_s)):
                await cancelled.wait()

    async def _attempt(self, identity: str, step: Awaitable[None]) -> Exception | None:
        """Run one step of a batch; returns a transient error to retry after, if any."""
        try:
            try:
                await step
            except (HeadraceError, ApiError, OSError) as error:
                if self._stopping:
                    return None  # the server is stopping; the next one continues the batch
                if is_transient_state(error):
                    return error
                logger.error("%s failed: %s", identity, error)
                await self._fail(identity, error)
            except Exception as error:  # a bug; nothing else would report it
                logger.exception("%s failed", identity)
                await self._fail(identity, error)
        except OSError as error:  # even the failure cannot be stored
            return error
        finally:
            self._runs.pop(identity, None)
        return None

    async def _thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _validate(self, batch: StoredBatch) -> None:
        source = self._files.kept(batch.input_file_id)

        def stopped() -> bool:
            return self._stopping or self._batches[batch.id].status is not BatchStatus.VALIDATING

        found = await self._thread(partial(self._services.validate, source, batch.endpoint, batch.owner, stopped))
        if stopped():
            return
        if found.errors:
            self._end(batch.id, BatchStatus.FAILED, errors=tuple(found.errors))
        else:
            self._update(batch.id, BatchStatus.IN_PROGRESS, counts=RequestCounts(found.requests))

    def _run_of(self, batch: StoredBatch) -> BatchRun:
        source = self._files.kept(batch.input_file_id)
        return self._services.make_run(source, self._folder / batch.id, batch.endpoint, batch.owner)

    async def _work(self, identity: str) -> None:
        batch = self._batches[identity]
        folder = self._folder / identity
        # A batch cancelled before its first run has no output to keep.
        started = folder.exists()
        run = self._run_of(batch)
        end = BatchEnd(complete=False, output=None, errors=None)
        if batch.status is not BatchStatus.CANCELLING and now() < batch.expires_at:
            folder.mkdir(exist_ok=True)
            started = True
            self._runs[identity] = run
            end = await self._run(batch, run)
        if self._stopping and not end.complete:
            return
        if not end.complete and started:
            end = await self._thread(run.salvage)
        self._count(identity, run)
        self._finish(identity, end)

    async def _run(self, batch: StoredBatch, run: BatchRun) -> BatchEnd:
        """Run to the end, or until the batch is cancelled or expires."""
        working = asyncio.get_running_loop().create_task(run.run(self._thread), name="headrace-batch-run")
        while True:
            done, _ = await asyncio.wait({working}, timeout=_POLL_S)
            self._count(batch.id, run)
            if done:
                return working.result()
            if now() >= batch.expires_at or self._batches[batch.id].status is BatchStatus.CANCELLING:
                run.stop()

    def _count(self, identity: str, run: BatchRun) -> None:
        """Update the counts in memory. The next status change stores them."""
        batch = self._batches[identity]
        counts = RequestCounts(batch.counts.total, run.completed, run.failed)
        self._batches[identity] = replace(batch, counts=counts)

    def _finish(self, identity: str, end: BatchEnd) -> None:
        status = self._batches[identity].status
        ended = BatchStatus.COMPLETED
        if not end.complete:
            ended = BatchStatus.CANCELLED if status is BatchStatus.CANCELLING else BatchStatus.EXPIRED
        elif status is not BatchStatus.FINALIZING:
            self._update(identity, BatchStatus.FINALIZING)
        self._end(identity, ended, **self._adopted(identity, end))

    async def _fail(self, identity: str, error: Exception) -> None:
        """Fail a batch that cannot continue. Finished records are in its files."""
        changes = _Changes()
        if (self._folder / identity).exists():
            try:
                run = self._run_of(self._batches[identity])
                end = await self._thread(run.salvage)
            except (HeadraceError, ApiError, OSError) as lost:
                logger.error("cannot write the finished records of %s: %s", identity, lost)
            else:
                self._count(identity, run)
                changes = self._adopted(identity, end)
        message = getattr(error, "detail", None) or " ".join(str(error).split())
        if isinstance(error, OSError):
            message = error.strerror or type(error).__name__
        message = message.replace(str(self._folder.parent), "...")  # hide paths of the server
        changes["errors"] = (batch_error(type(error).__name__, message),)
        self._end(identity, BatchStatus.FAILED, **changes)

    def _adopted(self, identity: str, end: BatchEnd) -> _Changes:
        """Move the output files of a batch to the file store; returns their ids."""
        batch, adopted = self._batches[identity], _Changes()
        kept = batch.owner, batch.output_expires_after_s
        if end.output is not None:
            name = f"{identity}_output.jsonl"
            adopted["output_file_id"] = self._files.adopt(end.output, f"{identity} output", name, *kept)
        if end.errors is not None:
            name = f"{identity}_error.jsonl"
            adopted["error_file_id"] = self._files.adopt(end.errors, f"{identity} errors", name, *kept)
        return adopted

    def _end(self, identity: str, status: BatchStatus, **changes: Unpack[_Changes]) -> None:
        """Store the final status, then clean up, so that a kill in between loses nothing."""
        self._update(identity, status, **changes)
        self.ended[status] += 1
        shutil.rmtree(self._folder / identity, ignore_errors=True)

    def _update(self, identity: str, status: BatchStatus, **changes: Unpack[_Changes]) -> None:
        self._store(replace(self._batches[identity], **changes).with_status(status, now()))

    def _store(self, batch: StoredBatch) -> None:
        """Store a batch on disk, then in memory."""
        with atomic_file(self._folder / f"{batch.id}.json") as file:
            file.write(batch.encode())
        self._batches[batch.id] = batch


def _seconds(window: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,4})([smhd])", window)
    if match is None:
        message = f"completion_window is {shown(window, 40)}: it must be a number followed by s, m, h or d, such as 24h"
        raise ApiError(400, message, code="bad_window", param="completion_window")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]]
