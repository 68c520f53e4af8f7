"""OpenAI's batches: what is asked, what is running, and what became of it, kept on disk and continued after any end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import shutil
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.errors import HeadraceError, ResumeMismatchError
from headrace.io.storage.parts import atomic_file
from headrace.openai_protocol import batch_error
from headrace.retry import RetryPolicy, is_transient_state
from headrace.serving.auth import EVERYBODY, Tenant
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
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
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
        self._batches: dict[str, dict[str, Any]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancels: dict[str, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._validating = asyncio.Semaphore(1)
        # Of their own: those of the loop are for files, which must not wait for batches.
        self._threads = ThreadPoolExecutor(AT_ONCE + 2, "headrace-batch")
        self._stopping = False
        self.ended: Counter[str] = Counter()
        """Batches that have ended since the server started, by status."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continue what is unfinished; on leaving stop it, to be continued by the next server."""
        for path in self._folder.glob("batch_*.json"):
            try:
                batch = json.loads(path.read_bytes())
                self._batches[batch["id"]] = batch
            except (ValueError, KeyError, TypeError) as error:
                logger.error("batch file %s is damaged and left out: %s", path, error)
        for batch in sorted(self._batches.values(), key=lambda batch: int(batch["created_at"])):
            if batch["status"] in _OPEN:
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
        found = Counter(str(batch["status"]) for batch in self._batches.values())
        return {status: found[status] for status in _OPEN}

    # -- what the routes call ------------------------------------------------------------------------------------

    def create(
        self,
        input_file: str,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        tenant: Tenant = EVERYBODY,
    ) -> dict[str, Any]:
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
        batch: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": input_file,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": created,
            "expires_at": created + _seconds(window),
            **{f"{status}_at": None for status in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            "owner": tenant.name,
        }
        self._save(batch)
        self._batches[batch["id"]] = batch
        self._begin(batch)
        return batch

    def get(self, identity: str, tenant: Tenant = EVERYBODY) -> dict[str, Any]:
        """The batch as it is now; raises ApiError 404 where there is none, or none that this tenant may know of."""
        batch = self._batches.get(identity) if _ID.fullmatch(identity) else None
        if batch is None or not tenant.owns(batch):
            raise ApiError(404, f"there is no batch {identity!r:.80}", code="batch_not_found", param="batch_id")
        return batch

    def list(self, tenant: Tenant = EVERYBODY) -> list[dict[str, Any]]:
        """A tenant's batches, the newest first."""
        own = (batch for batch in self._batches.values() if tenant.owns(batch))
        return sorted(own, key=lambda batch: (-int(batch["created_at"]), str(batch["id"])))

    def cancel(self, identity: str, tenant: Tenant = EVERYBODY) -> dict[str, Any]:
        """Stop a batch, keeping what is finished.

        Raises:
            ApiError: 404 as `get` does, or 409 for one that has ended.
            OSError: it cannot be noted.
        """
        batch = self.get(identity, tenant)
        if batch["status"] not in _OPEN:
            raise ApiError(409, f"the batch has ended: it is {batch['status']}", code="batch_ended")
        if batch["status"] != "cancelling":
            self._turn(batch, "cancelling")
            self._cancels[identity].set()
            if identity in self._runs:
                self._runs[identity].stop()
        return batch

    def release(self, file: str, tenant: Tenant = EVERYBODY) -> None:
        """Forget a file that no batch needs.

        Raises:
            ApiError: 404 where there is none for this tenant, 409 while a batch reads it.
        """
        self._files.get(file, tenant)
        for batch in self._batches.values():
            if batch["input_file_id"] == file and batch["status"] in _OPEN:
                which = batch["id"] if tenant.owns(batch) else "another key's"
                raise ApiError(
                    409,
                    f"file {file} is the input of a running batch ({which}): cancel that, or wait for its end",
                    code="file_in_use",
                    param="file_id",
                )
        self._files.forget(file)

    # -- one batch -----------------------------------------------------------------------------------------------

    def _begin(self, batch: dict[str, Any]) -> None:
        identity = batch["id"]
        cancelled = self._cancels[identity] = asyncio.Event()
        if batch["status"] == "cancelling":
            cancelled.set()
        task = asyncio.get_running_loop().create_task(self._live(batch), name=f"headrace-{identity}")
        self._tasks[identity] = task
        task.add_done_callback(lambda _: self._forget(identity))

    def _forget(self, identity: str) -> None:
        self._tasks.pop(identity, None)
        self._cancels.pop(identity, None)

    async def _live(self, batch: dict[str, Any]) -> None:
        """A batch from where it is to its end."""
        failures, told = 0, ""
        while not self._stopping and batch["status"] in _OPEN:
            if batch["status"] == "validating":
                async with self._validating:
                    problem = await self._attempt(batch, self._validate(batch))
            else:
                async with self._slot(batch):
                    problem = await self._attempt(batch, self._work(batch))
            if problem is None:
                failures = 0
                continue
            failures += 1
            if str(problem) != told:
                told = str(problem)
                logger.warning("%s waits: %s", batch["id"], told)
            # Another model is served than the batch was begun with: only another server can go on with it.
            another_model = isinstance(problem, ResumeMismatchError)
            await self._pause(batch, math.inf if another_model else _RETRIES.wait_s(failures))

    @asynccontextmanager
    async def _slot(self, batch: dict[str, Any]) -> AsyncIterator[None]:
        """Its turn to run; one that is cancelled needs none."""
        cancelled = asyncio.ensure_future(self._cancels[batch["id"]].wait())
        turn = asyncio.ensure_future(self._slots.acquire())
        try:
            await asyncio.wait((cancelled, turn), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            cancelled.cancel()
            if turn.done() and not turn.cancelled():
                self._slots.release()
            turn.cancel()

    async def _pause(self, batch: dict[str, Any], seconds: float) -> None:
        """Until it is worth another try, or the batch is cancelled or expires."""
        left_s = max(batch["expires_at"] - now(), 1)
        cancelled = self._cancels[batch["id"]]
        if cancelled.is_set():  # it cannot even be ended now
            await asyncio.sleep(min(seconds, _RETRIES.max_backoff_s))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, left_s)):
                await cancelled.wait()

    async def _attempt(self, batch: dict[str, Any], step: Coroutine[Any, Any, None]) -> Exception | None:
        """Take a step with a batch; returns what it has to wait for first, if it cannot be taken."""
        identity = batch["id"]
        try:
            try:
                await step
            except (HeadraceError, ApiError, OSError) as error:
                if self._stopping:
                    return None  # it was the server's end that it met: the next one continues it
                if is_transient_state(error):
                    return error
                logger.error("%s failed: %s", identity, error)
                await self._fail(batch, error)
            except Exception as error:  # a bug: this task is nobody's else to look at
                logger.exception("%s failed", identity)
                await self._fail(batch, error)
        except OSError as error:  # there is no room even to say so
            return error
        finally:
            self._runs.pop(identity, None)
        return None

    async def _thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _validate(self, batch: dict[str, Any]) -> None:
        """Look through the input file; what is wrong with it fails the batch before anything is computed."""
        source = self._files.path(batch["input_file_id"])

        def stopped() -> bool:
            return self._stopping or batch["status"] != "validating"

        found = await self._thread(partial(self._means.look_through, source, batch["endpoint"], stopped))
        if stopped():
            return
        if found.errors:
            batch["errors"] = {"object": "list", "data": found.errors}
            self._end(batch, "failed")
            return
        batch["request_counts"]["total"] = found.requests
        self._turn(batch, "in_progress")

    async def _work(self, batch: dict[str, Any]) -> None:
        folder = self._folder / batch["id"]
        # The first turn of a cancelled batch may be its last: nothing is there to be kept.
        begun = folder.exists()
        source = self._files.path(batch["input_file_id"])
        run = self._means.make_run(source, folder, batch["endpoint"], batch.get("owner"))
        end = BatchEnd(complete=False, output=None, errors=None)
        if batch["status"] != "cancelling" and now() < batch["expires_at"]:
            folder.mkdir(exist_ok=True)
            begun = True
            self._runs[batch["id"]] = run
            end = await self._watch(batch, run)
        if self._stopping and not end.complete:
            return
        if not end.complete and begun:
            end = await self._thread(run.salvage)
        self._count(batch, run)
        self._finish(batch, end)

    async def _watch(self, batch: dict[str, Any], run: BatchRun) -> BatchEnd:
        """Run to the end, or until it is cancelled or its time is up."""
        working = asyncio.get_running_loop().create_task(self._thread(run.run), name="headrace-batch-run")
        while True:
            done, _ = await asyncio.wait({working}, timeout=_LOOK_S)
            self._count(batch, run)
            if done:
                return working.result()
            if now() >= batch["expires_at"] or batch["status"] == "cancelling":
                run.stop()

    def _count(self, batch: dict[str, Any], run: BatchRun) -> None:
        counts = batch["request_counts"]
        counts["completed"], counts["failed"] = run.completed, run.failed

    def _finish(self, batch: dict[str, Any], end: BatchEnd) -> None:
        ended: Literal["completed", "cancelled", "expired"] = "completed"
        if not end.complete:
            ended = "cancelled" if batch["status"] == "cancelling" else "expired"
        elif batch["status"] != "finalizing":
            self._turn(batch, "finalizing")
        self._hand_over(batch, end)
        self._end(batch, ended)

    async def _fail(self, batch: dict[str, Any], error: Exception) -> None:
        """End a batch that cannot go on; what is finished is in its files."""
        folder = self._folder / batch["id"]
        if folder.exists():
            try:
                source = self._files.path(batch["input_file_id"])
                run = self._means.make_run(source, folder, batch["endpoint"], batch.get("owner"))
                end = await self._thread(run.salvage)
            except (HeadraceError, ApiError, OSError) as lost:
                logger.error("what is finished of %s cannot be had: %s", batch["id"], lost)
            else:
                self._count(batch, run)
                self._hand_over(batch, end)
        message = getattr(error, "detail", None) or " ".join(str(error).split())
        if isinstance(error, OSError):
            message = error.strerror or type(error).__name__
        message = message.replace(str(self._folder.parent), "...")  # nothing of the server's file system
        batch["errors"] = {"object": "list", "data": [batch_error(type(error).__name__, message)]}
        self._end(batch, "failed")

    def _hand_over(self, batch: dict[str, Any], end: BatchEnd) -> None:
        """Turn the files of a batch over to the store."""
        identity, owner = batch["id"], batch.get("owner")
        if end.output is not None:
            name = f"{identity}_output.jsonl"
            batch["output_file_id"] = self._files.adopt(end.output, f"{identity} output", name, owner)
        if end.errors is not None:
            name = f"{identity}_error.jsonl"
            batch["error_file_id"] = self._files.adopt(end.errors, f"{identity} errors", name, owner)

    def _end(self, batch: dict[str, Any], status: str) -> None:
        """Say that the batch has ended, then clean up: a kill costs nothing."""
        self._turn(batch, status)
        self.ended[status] += 1
        shutil.rmtree(self._folder / batch["id"], ignore_errors=True)

    def _turn(self, batch: dict[str, Any], status: str) -> None:
        """The batch's next status, on disk before anybody hears of it."""
        changed = {**batch, "status": status, f"{status}_at": now()}
        self._save(changed)
        batch.update(changed)

    def _save(self, batch: dict[str, Any]) -> None:
        with atomic_file(self._folder / f"{batch['id']}.json") as file:
            file.write(json.dumps(batch).encode())


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
