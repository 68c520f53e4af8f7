"""A server on Ray Serve: replicas, autoscaled with the load."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fastapi import FastAPI

from headrace.app.servers.server import ServerSettings, build_part
from headrace.cluster.base import ClusterResources, Replicas
from headrace.cluster.ray.workers import check_room, connected
from headrace.errors import ConfigError, EngineError
from headrace.openai_protocol import error_body
from headrace.records import JsonObject
from headrace.serving.routes.dashboard import refusing_router

try:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    from headrace.cluster.ray import overview
    from headrace.cluster.ray.scaling import COST, QueuedCost, RefusesWhenCold
except ImportError as error:
    raise ConfigError(f'Ray Serve cannot be imported ({error}): pip install "headrace[ray]"') from error

NAME = "headrace"
OVERVIEW = "headrace-overview"
"""The second application: metrics of all replicas and the record of the deployment."""
_OWNER_POLL_S = 2.0
"""Seconds between checks whether another command has replaced the deployment."""


@serve.ingress()
class ReplicaServer:
    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc] # Ray awaits it
        """Load the model.

        Raises:
            HeadraceError: it cannot be loaded. Ray reports errors of the constructor, but not of an app's lifespan.
        """
        # Without a dashboard: it would show one replica, and take one of its slots.
        self._app, part = build_part(settings, lambda _: None)
        self._state = part.server
        self._app.include_router(refusing_router())
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        self._app.router.lifespan_context = _no_lifespan

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def wake(self) -> None:
        """Do nothing. A call makes Ray Serve start a replica."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Autoscaling metrics for Ray Serve's controller."""
        service = self._state.loaded
        return {COST: service.admission.cost if service is not None else 0.0}

    def metrics_page(self) -> tuple[str, bytes]:
        """The id of this replica and its Prometheus metrics."""
        return serve.get_replica_context().replica_id.unique_id, self._state.render_metrics()

    async def __del__(self) -> None:
        """Close the app. The replica has answered all accepted requests."""
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)


@asynccontextmanager
async def _no_lifespan(_: object) -> AsyncIterator[None]:
    yield


def application(
    settings: ServerSettings, replicas: Replicas, resources: ClusterResources, spare: bool = False
) -> serve.Application:
    """The Ray Serve application of a server, for `serve.run`.

    Args:
        spare: the cluster has room for one more replica, so an update starts a new replica before it stops an old one.

    Raises:
        ConfigError: the settings enable the Batch API.
    """
    if settings.state is not None:
        raise ConfigError("the Batch API needs a single server: leave out ``state``, or ``on=ray``")
    scaling: JsonObject = {
        "min_replicas": replicas.least,
        # At least one, so that load failures are reported at the start.
        "initial_replicas": max(replicas.least, 1),
        "max_replicas": replicas.most,
        "target_ongoing_requests": replicas.target_ongoing_requests,
        "upscale_delay_s": replicas.scaleup_after_s,
        "downscale_delay_s": replicas.scaledown_after_s,
    }
    if replicas.target_queued_cost is not None:
        scaling["policy"] = {"policy_function": QueuedCost, "policy_kwargs": {"target": replicas.target_queued_cost}}
    routing: JsonObject = {}
    if replicas.cold_retry_after_s is not None:
        cold = error_body(503, "no replica is loaded yet; one is being started", "cold")
        arguments = {"name": NAME, "retry_after_s": replicas.cold_retry_after_s, "body": json.dumps(cold)}
        routing["request_router_config"] = {"request_router_class": RefusesWhenCold, "request_router_kwargs": arguments}
    deployed = serve.deployment(
        ReplicaServer,
        name=NAME,
        ray_actor_options=_actor_options(resources.cpus, resources.gpus or 0.0),
        max_constructor_retry_count=1,  # a load failure is permanent
        max_ongoing_requests=settings.limits.max_requests,
        graceful_shutdown_timeout_s=settings.limits.drain_s,
        autoscaling_config=scaling,
        max_surge_percent=int(spare),  # rounded up: one replica
        **routing,
    )
    return deployed.bind(settings)


def _actor_options(cpus: float, gpus: float) -> JsonObject:
    """Resources of a replica, and this process's import path, which replicas do not inherit."""
    import_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": {"PYTHONPATH": import_path}}}


