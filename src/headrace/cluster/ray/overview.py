"""Metrics of all replicas, and the record of the current deployment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import ConfigError
from headrace.observe.exporters.prometheus import merge_pages
from headrace.serving.auth import Keys
from headrace.serving.errors import ApiError
from headrace.serving.hosts import Hosts
from headrace.serving.http.middleware import error_response
from headrace.serving.routes.status import METRICS_TYPE

if TYPE_CHECKING:
    from headrace.app.servers.server import ServerSettings
    from headrace.cluster.base import ClusterResources, Replicas

try:
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
except ImportError as error:
    raise ConfigError(f'Ray Serve cannot be imported ({error}): pip install "headrace[ray]"') from error

_TIMEOUT_S = 5.0
"""Seconds for a replica or for this deployment to answer."""

Deployment: TypeAlias = "tuple[ServerSettings, Replicas, ClusterResources]"
"""The arguments of a deployment."""


class Overview:
    """A small deployment beside that of the model. Reading metrics from it does not start a replica of the model.

    Args:
        owner: id of the command that deployed the application.
        deployed: the deployment, to roll back to if an update fails.
    """

    def __init__(self, model: str, owner: str, deployed: Deployment) -> None:
        self._model = model
        self._known = owner, deployed
        settings, *_ = deployed
        self._keys = Keys(settings.keys)
        self._hosts = Hosts(settings.allowed_hosts)

    def known(self) -> tuple[str, Deployment]:
        return self._known

    async def __call__(self, request: Request) -> Response:
        """The metrics of all replicas on one page."""
        try:
            self._hosts.check(request.scope["headers"])
            self._keys.check_metrics(request.scope["headers"])
        except ApiError as error:
            return error_response(error)
        return Response(merge_pages(await self._pages(), "replica"), headers={"content-type": METRICS_TYPE})

    async def _pages(self) -> dict[str, bytes]:
        """The metrics of each replica by name, without replicas that do not answer in time."""
        try:
            asked = serve.get_app_handle(self._model).broadcast("metrics_page")
            answers = await asked.results_async(timeout_s=_TIMEOUT_S, return_exceptions=True)
        except (DeploymentUnavailableError, RayServeException, TimeoutError):
            return {}
        return dict(answer for answer in answers if not isinstance(answer, BaseException))


def known(name: str) -> tuple[str, Deployment] | None:
    """The owner and the deployment on this cluster; None if there is none, or no answer in time."""

    def ask() -> tuple[str, Deployment] | None:
        try:
            found: tuple[str, Deployment] = serve.get_app_handle(name).known.remote().result(timeout_s=_TIMEOUT_S)
        except (RayServeException, TimeoutError):
            return None
        return found

    with ThreadPoolExecutor(1) as thread:  # Ray Serve cannot block where an event loop runs, as in a notebook
        return thread.submit(ask).result()
