"""`headrace serve --on ray`: replicas of the server on Ray Serve, as many as the requests under way call for."""

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
from typing import Any

from fastapi import FastAPI

from headrace.app.server import ServerSettings, build
from headrace.cluster.ray_workers import ClusterResources, check_room, connected
from headrace.errors import ConfigError, EngineError
from headrace.openai_protocol import error_body

try:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    from headrace.cluster import ray_overview
    from headrace.cluster.ray_scaling import COST, QueuedCost, RefusesWhenCold
except ImportError as error:
    raise ConfigError(f'Ray Serve cannot be imported ({error}): pip install "headrace[ray]"') from error

NAME = "headrace"
OVERVIEW = "headrace-overview"
"""The second application: metrics of all replicas, and who deployed them."""
_WATCH_S = 2.0
"""How often a command looks whether another has taken its server over."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many servers there are to be."""

    least: int = 0
    most: int = 2
    target_ongoing_requests: float = 10.0
    """Requests under way in a replica, on average; with more there are to be more replicas."""
    scaledown_after_s: float = 300.0
    """How long fewer must be enough before one is given up, the last one too."""
    scaleup_after_s: float = 2.0
    """How long more must be needed."""
    target_queued_cost: float | None = None
    """What is accepted and not yet answered in a replica may cost, on average; then requests are not counted."""
    cold_retry_after_s: float | None = None
    """What a request is told that finds no replica loaded, with 503; None lets it wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ConfigError(f"replicas are {self.least} to {self.most}: it must be 0 <= least <= most, and most >= 1")


@serve.ingress()
class Server:
    """One replica."""

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc] # Ray awaits it
        """Load the model.

        Raises:
            HeadraceError: why it cannot be loaded: from here Ray passes it on, from an app's own lifespan it does not.
        """
        self._app, self._host = build(settings)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        self._app.router.lifespan_context = _lives_already

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def wake(self) -> None:
        """Called where no replica is loaded and nobody is to wait for one."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve's controller hears of this replica."""
        service = self._host.loaded
        return {COST: service.gate.cost if service is not None else 0.0}

    def metrics_page(self) -> tuple[str, bytes]:
        """Which replica this is, and its counters for Prometheus."""
        return serve.get_replica_context().replica_id.unique_id, self._host.render_metrics()

    async def __del__(self) -> None:
        """End with the replica, which has answered all it has accepted."""
        if hasattr(self, "_life"):
            await self._life.__aexit__(None, None, None)


@asynccontextmanager
async def _lives_already(_: Any) -> AsyncIterator[None]:
    yield


def application(settings: ServerSettings, replicas: Replicas, place: ClusterResources, spare: bool = False) -> Any:
    """The Ray Serve application of a server, for `serve.run`.

    Args:
        settings: of each replica. The Batch API needs one server that keeps its files: there is none here.
        replicas: how many, and when.
        place: what each replica is to have.
        spare: the cluster has room for one replica more: an update loads it before it ends another.

    Raises:
        ConfigError: settings that replicas cannot share.
    """
    if settings.state is not None:
        raise ConfigError("the Batch API keeps its files in one server: leave out --state-dir, or --on ray")
    scaling: dict[str, Any] = {
        "min_replicas": replicas.least,
        # One begins in any case: a model that cannot be loaded is told of at the start.
        "initial_replicas": max(replicas.least, 1),
        "max_replicas": replicas.most,
        "target_ongoing_requests": replicas.target_ongoing_requests,
        "upscale_delay_s": replicas.scaleup_after_s,
        "downscale_delay_s": replicas.scaledown_after_s,
    }
    if replicas.target_queued_cost is not None:
        scaling["policy"] = {"policy_function": QueuedCost, "policy_kwargs": {"target": replicas.target_queued_cost}}
    routing: dict[str, Any] = {}
    if replicas.cold_retry_after_s is not None:
        cold = error_body(503, "no replica is loaded yet; one is being started", "cold")
        told = {"name": NAME, "retry_after_s": replicas.cold_retry_after_s, "body": json.dumps(cold)}
        routing["request_router_config"] = {"request_router_class": RefusesWhenCold, "request_router_kwargs": told}
    deployed = serve.deployment(
        Server,
        name=NAME,
        ray_actor_options=_has(place.cpus, place.gpus or 0.0),
        max_constructor_retry_count=1,  # what cannot be loaded will not be loaded the next time
        max_ongoing_requests=settings.limits.max_requests,
        graceful_shutdown_timeout_s=settings.limits.drain_s,
        autoscaling_config=scaling,
        max_surge_percent=int(spare),  # rounded up: one replica
        **routing,
    )
    return deployed.bind(settings)


