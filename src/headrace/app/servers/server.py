"""Build a server from settings; `build_app`."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast

from fastapi import FastAPI
from prometheus_client.metrics_core import Metric

import headrace
from headrace.app.jobs.describe import server_facts
from headrace.app.jobs.job import Broadcast, Guarded
from headrace.app.jobs.running import RunningModel
from headrace.app.jobs.tracing import ServerTracing, server_spans
from headrace.app.keywords import ServerKeywords
from headrace.app.servers.batch_api import BatchApi
from headrace.app.servers.batch_run import MOST_WAITING, BatchModel, BulkModel
from headrace.app.servers.observed import ObservedServer
from headrace.app.servers.settings import SERVER_SETTINGS as SERVER_SETTINGS
from headrace.app.servers.settings import ServerSettings as ServerSettings
from headrace.app.servers.shared import KeptEngine, RequestPort
from headrace.app.servers.warm_up import warm_up
from headrace.argument_types import build as build_settings
from headrace.argument_types import check_types
from headrace.batching.batcher import Batcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.device.cache import TuningCache
from headrace.engines.base import Engine
from headrace.engines.capabilities import BESIDE
from headrace.engines.choosing.config import config_from
from headrace.engines.choosing.resolving import resolve
from headrace.engines.choosing.served import served_model
from headrace.engines.model_folder import pickled_weights
from headrace.engines.profile import BatcherSettings, PayloadCalls, profile_of
from headrace.errors import ConfigError
from headrace.events import Listener, ModelLoaded
from headrace.observe.exporters.prometheus import PrometheusListener, device_seconds
from headrace.observe.live.server import ServerAccount
from headrace.options import split
from headrace.serving.app import ALONE, Beside, create_app
from headrace.serving.auth import KEYS, Keys
from headrace.serving.hosts import Hosts
from headrace.serving.metrics import families
from headrace.serving.response_store import KeptResponses
from headrace.serving.service import Service
from headrace.serving.state import ServerState
from headrace.tracebacks import naming, public

logger = logging.getLogger("headrace")


@public
@naming
def build_app(task: str | None = None, model: str | Path | None = None, **settings: Unpack[ServerKeywords]) -> FastAPI:
    """A FastAPI app that serves one model: mount it, extend it, or give it to an ASGI server.

    The model is loaded when the app's lifespan begins and closed when it ends. An app that mounts it enters
    its router.lifespan_context(app) in its own lifespan.

    Args:
        task: such as "embed" or "generate"; None for "embed", or for "custom" with a function or handler of your own.
        model: a folder, an included model, or `org/name[@revision]` on the Hub (docs/engines.md); None for the default.
        settings: of the engine and the server, each as docs/options.md has it, such as `batch_size` or `max_wait_s`; an
            engine's own options, such as `max_model_len`; or `limits`, a `headrace.ServeLimits` as a whole.

    Raises:
        ConfigError: a task, engine or option that does not exist. What concerns the model's files is raised when the
            lifespan begins.
    """
    own, engine = split(ServerSettings, {"task": task, "model": model, **settings})
    if isinstance(state := own.get("state"), str):
        own["state"] = Path(state)
    return build(build_settings(ServerSettings, {**own, "config": config_from(engine)}))[0]


def build(settings: ServerSettings, loaded: RunningModel | None = None) -> tuple[FastAPI, ServerState]:
    """The app of a server of one model, and its state. A model that is `loaded` stays so when the app has ended.

    Raises:
        ConfigError: a task, engine or option that does not exist.
    """
    settings = check_settings(settings)
    if not settings.keys and KEYS in os.environ:  # the command line reads it and passes its keys on
        logger.warning("%s is set, but `keys` is empty: the app is open to everyone; pass read_keys(None, ...)", KEYS)
    account = ServerAccount(served_model(settings.name, settings.config).name, time.monotonic())
    api: BatchApi | None = None

    def pulled() -> Iterator[Metric]:
        yield from families(server, None if api is None else api.state())
        yield device_seconds(account.seconds_by_cause())

    server, bulk, spans = _model(settings, account, pulled)
    server.observed = ObservedServer(server, account)
    if settings.state is not None:
        model = BatchModel(bulk, lambda: server.service.model.accepted)
        api = BatchApi(settings.state, [model], settings.limits)
    if loaded is None:
        make_service = functools.partial(_service, settings, server, account, spans)
    else:
        make_service = functools.partial(_shared_service, settings, server, account, loaded)
    beside = ALONE if api is None else api.beside()
    return create_app(server, make_service, bulk.task, version=headrace.__version__, beside=beside), server


def build_part(settings: ServerSettings, device: Listener) -> tuple[FastAPI, BulkModel]:
    """The app of one model of several, and what runs its batches.

    Raises:
        ConfigError: a task, engine or option that does not exist.
    """
    settings = check_settings(settings)
    server, bulk, spans = _model(settings, device, lambda: families(server, None))
    make_service = functools.partial(_service, settings, server, None, spans)
    beside = ALONE if settings.state is None else Beside(running=bulk.running)
    return create_app(server, make_service, bulk.task, version=headrace.__version__, beside=beside), bulk


def _model(
    settings: ServerSettings, device: Listener, pulled: Callable[[], Iterator[Metric]]
) -> tuple[ServerState, BulkModel, ServerTracing | None]:
    metrics = PrometheusListener(pulled, headrace.__version__)
    listeners: list[Listener] = [metrics, *map(Guarded, settings.listeners), device]
    model = served_model(settings.name, settings.config)
    keys = Keys(settings.keys)
    server = ServerState(settings.limits, keys, Broadcast(listeners), metrics.render, name=model.name, model=model)
    server.hosts = Hosts(settings.allowed_hosts)
    if settings.state is not None:
        server.responses = KeptResponses(settings.state / "responses")
    spans = server_spans()
    server.tracing = spans
    return server, BulkModel(server, settings.config.task or "", settings.latency_target_s, listeners), spans


def check_settings(settings: ServerSettings) -> ServerSettings:
    """Check task, engine, options and hosts, and resolve the task.

    Raises:
        ConfigError: a task, engine or option does not exist, or an allowed host is no host name.
    """
    check_types(settings, "state")
    if isinstance(settings.allowed_hosts, str) or isinstance(settings.keys, str):
        raise ConfigError("``allowed_hosts`` and ``keys`` must be lists; put a single one in a list")
    config = settings.config.resolved()
    config.check(SERVER_SETTINGS, model=False)
    if config.engine_options.get("output_dtype", "float32") != "float32":
        raise ConfigError("a server does not take ``output_dtype``: each request to /v1/embeddings may set it")
    state = None if settings.state is None else settings.state.absolute()  # user code may change the current folder
    settings = replace(settings, config=config.anchored(), state=state)
    served_model(settings.name, config)
    Hosts(settings.allowed_hosts)
    return settings


def _service(
    settings: ServerSettings, server: ServerState, account: ServerAccount | None, spans: ServerTracing | None
) -> Service:
    started = time.monotonic()
    if not settings.config.pickled_weights:
        _refuse_pickles(settings.config.model)
    config, task = settings.config, settings.config.task or ""
    if config.commit is None:
        config = resolve(config)
    # Batches continue in the same dtype after a restart, so the choice is kept beside them.
    cache = None if settings.state is None else TuningCache(settings.state / "tuning")
    ready = warm_up(config, settings.latency_target_s, cache)
    if ready.detail:
        logger.info("%s runs in %s", config.label or task, ready.detail)
    engine = ready.engine
    batching = BatcherSettings(
        listener=server.heard,
        # Never full: admission control and backfill come first.
        max_queue_size=2 * settings.limits.max_requests + (MOST_WAITING if settings.state is not None else 0),
        batch_delay_s=settings.batch_timeout_s,
        # An engine process enforces the timeout itself.
        process_timeout_s=None if config.engine_process else config.engine_timeout_s,
    )
    profile = profile_of(engine).tuned(config.batch_tokens or ready.tokens, config.batch_size)
    if account is not None:
        account.facts = server_facts(settings.config, engine, profile, settings.limits.max_requests)
    calls = PayloadCalls(None if spans is None else spans.batches)
    ended = time.monotonic()
    server.listener(ModelLoaded(server.name, ended - started, ended))
    batcher = profile.kind.batcher(engine, profile, calls, batching)
    express: Batcher[object, object] | None = None
    if (beside := BESIDE.of(engine)) is not None and isinstance(batcher, DynamicBatcher):
        express = batcher.beside(beside.beside_cost, server.listener)
    model = served_model(settings.name, config)
    service = server.heard_by = Service(model, task, engine, batcher, settings.limits, server.engine_died, express)
    if ready.per_s is not None:
        service.expect(ready.per_s)
    return service


def _shared_service(
    settings: ServerSettings, server: ServerState, account: ServerAccount, loaded: RunningModel
) -> Service:
    """The service of a loaded model, whose batches serve others too."""
    engine = cast("Engine", KeptEngine(loaded, server.heard))
    account.facts = server_facts(settings.config, engine, loaded.profile, settings.limits.max_requests)
    batcher = cast("Batcher[object, object]", RequestPort(loaded))
    model = served_model(settings.name, settings.config)
    server.heard_by = Service(model, settings.config.task or "", engine, batcher, settings.limits, server.engine_died)
    return server.heard_by


def _refuse_pickles(model: str | None) -> None:
    """Raise ConfigError for a folder whose weights are kept as pickle."""
    if model is None or not Path(model).is_dir():
        return
    found = pickled_weights(Path(model))
    if found:
        raise ConfigError(
            f"model {model!r} keeps its weights as pickle ({found[0].name}), which can run code when it is read; "
            "use its safetensors, or pass ``pickled_weights=True`` if you trust it"
        )