@dataclass(frozen=True, slots=True)
class Deployed:
    url: str
    owner: str

    @property
    def ours(self) -> bool:
        """Whether no other command has replaced the deployment."""
        known = overview.known(OVERVIEW)
        return known is None or known[0] == self.owner


def deploy(settings: ServerSettings, replicas: Replicas, resources: ClusterResources, host: str, port: int) -> Deployed:
    """Deploy the server on the connected cluster; returns when a replica has loaded its model.

    An earlier deployment is replaced without losing requests: its replicas finish accepted requests. If the cluster has
    room, an old replica stops only when a new one is ready; otherwise new requests wait. If the new model cannot be
    loaded, the earlier deployment is restored.

    Raises:
        ConfigError: the cluster is too small, or Ray Serve already listens on another port.
        EngineError: the model cannot be loaded.
    """
    resources = replace(resources, gpus=check_room(resources, replicas.most))
    serve.start(http_options={"host": host, "port": port, "request_timeout_s": settings.limits.timeout_s})
    if (taken := _get_global_client().http_config.port) != port:
        raise ConfigError(f"Ray Serve on this cluster already listens on port {taken}: use ``port={taken}``")
    before = overview.known(OVERVIEW)
    try:
        _run(settings, replicas, resources)
    except RuntimeError as error:  # raised by Ray if no replica starts
        why = _reason(error)
        if before is None:
            _delete()
            raise EngineError(f"no replica could be started: {why}") from error
        _run(*before[1])
        raise EngineError(f"the update could not be started and was rolled back: {why}") from error
    owner = uuid.uuid4().hex
    beside = serve.deployment(overview.Overview, name=OVERVIEW, ray_actor_options=_actor_options(0.0, 0.0))
    bound = beside.bind(NAME, owner, (settings, replicas, resources))
    serve.run(bound, name=OVERVIEW, route_prefix="/metrics")
    return Deployed(f"http://{host}:{port}", owner)


def _run(settings: ServerSettings, replicas: Replicas, resources: ClusterResources) -> None:
    spare = _has_spare(resources, replicas.most)
    serve.run(application(settings, replicas, resources, spare), name=NAME, route_prefix="/")


def _has_spare(resources: ClusterResources, most: int) -> bool:
    """Whether the cluster has room for one more replica."""
    try:
        check_room(resources, most + 1)
    except ConfigError:
        return False
    return True


@contextmanager
def served(
    settings: ServerSettings, replicas: Replicas, resources: ClusterResources, host: str, port: int
) -> Iterator[str]:
    """Serve while the body runs; yields the address. If another command replaces the deployment, it stays.

    Raises:
        ConfigError: no cluster at the address, or as for `deploy`.
        EngineError: the model cannot be loaded.
    """
    with connected(resources), _while_ours(deploy(settings, replicas, resources, host, port)) as deployed:
        yield deployed.url


@contextmanager
def _while_ours(deployed: Deployed) -> Iterator[Deployed]:
    try:
        yield deployed
    finally:
        if deployed.ours:
            _delete()


def _delete() -> None:
    """Delete the applications. Replicas finish accepted requests; other applications on the cluster stay."""
    applications = serve.status().applications
    for name in (NAME, OVERVIEW):
        if name in applications:
            serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()


def serve_until_stopped(
    settings: ServerSettings,
    replicas: Replicas,
    resources: ClusterResources,
    address: tuple[str, int],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish accepted requests. Blocks; main thread only.

    On a cluster that outlives this process, also returns when another command replaces the deployment.
    """
    stopped = threading.Event()
    outlives_us = ray.is_initialized() or resources.address or os.environ.get("RAY_ADDRESS")
    with connected(resources), _while_ours(deploy(settings, replicas, resources, *address)) as deployed:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        say(f"serving at {deployed.url}, {replicas.least} to {replicas.most} replicas")
        while not stopped.wait(_OWNER_POLL_S):
            if outlives_us and not deployed.ours:
                say("another command has replaced this deployment")
                return
        say("stopping: finishing accepted requests")


def _reason(error: RuntimeError) -> str:
    """The replica's error: the last line of the traceback in the deployment's status."""
    application = serve.status().applications.get(NAME)
    deployment = application.deployments.get(NAME) if application is not None else None
    lines = [line.strip() for line in (deployment.message if deployment is not None else "").splitlines()]
    return next((line.removeprefix("headrace.errors.") for line in reversed(lines) if line), str(error))
