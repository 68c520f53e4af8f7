"""Batches over HTTP, run by the same main path, ledger and engine as everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from headrace import wiring
from headrace.engines.base import BatchEngine
from headrace.errors import ConfigError, NotRunningError
from headrace.events import Event, JobStarted, Listener, PartCommitted
from headrace.io.openai import CHAT, COMPLETIONS, EMBEDDINGS, url_of
from headrace.jobs import run as main_path
from headrace.jobs.job import Limits, StopRequest
from headrace.serving.backfill import Backfill
from headrace.serving.batches import BatchEnd, Batches
from headrace.serving.files import FileStore
from headrace.serving.guest import Guest
from headrace.serving.host import chars_in
from headrace.serving.limits import ServeLimits
from headrace.serving.service import Service

_ENDPOINTS: Mapping[str, tuple[str, ...]] = {"embed": (EMBEDDINGS,), "generate": (COMPLETIONS, CHAT)}
_LIMITS = Limits(max_error_rate=1.0, workers=1, part_records=1024, commit_interval_s=1.0)
_AHEAD = 2_048
"""Records of a batch that are read and not yet answered."""


class BulkDesk:
    """The Batch API's part of a server.

    Args:
        state: the folder of its files and jobs.
        task: of the model.
        target_s: what requests may take beside bulk work.
        listeners: of the server; the backfill becomes one.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, state: Path, task: str, target_s: float | None, listeners: list[Listener]) -> None:
        try:
            self.files = FileStore(state / "files")
        except OSError as error:
            raise ConfigError(f"cannot keep files in {state}: {error.strerror}; choose a folder to write to") from error
        self._state = state
        self._task = task
        self._target_s = target_s
        self._listeners = listeners
        self._batches: Batches | None = None

    def batches(self) -> Batches:
        """All batches; raises NotRunningError outside the server's life."""
        if self._batches is None:
            raise NotRunningError("the server is not running")
        return self._batches

    @asynccontextmanager
    async def running(self, service: Service) -> AsyncIterator[None]:
        """Continue unfinished batches, and take new ones while the body runs."""
        backfill = Backfill(service.engine, service.batcher, self._target_s, lambda: service.gate.requests)
        self._listeners.append(backfill.listen)
        loop = asyncio.get_running_loop()
        batches = Batches(
            self._state / "batches",
            self.files,
            _ENDPOINTS.get(self._task, ()),
            lambda source, folder, url: _Run(service, partial(Guest, backfill, loop), source, folder, url),
        )
        try:
            async with batches.running():
                self._batches = batches
                yield
        finally:
            self._batches = None
            backfill.refuse()
            self._listeners.remove(backfill.listen)


class _Stop(StopRequest):
    """A stop that does not wait for what is queued behind requests."""

    def __init__(self, guest: Guest) -> None:
        super().__init__()
        self._guest = guest

    def request(self) -> None:
        """Read no more, give up what is in flight, commit, return."""
        super().request()
        self._guest.stop()


class _Run:
    """One batch as a job."""

    def __init__(self, service: Service, guest: partial[Guest], source: Path, folder: Path, url: str) -> None:
        self.completed = self.failed = self._earlier_failures = 0
        engine = service.engine
        ahead = 8 * engine.default_batch_size if isinstance(engine, BatchEngine) else _AHEAD
        self._guest = guest(str(folder), min(ahead, _AHEAD))
        self._stop = _Stop(self._guest)
        self._engine = engine
        self._limits = service.limits
        self._settings = wiring.JobSettings(
            source=source,
            sink=folder / "output.jsonl",
            task=service.task,
            model=service.name,
            limits=_LIMITS,
        )
        self._url = url

    def run(self) -> BatchEnd:
        """Work to the end, or until asked to stop."""
        plan = self._plan()
        self._earlier_failures = plan.output.parts.count_errors() if plan.output.parts.path.is_dir() else 0
        end = main_path.run(wiring.build(plan, self._engine, self._stop, self._listen, self._guest))
        self.completed, self.failed = end.records - end.failed, end.failed
        if end.state == "interrupted":
            return BatchEnd(complete=False, output=None, errors=None)
        return _end(plan, complete=True)

    def _plan(self) -> wiring.Plan:
        plan = wiring.check(self._settings)
        asked = url_of(plan.source)
        if asked != self._url:
            raise ConfigError(f"the batch is for {self._url}, its file asks for {asked}")
        for form in getattr(plan.source, "formats", ()):
            form.bound(self._limits.max_body_bytes, partial(_too_long, self._limits))
        return plan

    def stop(self) -> None:
        """Ask for an early end."""
        self._stop.request()

    def salvage(self) -> BatchEnd:
        """Make files of what is finished."""
        plan = self._plan()
        with plan.output.locked():
            plan.output.merge_so_far()
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


def _too_long(limits: ServeLimits, body: Mapping[str, Any]) -> str:
    """What of a line is more than a request may have; empty if nothing is."""
    for field in ("input", "prompt", "messages"):
        given = body.get(field)
        if isinstance(given, list) and len(given) > limits.max_prompts:
            return f"{field} holds {len(given):,} entries, more than the {limits.max_prompts:,} of one request"
        if (chars := chars_in(given)) > limits.max_prompt_chars:
            return f"{field} holds {chars:,} characters, more than the {limits.max_prompt_chars:,} allowed"
    return ""


def _end(plan: wiring.Plan, *, complete: bool) -> BatchEnd:
    """The files there are, those without a line not counted."""
    files = (plan.output.target, plan.output.errors)
    output, errors = (path if path.exists() and path.stat().st_size else None for path in files)
    return BatchEnd(complete, output, errors)
