"""Batches over HTTP: each runs as jobs on the models of the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import headrace
from headrace.app.servers.batch_run import BatchModel, BatchWork, BulkModel, ModelRun
from headrace.app.servers.batch_split import MANIFEST, SplitRun
from headrace.engines.tasks import tasks_for
from headrace.errors import ConfigError, NotRunningError
from headrace.io.storage.atomic import atomic_file
from headrace.jobs.state.lock import exclusive
from headrace.serving.app import Beside
from headrace.serving.batches.files import FileStore
from headrace.serving.batches.runs import BatchRun, BatchServices
from headrace.serving.batches.store import Batches
from headrace.serving.batches.validation import LineRules, validate
from headrace.serving.limits import ServeLimits
from headrace.serving.metrics import BulkState
from headrace.serving.routes.batches import batches_router, files_router
from headrace.serving.routes.message_batches import message_batches_router
from headrace.serving.service import Service

_FORMAT = 1
"""The format of the state folder. Raise it when an earlier version could not read what this one writes."""


def _check_format(state: Path) -> None:
    """Check that this version can read a state folder, and mark it.

    Raises:
        ConfigError: a newer version has written it, or the mark is damaged.
        OSError: it cannot be written.
    """
    path = state / "format.json"
    try:
        mark = json.loads(path.read_bytes())
        found, version = int(mark["format"]), str(mark["version"])
    except FileNotFoundError:
        with atomic_file(path) as file:
            file.write(json.dumps({"format": _FORMAT, "version": headrace.__version__}).encode())
        return
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it if this version wrote the folder") from error
    if found > _FORMAT:
        raise ConfigError(
            f"Headrace {version} has written {state} in format {found}; this version, {headrace.__version__}, reads up "
            f"to format {_FORMAT}: use that version, or another folder as ``state``"
        )


class BatchApi:
    """The Batch API of a server. Raises ConfigError: the folder cannot be made."""

    def __init__(self, state: Path, models: Sequence[BatchModel], limits: ServeLimits) -> None:
        try:
            self._files = FileStore(state / "files")
        except OSError as error:
            raise ConfigError(f"cannot keep files in {state}: {error.strerror}; choose a folder to write to") from error
        self._state = state
        self._models = models
        self._limits = limits
        self._batches: Batches | None = None

    def beside(self) -> Beside:
        """Its routes, and what runs it beside the models."""
        files = files_router(self._files, self._limits.max_file_bytes, self._running)
        messages = message_batches_router(self._files, self._running, self._rules)
        return Beside((files, batches_router(self._running), messages), self._claimed, self._while_running)

    def state(self) -> BulkState | None:
        """The current state, for the metrics; None unless the server runs."""
        if self._batches is None:
            return None
        models = [model.bulk for model in self._models]
        return BulkState(self._batches, sum(model.done for model in models), sum(model.waiting for model in models))

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Hold the state folder while the body runs.

        Raises:
            ConfigError: the folder cannot be written.
            OutputLockedError: another server has it.
        """
        lock = exclusive(self._state / "lock", self._state, "stop that server, or choose another folder as ``state``")
        with ExitStack() as held:
            try:
                held.enter_context(lock)
                _check_format(self._state)
            except OSError as error:
                raise ConfigError(f"cannot write {self._state / 'lock'}: {error.strerror or error}") from error
            yield

    @asynccontextmanager
    async def _while_running(self, service: Service | None = None) -> AsyncIterator[None]:
        """Continue unfinished batches and accept new ones while the body runs.

        Args:
            service: of the only model; None if a pool loads the models.
        """
        endpoints = dict.fromkeys(endpoint for model in self._models for endpoint in model.endpoints)
        services = BatchServices(
            self._files,
            tuple(endpoints),
            lambda path, url, owner, stopped: validate(path, self._rules(url, owner), stopped),
            self._make_run,
        )
        batches = Batches(self._state / "batches", services)
        [first, *_] = self._models
        async with first.bulk.running(service) if service is not None else nullcontext():
            try:
                async with batches.running():
                    self._batches = batches
                    yield
            finally:
                self._batches = None

    def _running(self) -> Batches:
        if self._batches is None:
            raise NotRunningError("the server is not running")
        return self._batches

    def _rules(self, url: str, owner: str | None) -> LineRules:
        offering = [model for model in self._models if url in model.endpoints]
        refused = [model for model in offering if model.keys is not None and owner not in model.keys]
        return LineRules(
            url,
            [name for model in offering for name in model.names()],
            self._limits.max_body_bytes,
            frozenset(name for model in refused for name in model.names()),
            named=len(offering) > 1,
            several=len(self._models) > 1,
        )

    def _make_run(self, source: Path, folder: Path, url: str, owner: str | None) -> BatchRun:
        def run_of(model: BatchModel | None, source: Path, folder: Path, batch: str) -> ModelRun:
            if model is None:  # the server no longer has it; what is finished needs its task alone
                task = tasks_for(url)[0]
                model = BatchModel(BulkModel(self._models[0].bulk.server, task, None, []), lambda: ("",))
            return ModelRun(model.bulk, BatchWork(source, folder, url, owner, model.names()[0], batch), model.use)

        [first, *others] = self._models
        if not others and url in first.endpoints and not (folder / MANIFEST).exists():
            return run_of(first, source, folder, folder.name)
        offering = {name: model for model in self._models if url in model.endpoints for name in model.names()}
        return SplitRun(source, folder, offering, run_of)
