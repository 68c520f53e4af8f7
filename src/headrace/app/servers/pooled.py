"""Build a server of several models from a file: `headrace serve --config models.yaml`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from prometheus_client.metrics_core import Metric

import headrace
from headrace.app.jobs.describe import versions
from headrace.app.jobs.job import Broadcast, Guarded
from headrace.app.jobs.tracing import server_spans
from headrace.app.servers.batch_api import BatchApi
from headrace.app.servers.batch_run import BatchModel, BulkModel
from headrace.app.servers.observed import ObservedServer
from headrace.app.servers.server import ServerSettings, build_part, check_settings
from headrace.app.settings_file import from_keys, read_settings
from headrace.argument_types import parse_size
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.served import served_model
from headrace.engines.custom import load_factory
from headrace.errors import BrokenOffError, ConfigError, EngineDeadError, EngineError, nearest
from headrace.events import Event, Listener, RequestDone
from headrace.observe.exporters.prometheus import PrometheusListener, device_seconds, merge_pages
from headrace.observe.live.server import ServerAccount, ServerFacts, numbered
from headrace.options import option
from headrace.pool.pool import ModelPool
from headrace.serving.app import ALONE
from headrace.serving.auth import Keys
from headrace.serving.hosts import Hosts
from headrace.serving.metrics import families
from headrace.serving.pooled import ModelApp, create_pooled_app
from headrace.serving.state import ServerState
from headrace.wording import shown

_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """The room for models."""

    max_models: int | None = option(None, "Maximum models that are loaded at once.", minimum=1)
    memory: int | None = option(
        None, "Memory for all models, such as 16GB, in place of their number.", parse=parse_size
    )
    max_asleep: int | None = option(None, "With `max_models`: maximum models in host memory.", minimum=0)
    host_memory: int | None = option(
        None, "With `memory`: host memory for models that sleep, such as 64GB.", parse=parse_size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """One model of the file."""

    name: str = option(MISSING, "Its name in requests.")
    aliases: list[str] = option(list, "More names in requests.")
    config: EngineConfig = field(default_factory=EngineConfig)
    latency_target_ms: float | None = option(
        None, "Milliseconds that requests may take while the Batch API runs. Default: no target.", above=0
    )
    memory: int | None = option(None, "What it takes, such as 2GB. Default: measured.", parse=parse_size)
    max_wait_s: float | None = option(
        None,
        "Seconds that a request waits before this model takes the room of one in use. Default: twice its loading time.",
        minimum=0,
    )
    idle_timeout_s: float | None = option(None, "Seconds without use before it is unloaded. Default: never.", above=0)
    load_timeout_s: float | None = option(600.0, "Seconds allowed for loading, and for unloading.", above=0)
    keys: list[str] | None = option(None, "Names of the API keys that may use it. Default: all.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFile:
    pool: PoolSection
    models: Sequence[ModelSection]


def read_models(path: Path) -> ModelsFile:
    """The models in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML or JSON, or an entry is unknown, missing or of the wrong type.
    """
    content = read_settings(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f'{path} must be a mapping with "models", a list')
    try:
        found = _models(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    names = [name for entry in found.models for name in (entry.name, *entry.aliases)]
    if bad := [name for name in names if not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME]:
        raise ConfigError(
            f"{path}: the name {shown(bad[0])} cannot be used; a name has 1 to {_LONGEST_NAME} printable characters"
        )
    if doubled := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ConfigError(f"{path}: the name {doubled!r} is given twice; names and aliases must be unique")
    return found


def _models(content: Mapping[str, object]) -> ModelsFile:
    known = ("pool", "models")
    if unknown := [key for key in content if key not in known]:
        hint = nearest(str(unknown[0]), known) or " (settings of a job are for ``headrace run config=FILE``)"
        raise ConfigError(f"{shown(unknown[0])} is unknown{hint}; known: pool, models")
    entries = content.get("models")
    if not isinstance(entries, list) or not entries:
        raise ConfigError("models must be a list of at least one model, such as [{name: small}]")
    pool = from_keys(PoolSection, content.get("pool", {"max_models": 1}), "pool")
    models = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        place = f"model {name!r}" if isinstance(name, str) else f"model {number}"
        models.append(from_keys(ModelSection, entry, place))
    return ModelsFile(pool=pool, models=models)


def build_pooled(content: ModelsFile, shared: ServerSettings) -> tuple[FastAPI, ServerState]:
    """The app of a server of several models, and its state.

    Args:
        shared: settings of all models: limits, keys and `batch_timeout_s`; the rest is not used.

    Raises:
        ConfigError: a task, engine, option or folder of a model does not exist, or it is larger than the pool.
    """
    known_keys = {key.name for key in shared.keys}
    room = content.pool
    pool = ModelPool(
        max_models=room.max_models,
        memory_bytes=room.memory,
        max_asleep=room.max_asleep,
        host_memory_bytes=room.host_memory,
    )
    models: list[ModelApp] = []
    bulk: list[BatchModel] = []
    api: BatchApi | None = None
    account = ServerAccount(f"{len(content.models)} models", time.monotonic())
    listeners: list[Listener] = [account, *map(Guarded, shared.listeners)]
    account.facts = ServerFacts({"models": ", ".join(entry.name for entry in content.models)}, versions())
    for entry in content.models:
        if missing := sorted(set(entry.keys or ()) - known_keys):
            raise ConfigError(f"model {entry.name!r}: there is no API key named {missing[0]!r} (``api_key_file``)")
        try:
            device = numbered(Broadcast(listeners), len(models), len(content.models))
            model, part = _served(entry, shared, device)
            pool.add(
                entry.name,
                model.load,
                memory_bytes=entry.memory,
                max_wait_s=entry.max_wait_s,
                idle_timeout_s=entry.idle_timeout_s,
                load_timeout_s=entry.load_timeout_s,
            )
        except ConfigError as error:
            raise ConfigError(f"model {entry.name!r}: {error}") from error
        if doubled := {name for one in models for name in one.names}.intersection(model.names):
            raise ConfigError(f"model {entry.name!r}: the name {min(doubled)!r}, of an adapter, is given twice")
        models.append(model)
        bulk.append(BatchModel(part, partial(list, model.names), UseOfPool(pool, part).use, model.keys))

    def pulled() -> Iterator[Metric]:
        yield from families(state, None if api is None else api.state(), pool)
        yield device_seconds(account.seconds_by_cause())

    metrics = PrometheusListener(pulled, headrace.__version__)
    parts = [model.state for model in models]

    def count(event: Event) -> None:
        if not (isinstance(event, RequestDone) and event.model):  # that model's page counts it
            metrics(event)

    def render() -> bytes:
        return merge_pages({"": metrics.render(), **{part.name: part.render_metrics() for part in parts}}, "model")

    state = ServerState(shared.limits, Keys(shared.keys), Broadcast([count, *listeners]), render, parts=parts)
    state.hosts = Hosts(shared.allowed_hosts)
    state.observed = ObservedServer(state, account)
    state.tracing = server_spans()
    if shared.state is not None:
        api = BatchApi(shared.state, bulk, shared.limits)
    beside = ALONE if api is None else api.beside()
    return create_pooled_app(pool, models, state, version=headrace.__version__, beside=beside), state


def _served(entry: ModelSection, shared: ServerSettings, device: Listener) -> tuple[ModelApp, BulkModel]:
    config = entry.config
    names = (entry.name, *entry.aliases)
    target_s = None if entry.latency_target_ms is None else entry.latency_target_ms / 1000
    settings = check_settings(
        replace(shared, config=config, name=names, keys=(), allowed_hosts=None, listeners=(), latency_target_s=target_s)
    )
    settings.config.check()  # folders too, before the first request
    if isinstance(config.engine, str) and ":" in config.engine and not config.engine_process:
        load_factory(config.engine)  # imports the user's module
    app, bulk = build_part(settings, device)
    allowed = None if entry.keys is None else frozenset(entry.keys)
    return ModelApp(served_model(names, settings.config), bulk.task, app, bulk.server, allowed), bulk


logger = logging.getLogger("headrace")

_GIVE_UP_S = 600.0
"""Seconds for which a batch tries again to load a model that cannot be loaded."""


class UseOfPool:
    """Lets the batches of a model use it."""

    def __init__(self, pool: ModelPool, model: BulkModel) -> None:
        self._pool = pool
        self._model = model
        self._failing_since: float | None = None

    @asynccontextmanager
    async def use(self, leave: Callable[[], None]) -> AsyncIterator[None]:
        """Wait until the model is loaded, and keep it loaded until `leave` is called and the context ends.

        Raises:
            BrokenOffError: it cannot be loaded now.
            HeadraceError: it cannot be loaded at all, or has not been for some time.
        """
        name, now = self._model.server.name, asyncio.get_running_loop().time
        using = self._pool.use_in_background(name, leave)
        try:
            await using.__aenter__()
        except EngineError as error:
            self._failing_since = now() if self._failing_since is None else self._failing_since
            if now() - self._failing_since > _GIVE_UP_S:
                raise
            raise BrokenOffError(str(error)) from error
        self._failing_since = None
        try:
            yield
        except BrokenOffError as error:
            if _is_dead(error):
                logger.error("the engine of model %r died; the model is loaded again for the batch", name)
                self._pool.unload(name)
            raise
        finally:
            await using.__aexit__(None, None, None)


def _is_dead(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, EngineDeadError):
            return True
        error = error.__cause__
    return False
