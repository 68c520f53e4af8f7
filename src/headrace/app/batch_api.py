"""Batches over HTTP: each runs as a job on the engine of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.app import job as jobs
from headrace.engines.config import EngineConfig
from headrace.engines.profile import profile_of
from headrace.errors import ConfigError, NotRunningError
from headrace.events import Event, JobStarted, Listener, PartCommitted
from headrace.io.formats.openai_batch import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    SCORE,
    OpenAIWriter,
    url_of,
)
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import Limits, StopRequest
from headrace.jobs.state.lock import exclusive
from headrace.serving.admission.backfill import Backfill
from headrace.serving.batches.backfill_client import BackfillClient
from headrace.serving.batches.files import FileStore
from headrace.serving.batches.lines import Lines
from headrace.serving.batches.runs import BatchEnd, BatchServices
from headrace.serving.batches.store import AT_ONCE, Batches
from headrace.serving.batches.validation import LineRules, ValidatedFile, validate
from headrace.serving.metrics import BulkState
from headrace.serving.service import Service
from headrace.serving.state import ServerState

_ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    "embed": (EMBEDDINGS,),
    "generate": (COMPLETIONS, CHAT),
    "score": (SCORE, RERANK),
    "classify": (CLASSIFY,),
    "zero-shot": (CLASSIFY,),
}
_LIMITS = Limits(max_error_rate=1.0, workers=1, part_records=1024, commit_interval_s=1.0)
_AHEAD = 2_048
"""Maximum records of a batch that are read but not yet answered."""
MOST_WAITING = 4 * AT_ONCE * _AHEAD
"""Maximum inputs of all batches in the batcher, besides one line of many inputs per batch."""


class BatchApi:
    """The Batch API of a server.

    Args:
        state: the folder of its files and jobs.
        server: the state of the server.
        task: the task of the model.
        target_s: latency target of requests during bulk work, in seconds.
        listeners: listeners of the server; the backfill is added to them.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(
        self, state: Path, server: ServerState, task: str, target_s: float | None, listeners: list[Listener]
    ) -> None:
        try:
            self.files = FileStore(state / "files")
        except OSError as error:
            raise ConfigError(f"cannot keep files in {state}: {error.strerror}; choose a folder to write to") from error
        self._state = state
        self._server = server
        self._task = task
        self._target_s = target_s
        self._listeners = listeners
        self._batches: Batches | None = None
        self._backfill: Backfill | None = None

    def batches(self) -> Batches:
        """All batches. Raises NotRunningError unless the server runs."""
        if self._batches is None:
            raise NotRunningError("the server is not running")
        return self._batches

    def state(self) -> BulkState | None:
        """The current state, for the metrics; None unless the server runs."""
        if self._batches is None or self._backfill is None:
            return None
        return BulkState(self._batches, self._backfill.done, self._backfill.waiting)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the state folder while the body runs.

        Raises:
            ConfigError: the folder cannot be written.
            OutputLockedError: another server has it.
        """
        lock = exclusive(self._state / "lock", self._state, "stop that server, or choose another --state-dir")
        with ExitStack() as held:
            try:
                held.enter_context(lock)
            except OSError as error:
                raise ConfigError(f"cannot write {self._state / 'lock'}: {error.strerror or error}") from error
            yield

    @asynccontextmanager
    async def running(self, service: Service) -> AsyncIterator[None]:
        """Continue unfinished batches and accept new ones while the body runs."""
        backfill = Backfill(
            service.engine, service.batcher, self._target_s, lambda: service.admission.requests, service.tokens
        )
        self._listeners.append(backfill.listen)
        loop = asyncio.get_running_loop()
        limits = self._server.limits

        def look(path: Path, url: str, stopped: Callable[[], bool]) -> ValidatedFile:
            return validate(path, LineRules(url, service.model.accepted, limits.max_body_bytes), stopped)

        def make_run(source: Path, folder: Path, url: str, owner: str | None) -> _Run:
            # All batches of a key share one turn.
            make_client = partial(BackfillClient, backfill, loop, ("batch", owner or folder.name))
            return _Run(service, Lines(service.engine, url, self._server), make_client, source, folder, url)

        services = BatchServices(self.files, _ENDPOINTS.get(self._task, ()), look, make_run)
        batches = Batches(self._state / "batches", services)
        try:
            async with batches.running():
                self._batches, self._backfill = batches, backfill
                yield
        finally:
            self._batches = self._backfill = None
            backfill.refuse()
            self._listeners.remove(backfill.listen)


class _Stop(StopRequest):
    """A stop that does not wait for records queued behind requests."""

    def __init__(self, client: BackfillClient) -> None:
        super().__init__()
        self._client = client

    def request(self) -> None:
        """Stop reading, drop records in flight, commit and return."""
        super().request()
        self._client.stop()


class _Run:
    """One batch as a job."""

    def __init__(
        self, service: Service, lines: Lines, make_client: partial[BackfillClient], source: Path, folder: Path, url: str
    ) -> None:
        self.completed = self.failed = self._earlier_failures = 0
        engine = service.engine
        profile = profile_of(engine)
        self._client = make_client(min(8 * profile.batch_size, _AHEAD) if profile.batching == "batches" else _AHEAD)
        self._stop = _Stop(self._client)
        self._lines = lines
        self._settings = jobs.JobSettings(
            source=source,
            sink=folder / "output.jsonl",
            # The engine is loaded already; the model name in requests need not be a folder.
            config=EngineConfig(task=service.task, engine=lambda *_: engine),
            limits=_LIMITS,
        )
        self._url = url
        self._folder = folder
        self._model = service.name

    def run(self) -> BatchEnd:
        """Run to the end, or until asked to stop."""
        plan = self._plan()
        self._earlier_failures = plan.output.parts.count_errors() if plan.output.parts.path.is_dir() else 0
        end = main_path.run(jobs.build(plan, self._lines, self._stop, self._listen, self._client))
        self.completed, self.failed = end.records - end.failed, end.failed
        if end.state == "interrupted":
            return BatchEnd(complete=False, output=None, errors=None)
        return _end(plan, complete=True)

    def _plan(self) -> jobs.Plan:
        plan = jobs.check(self._settings, own_engine=False)
        asked = url_of(plan.source)
        if asked != self._url:
            raise ConfigError(f"the batch is for {self._url}, its file asks for {asked}")
        for form in getattr(plan.source, "formats", ()):
            form.leave_bodies(self._model)  # `Lines` checks them, as in requests
        assert isinstance(plan.output.writer, OpenAIWriter)
        plan.output.writer.batch = self._folder.name
        return replace(plan, columns=replace(plan.columns, text="body", text_only=False))

    def stop(self) -> None:
        """Ask the job to stop."""
        self._stop.request()

    def salvage(self) -> BatchEnd:
        """Write the finished records to files and count them."""
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
            case _:
                pass


def _end(plan: jobs.Plan, *, complete: bool) -> BatchEnd:
    """The output and errors files; None for an empty or missing one."""
    files = (plan.output.target, plan.output.errors)
    output, errors = (path if path.exists() and path.stat().st_size else None for path in files)
    return BatchEnd(complete, output, errors)