def _has(cpus: float, gpus: float) -> dict[str, Any]:
    """What a replica has. Ray Serve's controller starts it, and it finds no module of ours where we do by itself."""
    found_in = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": {"PYTHONPATH": found_in}}}


@dataclass(frozen=True, slots=True)
class Deployed:
    """A server on a cluster, as one who deployed it knows it."""

    url: str
    owner: str

    @property
    def ours(self) -> bool:
        """Whether nobody has deployed another in its place since."""
        known = ray_overview.known(OVERVIEW)
        return known is None or known[0] == self.owner


def deploy(settings: ServerSettings, replicas: Replicas, place: ClusterResources, host: str, port: int) -> Deployed:
    """Begin to serve on the cluster this process is connected to; returns when a replica has loaded its model.

    What has been deployed before is replaced without losing a request: its replicas finish what they have accepted, and
    where the cluster has room for both, one is ended only when a new one answers; otherwise requests wait for that.
    Where the new model cannot be loaded, the server stays what it was.

    Raises:
        ConfigError: too little room on the cluster, or Ray Serve listens elsewhere on it.
        EngineError: the model cannot be loaded.
    """
    place = replace(place, gpus=check_room(place, replicas.most))
    serve.start(http_options={"host": host, "port": port, "request_timeout_s": settings.limits.timeout_s})
    if (taken := _get_global_client().http_config.port) != port:
        raise ConfigError(f"Ray Serve on this cluster listens on port {taken} already: take --port {taken}")
    before = ray_overview.known(OVERVIEW)
    try:
        _run(settings, replicas, place)
    except RuntimeError as error:  # what Ray raises when no replica comes up
        why = _reason(error)
        if before is None:
            _end()
            raise EngineError(f"no replica could be started: {why}") from error
        _run(*before[1])
        raise EngineError(f"the update could not be started, the server is what it was: {why}") from error
    owner = uuid.uuid4().hex
    overview = serve.deployment(ray_overview.Overview, name=OVERVIEW, ray_actor_options=_has(0.0, 0.0))
    known = overview.bind(NAME, owner, (settings, replicas, place), settings.keys)
    serve.run(known, name=OVERVIEW, route_prefix="/metrics")
    return Deployed(f"http://{host}:{port}", owner)


def _run(settings: ServerSettings, replicas: Replicas, place: ClusterResources) -> None:
    serve.run(application(settings, replicas, place, _spare(place, replicas.most)), name=NAME, route_prefix="/")


def _spare(place: ClusterResources, most: int) -> bool:
    """Whether the cluster has room for one more."""
    try:
        check_room(place, most + 1)
    except ConfigError:
        return False
    return True


@contextmanager
def served(
    settings: ServerSettings, replicas: Replicas, place: ClusterResources, host: str, port: int
) -> Iterator[str]:
    """Serve while the body runs; gives the address. What another has deployed in its place meanwhile stays.

    Raises:
        ConfigError: no cluster at the address; also what `deploy` raises.
        EngineError: the model cannot be loaded.
    """
    with connected(place), _while_ours(deploy(settings, replicas, place, host, port)) as deployed:
        yield deployed.url


@contextmanager
def _while_ours(deployed: Deployed) -> Iterator[Deployed]:
    try:
        yield deployed
    finally:
        if deployed.ours:
            _end()


def _end() -> None:
    """Each replica finishes what it has accepted; what others serve on the cluster stays."""
    there = serve.status().applications
    for name in (NAME, OVERVIEW):
        if name in there:
            serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()


def serve_until_stopped(
    settings: ServerSettings,
    replicas: Replicas,
    place: ClusterResources,
    address: tuple[str, int],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was accepted. Blocks; main thread only.

    Ends also when another command takes the server over, if the cluster goes on without this one.
    """
    stopped = threading.Event()
    outlasts_us = ray.is_initialized() or place.address or os.environ.get("RAY_ADDRESS")
    with connected(place), _while_ours(deploy(settings, replicas, place, *address)) as deployed:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        say(f"serving at {deployed.url}, {replicas.least} to {replicas.most} replicas")
        while not stopped.wait(_WATCH_S):
            if outlasts_us and not deployed.ours:
                say("another command has taken the server over")
                return
        say("stopping: finishing what is accepted")


def _reason(error: RuntimeError) -> str:
    """What the replica raised: Ray keeps its traceback in the deployment's status."""
    application = serve.status().applications.get(NAME)
    deployment = application.deployments.get(NAME) if application is not None else None
    lines = [line.strip() for line in (deployment.message if deployment is not None else "").splitlines()]
    return next((line.removeprefix("headrace.errors.") for line in reversed(lines) if line), str(error))
