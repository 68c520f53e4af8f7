"""A batch as a job on a model of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.app.jobs import job as jobs
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.profile import profile_of
from headrace.engines.tasks import task_named
from headrace.errors import ConfigError
from headrace.events import Event, JobStarted, Listener, PartCommitted
from headrace.io.formats.openai_batch import OpenAIWriter, url_of
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import Limits
from headrace.serving.admission.backfill import Backfill
from headrace.serving.batches.backfill_client import BackfillClient
from headrace.serving.batches.lines import RequestLines
from headrace.serving.batches.runs import BatchEnd, OnThread
from headrace.serving.batches.store import AT_ONCE
from headrace.serving.service import Service
from headrace.serving.state import ServerState

_LIMITS = Limits(max_error_rate=1.0, workers=1, part_records=1024, commit_interval_s=1.0)
_AHEAD = 2_048
"""Maximum records of a batch that are read but not yet answered."""
MOST_WAITING = 4 * AT_ONCE * _AHEAD
"""Maximum inputs of all batches in the batcher, besides one line of many inputs per batch."""
_LEAVING_S = 30.0
"""Seconds for records in the engine to finish when the model is to make room for another."""


class BulkModel:
    """A model that runs batches as jobs while it is loaded.

    Args:
        target_s: latency target of requests during bulk work, in seconds.
    """

    def __init__(self, server: ServerState, task: str, target_s: float | None, listeners: list[Listener]) -> None:
        self.server = server
        self.task = task
        self._target_s = target_s
        self._listeners = listeners
        self.backfill: Backfill | None = None
        self._done_before = 0

    @asynccontextmanager
    async def running(self, service: Service) -> AsyncIterator[None]:
        backfill = Backfill(
            service.engine, service.batcher, self._target_s, lambda: service.admission.requests, service.tokens
        )
        self._listeners.append(backfill.listen)
        self.backfill = backfill
        try:
            yield
        finally:
            self.backfill = None
            self._done_before += backfill.done
            backfill.refuse()
            self._listeners.remove(backfill.listen)

    @property
    def done(self) -> int:
        """Bulk records answered."""
        return self._done_before + (0 if self.backfill is None else self.backfill.done)

    @property
    def waiting(self) -> int:
        """Bulk records not submitted yet."""
        return 0 if self.backfill is None else self.backfill.waiting


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a run of a batch has to do."""

    source: Path
    folder: Path
    url: str
    owner: str | None
    name: str
    """The model's name in answers."""
    batch: str
    """In the ids of answers."""


UseModel = Callable[[Callable[[], None]], AbstractAsyncContextManager[object]]
"""Makes a context in which the model is loaded. The function that it takes is called when the run is to leave it."""


