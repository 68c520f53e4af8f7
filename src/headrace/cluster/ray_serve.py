"""`headrace serve --on ray`: replicas of the server on Ray Serve, as many as the requests under way call for."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from headrace.cluster.ray_workers import Place, check_room, connected
from headrace.errors import ConfigError, EngineError
from headrace.hosting import ServerSettings, build

try:
    from ray import serve
    from ray.serve.context import _get_global_client
except ImportError as error:
    raise ConfigError(f'Ray Serve cannot be imported ({error}): pip install "headrace[ray]"') from error

NAME = "headrace"


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
        self._app, _ = build(settings)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        self._app.router.lifespan_context = _lives_already

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def __del__(self) -> None:
        """End with the replica, which has answered all it has accepted."""
        if hasattr(self, "_life"):
            await self._life.__aexit__(None, None, None)


@asynccontextmanager
async def _lives_already(_: Any) -> AsyncIterator[None]:
    yield


def application(settings: ServerSettings, replicas: Replicas, place: Place) -> Any:
    """The Ray Serve application of a server, for `serve.run`.

    Args:
        settings: of each replica. The Batch API needs one server that keeps its files: there is none here.
        place: what each replica is to have.

    Raises:
        ConfigError: settings that replicas cannot share.
    """
    if settings.state is not None:
        raise ConfigError("the Batch API keeps its files in one server: leave out --state-dir, or --on ray")

    # Ray Serve's controller starts replicas, and they find no module of ours where we do, as workers of a job would.
    found_in = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    options: dict[str, Any] = {
        "num_cpus": place.cpus,
        "num_gpus": place.gpus or 0.0,
        "runtime_env": {"env_vars": {"PYTHONPATH": found_in}},
    }
    deployed = serve.deployment(
        Server,
        name=NAME,
        ray_actor_options=options,
        max_constructor_retry_count=1,  # what cannot be loaded will not be loaded the next time
        max_ongoing_requests=settings.limits.max_requests,
        graceful_shutdown_timeout_s=settings.limits.drain_s,
        autoscaling_config={
            "min_replicas": replicas.least,
            # One begins in any case: a model that cannot be loaded is told of at the start.
            "initial_replicas": max(replicas.least, 1),
            "max_replicas": replicas.most,
            "target_ongoing_requests": replicas.target_ongoing_requests,
            "upscale_delay_s": replicas.scaleup_after_s,
            "downscale_delay_s": replicas.scaledown_after_s,
        },
    )
    return deployed.bind(settings)


@contextmanager
def served(settings: ServerSettings, replicas: Replicas, place: Place, host: str, port: int) -> Iterator[str]:
    """Serve while the body runs; gives the address. The first replica has loaded its model by then.

    Raises:
        ConfigError: no cluster at the address, or one with too little room.
        EngineError: the model cannot be loaded.
    """
    with connected(place):
        place = replace(place, gpus=check_room(place, replicas.most))
        serve.start(http_options={"host": host, "port": port, "request_timeout_s": settings.limits.timeout_s})
        if (taken := _get_global_client().http_config.port) != port:
            raise ConfigError(f"Ray Serve on this cluster listens on port {taken} already: take --port {taken}")
        try:
            serve.run(application(settings, replicas, place), name=NAME, route_prefix="/")
        except RuntimeError as error:  # what Ray raises when no replica comes up
            why = _reason(error)
            _end()
            raise EngineError(f"no replica could be started: {why}") from error
        try:
            yield f"http://{host}:{port}"
        finally:
            _end()


def _end() -> None:
    """Each replica finishes what it has accepted; what others serve on the cluster stays."""
    serve.delete(NAME)
    if not serve.status().applications:
        serve.shutdown()


def serve_until_stopped(
    settings: ServerSettings, replicas: Replicas, place: Place, address: tuple[str, int], say: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was accepted. Blocks; main thread only."""
    stopped = threading.Event()
    with served(settings, replicas, place, *address) as url:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        say(f"serving at {url}, {replicas.least} to {replicas.most} replicas")
        stopped.wait()
        say("stopping: finishing what is accepted")


def _reason(error: RuntimeError) -> str:
    """What the replica raised: Ray keeps its traceback in the deployment's status."""
    application = serve.status().applications.get(NAME)
    deployment = application.deployments.get(NAME) if application is not None else None
    lines = [line.strip() for line in (deployment.message if deployment is not None else "").splitlines()]
    return next((line.removeprefix("headrace.errors.") for line in reversed(lines) if line), str(error))
