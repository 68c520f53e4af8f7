"""The one place that builds a server from settings, and `build_app`, its front door."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

import headrace
from headrace.app.batch_api import MOST_WAITING, BatchApi
from headrace.app.batchers import BatcherSettings, engine_process, make_batcher
from headrace.app.job import Broadcast
from headrace.engines import registry
from headrace.engines.base import Engine
from headrace.engines.model_folder import pickled_weights
from headrace.engines.profile import profile_of
from headrace.errors import ConfigError
from headrace.events import Listener
from headrace.observe.prometheus import PrometheusListener
from headrace.serving.app import create_app
from headrace.serving.auth import Keys, KeySettings
from headrace.serving.limits import ServeLimits
from headrace.serving.metrics import families
from headrace.serving.routes.batches import batches_router, files_router
from headrace.serving.service import Service
from headrace.serving.state import ServerState

_DEFAULT_NAMES = {"embed": "all-MiniLM-L6-v2", "generate": "arithmetic"}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a user says about a server."""

    task: str = "embed"
    model: str | None = None
    """A folder or a known name; None is the task's default."""
    name: str | None = None
    """The model's in requests and answers; None for the folder's."""
    engine: str | None = None
    """The engine to use instead of the task's own: a known name such as "vllm", or `module:factory`."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    batch_tokens: int | None = None
    """Budget of a batch in the engine's unit of cost, padding included; None is the engine's default."""
    batch_timeout_s: float = 0.002
    """Longest time a request waits for company while the engine is free."""
    limits: ServeLimits = field(default_factory=ServeLimits)
    keys: Sequence[KeySettings] = ()
    """None lets everybody in."""
    state: Path | None = None
    """Folder of the Batch API's files and jobs; None for no Batch API."""
    latency_target_s: float | None = None
    """What a request may take beside bulk work; None promises nothing."""
    trust_remote_code: bool = False
    """Run code that the model's folder brings."""
    pickled_weights: bool = False
    """Load weights that are kept as Python's pickle, which can run code too; otherwise safetensors alone."""


def build_app(  # noqa: PLR0913 - keyword-only settings of the front door, each one a line in the caller's code
    task: str = "embed",
    model: str | Path | None = None,
    *,
    name: str | None = None,
    engine: str | None = None,
    batch_tokens: int | None = None,
    limits: ServeLimits | None = None,
    keys: Sequence[KeySettings] = (),
    state: str | Path | None = None,
    latency_target_s: float | None = None,
    **engine_options: Any,
) -> FastAPI:
    """A FastAPI app that serves one model: mount it, extend it, or give it to an ASGI server.

    The model is loaded when the app's lifespan begins and closed when it ends. An app that mounts it enters
    `app.router.lifespan_context(app)` in its own lifespan.

    Args:
        task: what the model does: "embed", "generate", "classify" and so on.
        model: a local folder; None for the task's default model.
        name: the model's in requests and answers; None for the folder's.
        engine: the engine to use instead of the task's own: "vllm", or `module:factory`.
        batch_tokens: most a batch may cost, in tokens with padding.
        limits: what the server takes on, and for how long.
        keys: API keys, see `headrace.serving.auth.read_keys`.
        state: folder of the Batch API's files and jobs; None for no Batch API.
        latency_target_s: what a request may take beside bulk work; None promises nothing.
        engine_options: options of the engine, such as `max_model_len`.

    Raises:
        ConfigError: a task that is not known. What concerns the model comes when the lifespan begins.
    """
    return build(
        ServerSettings(
            task=task,
            model=None if model is None else str(model),
            name=name,
            engine=engine,
            engine_options=engine_options,
            batch_tokens=batch_tokens,
            limits=limits or ServeLimits(),
            keys=keys,
            state=None if state is None else Path(state),
            latency_target_s=latency_target_s,
        )
    )[0]


def build(settings: ServerSettings) -> tuple[FastAPI, ServerState]:
    """The app, and what the process that serves it needs to know of it.

    Raises:
        ConfigError: a task that is not known.
    """
    if settings.task not in registry.known_tasks():
        raise ConfigError(f"unknown task {settings.task!r}; known: {', '.join(registry.known_tasks())}")
    version = headrace.__version__
    bulk: BatchApi | None = None
    metrics = PrometheusListener(lambda: families(host, lambda: bulk.state() if bulk is not None else None), version)
    listeners: list[Listener] = [metrics]
    host = ServerState(settings.limits, Keys(settings.keys), Broadcast(listeners), metrics.render)
    make_service = functools.partial(_service, settings, host)
    if settings.state is None:
        return create_app(host, make_service, settings.task, version=version), host
    bulk = BatchApi(settings.state, host, settings.task, settings.latency_target_s, listeners)
    return create_app(
        host,
        make_service,
        settings.task,
        version=version,
        routers=(
            files_router(bulk.files, settings.limits.max_file_bytes, bulk.batches),
            batches_router(bulk.batches),
        ),
        background=bulk,
    ), host


def _service(settings: ServerSettings, host: ServerState) -> Service:
    """Load the model. Blocks."""
    if not settings.pickled_weights:
        _refuse_pickles(settings.model)
    options = dict(settings.engine_options)
    if settings.trust_remote_code:
        options["trust_remote_code"] = True
    engine: Engine[Any, Any] = registry.create(settings.task, settings.model, engine=settings.engine, **options)
    batching = BatcherSettings(
        listener=host.listener,
        # Its own room is never full: the gate and the backfill are before it.
        max_queue_size=2 * settings.limits.max_requests + (MOST_WAITING if settings.state is not None else 0),
        batch_delay_s=settings.batch_timeout_s,
    )
    profile = profile_of(engine).tuned(settings.batch_tokens)
    name = settings.name or (Path(settings.model).name if settings.model else _DEFAULT_NAMES.get(settings.task))
    return Service(
        name or settings.task,
        settings.task,
        engine,
        make_batcher(profile, engine_process(engine), batching),
        settings.limits,
        host.engine_died,
    )


def _refuse_pickles(model: str | None) -> None:
    """Raise ConfigError for a folder whose weights are kept as pickle."""
    if model is None or not Path(model).is_dir():
        return
    found = pickled_weights(Path(model))
    if found:
        raise ConfigError(
            f"model {model!r} keeps its weights as pickle ({found[0].name}), which can run code when it is read; "
            "use its safetensors, or say --allow-pickled-weights if you trust it"
        )
