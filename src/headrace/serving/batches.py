"""OpenAI's batches: what is asked, what is running, and what became of it, kept on disk and continued after any end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from headrace.errors import HeadraceError
from headrace.io.parts import atomic_file
from headrace.serving.errors import ApiError
from headrace.serving.files import FileStore, now

logger = logging.getLogger("headrace")

_ID = re.compile(r"batch_[0-9a-f]{32}")
_AT_ONCE = 4
"""Batches that run at the same time; others wait in the order they came."""
_LOOK_S = 0.2
"""How often a running batch is asked how far it is."""
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a run of a batch ended."""

    complete: bool
    """Every record has ended; otherwise it was asked to stop."""
    output: Path | None
    errors: Path | None


class BatchRun(Protocol):
    """One run of one batch, continuing what earlier runs have done."""

    completed: int
    """Requests answered, those of earlier runs included."""
    failed: int

    def run(self) -> BatchEnd:
        """Work until the end, or until asked to stop. Blocks.

        Raises:
            HeadraceError: it cannot start or go on; what is finished is kept.
        """
        ...

    def stop(self) -> None:
        """Ask for an early end; from any thread."""
        ...

    def salvage(self) -> BatchEnd:
        """Make files of what is finished, of a batch that will not be continued. Blocks."""
        ...


class Batches:
    """All batches of a server.

    Args:
        folder: where they are kept.
        files: where their inputs are, and their outputs go.
        endpoints: what the model can do.
        make_run: a run of the batch whose input and working folder these are, for this endpoint.
    """

    def __init__(
        self,
        folder: Path,
        files: FileStore,
        endpoints: tuple[str, ...],
        make_run: Callable[[Path, Path, str], BatchRun],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files = files
        self._endpoints = endpoints
        self._make_run = make_run
        self._batches: dict[str, dict[str, Any]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continue what is unfinished; on leaving stop it, to be continued by the next server."""
        for path in self._folder.glob("batch_*.json"):
            batch = json.loads(path.read_bytes())
            self._batches[batch["id"]] = batch
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

    # -- what the routes call ------------------------------------------------------------------------------------

    def create(self, input_file: str, endpoint: str, window: str, metadata: dict[str, str] | None) -> dict[str, Any]:
        """Begin a batch.

        Raises:
            ApiError: 400 or 404, for what cannot be begun.
        """
        if endpoint not in self._endpoints:
            known = ", ".join(self._endpoints) or "none for this model"
            raise ApiError(400, f"endpoint is {endpoint!r:.80}; known: {known}", code="bad_endpoint", param="endpoint")
        if self._files.get(input_file)["purpose"] != "batch":
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
        }
        self._save(batch)
        self._batches[batch["id"]] = batch
        self._begin(batch)
        return batch

    def get(self, identity: str) -> dict[str, Any]:
        """The batch as it is now; raises ApiError 404 where there is none."""
        batch = self._batches.get(identity) if _ID.fullmatch(identity) else None
        if batch is None:
            raise ApiError(404, f"there is no batch {identity!r:.80}", code="batch_not_found", param="batch_id")
        return batch

    def list(self) -> list[dict[str, Any]]:
        """All batches, the newest first."""
        return sorted(self._batches.values(), key=lambda batch: (-int(batch["created_at"]), str(batch["id"])))

    def cancel(self, identity: str) -> dict[str, Any]:
        """Stop a batch, keeping what is finished; raises ApiError 404, or 409 for one that has ended."""
        batch = self.get(identity)
        if batch["status"] not in _OPEN:
            raise ApiError(409, f"the batch has ended: it is {batch['status']}", code="batch_ended")
        if batch["status"] != "cancelling":
            self._turn(batch, "cancelling")
            if identity in self._runs:
                self._runs[identity].stop()
        return batch

    # -- one batch -----------------------------------------------------------------------------------------------

    def _begin(self, batch: dict[str, Any]) -> None:
        identity = batch["id"]
        task = asyncio.get_running_loop().create_task(self._live(batch), name=f"headrace-{identity}")
        self._tasks[identity] = task
        task.add_done_callback(lambda _: self._tasks.pop(identity, None))

    async def _live(self, batch: dict[str, Any]) -> None:
        """A batch from where it is to its end."""
        async with self._slots:
            if self._stopping:
                return
            identity = batch["id"]
            try:
                await self._work(batch)
            except (HeadraceError, ApiError, OSError) as error:
                if self._stopping:
                    return  # it was the server's end that it met: the next one continues it
                logger.error("%s failed: %s", identity, error)
                self._fail(batch, error)
            finally:
                self._runs.pop(identity, None)

    async def _work(self, batch: dict[str, Any]) -> None:
        source = self._files.path(batch["input_file_id"])
        if not batch["request_counts"]["total"]:
            batch["request_counts"]["total"] = await asyncio.to_thread(_count_lines, source)
        folder = self._folder / batch["id"]
        folder.mkdir(exist_ok=True)
        run = self._runs[batch["id"]] = self._make_run(source, folder, batch["endpoint"])
        end = BatchEnd(complete=False, output=None, errors=None)
        if batch["status"] != "cancelling" and now() < batch["expires_at"]:
            if batch["status"] == "validating":
                self._turn(batch, "in_progress")
            end = await self._watch(batch, run)
        if self._stopping and not end.complete:
            return
        if not end.complete:
            end = await asyncio.to_thread(run.salvage)
        self._count(batch, run)
        self._finish(batch, end)

    async def _watch(self, batch: dict[str, Any], run: BatchRun) -> BatchEnd:
        """Run to the end, or until it is cancelled or its time is up."""
        working = asyncio.get_running_loop().create_task(asyncio.to_thread(run.run), name="headrace-batch-run")
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
        """Turn the files over to the store, then say that the batch has ended, then clean up: a kill costs nothing."""
        identity = batch["id"]
        ended: Literal["completed", "cancelled", "expired"] = "completed"
        if not end.complete:
            ended = "cancelled" if batch["status"] == "cancelling" else "expired"
        elif batch["status"] != "finalizing":
            self._turn(batch, "finalizing")
        if end.output is not None:
            batch["output_file_id"] = self._files.adopt(end.output, f"{identity} output", f"{identity}_output.jsonl")
        if end.errors is not None:
            batch["error_file_id"] = self._files.adopt(end.errors, f"{identity} errors", f"{identity}_error.jsonl")
        self._turn(batch, ended)
        shutil.rmtree(self._folder / identity, ignore_errors=True)

    def _fail(self, batch: dict[str, Any], error: Exception) -> None:
        message = getattr(error, "detail", None) or " ".join(str(error).split())
        if isinstance(error, OSError):
            message = error.strerror or type(error).__name__
        message = message.replace(str(self._folder.parent), "...")  # nothing of the server's file system
        data = [{"code": type(error).__name__, "message": message, "line": None, "param": None}]
        batch["errors"] = {"object": "list", "data": data}
        try:
            self._turn(batch, "failed")
        except OSError as full:
            logger.error("cannot note that %s has failed: %s", batch["id"], full)

    def _turn(self, batch: dict[str, Any], status: str) -> None:
        """The batch's next status, on disk before anybody hears of it."""
        changed = {**batch, "status": status, f"{status}_at": now()}
        self._save(changed)
        batch.update(changed)

    def _save(self, batch: dict[str, Any]) -> None:
        with atomic_file(self._folder / f"{batch['id']}.json") as file:
            file.write(json.dumps(batch).encode())


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


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