@dataclass(frozen=True, slots=True)
class BatchModel:
    """A model that batches may use."""

    bulk: BulkModel
    names: Callable[[], Sequence[str]]
    """In requests; the first is its name in answers."""
    use: UseModel = lambda _: nullcontext()
    """Keeps it loaded."""
    keys: frozenset[str] | None = None
    """Names of the API keys that may use it; None for all."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        return task_named(self.bulk.task).endpoints


class _Stop(StopRequest):
    """A stop that does not wait for records queued behind requests."""

    def __init__(self, client: BackfillClient) -> None:
        super().__init__()
        self._client = client
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Stop reading, drop records in flight, commit and return."""
        super().request()
        self._client.stop()

    def leave(self, backfill: Backfill) -> None:
        """Stop reading, finish the records in the engine for some seconds, commit and return."""
        super().request()
        self._client.refuse()
        backfill.refuse()
        self._timer = asyncio.get_running_loop().call_later(_LEAVING_S, self.request)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class ModelRun:
    """The requests of a batch to one model, as a job. It continues earlier runs.

    All methods but `salvage` are called on the event loop.
    """

    def __init__(self, model: BulkModel, work: BatchWork, use: UseModel) -> None:
        self.completed = self.failed = self._earlier_failures = 0
        self.model = model
        self._work = work
        self._use = use
        self._stop: _Stop | None = None
        self._stopped = self._left = False
        self._turn: asyncio.Task[BatchEnd] | None = None

    async def run(self, on_thread: OnThread) -> BatchEnd:
        end = await on_thread(self._earlier_end)
        while not (end.complete or self._stopped):
            self._turn = asyncio.create_task(self._take_turn(on_thread), name="headrace-batch-turn")
            try:
                end = await self._turn
            except asyncio.CancelledError:
                if not self._stopped:
                    self._turn.cancel()
                    raise
        return end

    def _earlier_end(self) -> BatchEnd:
        plan = self._plan()
        state = plan.output.read_state() if plan.output.is_finished else None
        if state is None or state.finished is None:
            return BatchEnd(complete=False, output=None, errors=None)
        self.failed = state.finished.failed
        self.completed = state.finished.records - self.failed
        return _end(plan, complete=True)

    async def _take_turn(self, on_thread: OnThread) -> BatchEnd:
        """Run while the model is loaded; it may have to make room for others before the end."""
        self._left = False
        async with self._use(self.leave):
            service, backfill = self.model.server.service, self.model.backfill
            assert backfill is not None, "it runs while the model is loaded"
            ahead = min(8 * profile_of(service.engine).batch_size or _AHEAD, _AHEAD)
            # All batches of a key share one turn.
            caller = ("batch", self._work.owner or self._work.batch)
            client = BackfillClient(backfill, asyncio.get_running_loop(), caller, ahead)
            self._stop = _Stop(client)
            if self._left:
                self.leave()
            try:
                return await on_thread(lambda: self._job(service, client))
            finally:
                self._stop.close()
                self._stop = None

    def leave(self) -> None:
        """End this turn, so that the model can make room for another."""
        self._left = True
        if self._stop is not None and self.model.backfill is not None:
            self._stop.leave(self.model.backfill)

    def stop(self) -> None:
        self._stopped = True
        if self._stop is not None:
            self._stop.request()
        elif self._turn is not None:
            self._turn.cancel()  # it waits for the model

    def _job(self, service: Service, client: BackfillClient) -> BatchEnd:
        """Run the job to its end, or until asked to stop. Blocks."""
        plan, stop = self._plan(), self._stop
        assert stop is not None, "made for this turn"
        self._earlier_failures = plan.output.parts.count_errors() if plan.output.parts.path.is_dir() else 0
        lines = RequestLines(service.engine, self._work.url, self.model.server)
        end = main_path.run(jobs.build(plan, lines, stop, self._listen, client))
        self.completed, self.failed = end.records - end.failed, end.failed
        if end.state == "interrupted":
            return BatchEnd(complete=False, output=None, errors=None)
        return _end(plan, complete=True)

    def _plan(self) -> jobs.Plan:
        work = self._work
        settings = jobs.JobSettings(
            source=work.source,
            sink=work.folder / "output.jsonl",
            # It is loaded already; the model name in requests need not be a folder.
            config=EngineConfig(task=self.model.task, engine=lambda *_: self.model.server.service.engine),
            limits=_LIMITS,
        )
        plan = jobs.check(settings, own_engine=False)
        asked = url_of(plan.source)
        if asked != work.url:
            raise ConfigError(f"the batch is for {work.url}, its file asks for {asked}")
        for form in getattr(plan.source, "formats", ()):
            form.leave_bodies(work.name)  # `RequestLines` checks them, as in requests
        assert isinstance(plan.output.writer, OpenAIWriter)
        plan.output.writer.batch = work.batch
        return replace(plan, columns=replace(plan.columns, text="body", text_only=False))

    def salvage(self) -> BatchEnd:
        """Write the finished records to files and count them. Blocks."""
        if (end := self._earlier_end()).complete:
            return end
        plan = self._plan()
        with plan.output.locked():
            plan.output.merge_so_far()
            self.failed = plan.output.parts.count_errors()
            self.completed = sum(part.end - part.start for part in plan.output.parts.committed()) - self.failed
        return _end(plan, complete=False)

    def _listen(self, event: Event) -> None:
        match event:
            case JobStarted():
                self.failed = self._earlier_failures
                self.completed = event.records_done - self.failed
            case PartCommitted():
                self.failed += event.failed
                self.completed += event.end - event.start - event.failed


def _end(plan: jobs.Plan, *, complete: bool) -> BatchEnd:
    """The output and errors files; None for an empty or missing one."""
    files = (plan.output.target, plan.output.errors)
    output, errors = (path if path.exists() and path.stat().st_size else None for path in files)
    return BatchEnd(complete, output, errors)
