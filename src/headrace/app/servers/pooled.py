"""Build a server of several models from a file: `headrace serve --config models.yaml`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import headrace
from headrace.app.jobs.describe import versions
from headrace.app.jobs.job import Broadcast, Guarded
from headrace.app.jobs.tracing import server_spans
from headrace.app.servers.batch_api import BatchApi, BatchModel
from headrace.app.servers.batch_run import BulkModel
from headrace.app.servers.observed import ObservedServer
from headrace.app.servers.pooled_batches import UseOfPool
from headrace.app.servers.server import ServerSettings, build_part, check_settings
from headrace.app.settings_file import read_settings
from headrace.argument_types import parse_size
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import unknown_key
from headrace.engines.custom import load_factory
from headrace.errors import ConfigError, nearest
from headrace.events import Listener
from headrace.observe.exporters.prometheus import PrometheusListener, device_seconds, merge_pages
from headrace.observe.live.server import ServerAccount, ServerFacts, numbered
from headrace.pool.pool import ModelPool
from headrace.serving.auth import Keys
from headrace.serving.hosts import Hosts
from headrace.serving.metrics import families_of_pool
from headrace.serving.pooled import ModelApp, create_pooled_app
from headrace.serving.state import ServerState
from headrace.wording import shown

_LONGEST_NAME = 256

Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PoolSection(_Section):
    """The room for models."""

    max_models: Annotated[int, Field(ge=1)] | None = None
    memory: str | None = None
    """Such as 16GB."""
    max_asleep: Annotated[int, Field(ge=0)] | None = None
    host_memory: str | None = None
    """For models that sleep, such as 64GB."""


class ModelSection(_Section):
    """One model of the file."""

    name: str
    aliases: list[str] = []
    task: str | None = None
    model: str | None = None
    engine: str | None = None
    engine_options: dict[str, object] = {}
    engine_process: bool = False
    engine_timeout_s: Seconds | None = None
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    pickled_weights: bool = False
    latency_target_ms: Annotated[float, Field(gt=0)] | None = None
    memory: str | None = None
    max_wait_s: Annotated[float, Field(ge=0)] | None = None
    idle_timeout_s: Seconds | None = None
    load_timeout_s: Seconds | None = 600.0
    keys: list[str] | None = None
    """Names of the API keys that may use it; none for all."""


class ModelsFile(_Section):
    """The whole file."""

    pool: PoolSection = PoolSection(max_models=1)
    models: Annotated[list[ModelSection], Field(min_length=1)]


def read_models(path: Path) -> ModelsFile:
    """The models in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML or JSON, or an entry is unknown, missing or of the wrong type.
    """
    content = read_settings(path)
    if not isinstance(content, dict):
        raise ConfigError(f'{path} must be a mapping with "models", a list')
    try:
        found = ModelsFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error)}") from error
    names = [name for entry in found.models for name in (entry.name, *entry.aliases)]
    if bad := [name for name in names if not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME]:
        raise ConfigError(
            f"{path}: the name {shown(bad[0])} cannot be used; a name has 1 to {_LONGEST_NAME} printable characters"
        )
    if doubled := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ConfigError(f"{path}: the name {doubled!r} is given twice; names and aliases must be unique")
    return found


def _first(error: ValidationError) -> str:
    """The first problem of the file, in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] != "extra_forbidden":
        return f"{place}: {first['msg']}"
    kind = PoolSection if first["loc"][0] == "pool" else ModelSection if len(first["loc"]) > 1 else ModelsFile
    key, known = str(first["loc"][-1]), list(kind.model_fields)
    more = unknown_key(key, known) if kind is ModelSection else nearest(key, known) or f"; known: {', '.join(known)}"
    return f"{place} is unknown{more}"


def build_pooled(content: ModelsFile, shared: ServerSettings) -> tuple[FastAPI, ServerState]:
    """The app of a server of several models, and its state.

    Args:
        content: the models.
        shared: settings of all models: limits, keys and `batch_timeout_s`; the rest is not used.

    Raises:
        ConfigError: a task, engine, option or folder of a model does not exist, or it is larger than the pool.
    """
    known_keys = {key.name for key in shared.keys}
    room = content.pool
    pool = ModelPool(
        max_models=room.max_models,
        memory_bytes=None if room.memory is None else _bytes(room.memory, "pool.memory"),
        max_asleep=room.max_asleep,
        host_memory_bytes=None if room.host_memory is None else _bytes(room.host_memory, "pool.host_memory"),
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
                memory_bytes=None if entry.memory is None else _bytes(entry.memory, "memory"),
                max_wait_s=entry.max_wait_s,
                idle_timeout_s=entry.idle_timeout_s,
                load_timeout_s=entry.load_timeout_s,
            )
        except ConfigError as error:
            raise ConfigError(f"model {entry.name!r}: {error}") from error
        models.append(model)
        bulk.append(BatchModel(part, partial(list, model.names), UseOfPool(pool, part).use, model.keys))

    def pulled() -> Iterator[Metric]:
        yield from families_of_pool(state, pool, lambda: api.state() if api is not None else None)
        yield device_seconds(account.seconds_by_cause())

    metrics = PrometheusListener(pulled, headrace.__version__)
    parts = [model.state for model in models]

    def render() -> bytes:
        return merge_pages({"": metrics.render(), **{part.name: part.render_metrics() for part in parts}}, "model")

    state = ServerState(shared.limits, Keys(shared.keys), Broadcast([metrics, *listeners]), render, parts=parts)
    state.hosts = Hosts(shared.allowed_hosts)
    state.observed = ObservedServer(state, account)
    state.tracing = server_spans()
    if shared.state is not None:
        api = BatchApi(shared.state, bulk, shared.limits)
    return create_pooled_app(pool, models, state, version=headrace.__version__, batches=api), state


def _served(entry: ModelSection, shared: ServerSettings, device: Listener) -> tuple[ModelApp, BulkModel]:
    config = EngineConfig(
        **{one.name: getattr(entry, one.name) for one in fields(EngineConfig) if one.init and hasattr(entry, one.name)}
    )
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
    return ModelApp(names, bulk.task, app, bulk.server, allowed), bulk


def _bytes(text: str, what: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
