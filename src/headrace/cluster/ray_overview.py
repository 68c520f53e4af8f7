"""What is known of all replicas together: their metrics, and who deployed them with what."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import ConfigError
from headrace.observe.prometheus import merged
from headrace.serving.auth import Keys
from headrace.serving.errors import ApiError
from headrace.serving.http.middleware import error_response
from headrace.serving.routes.status import METRICS_TYPE

try:
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
except ImportError as error:
    raise ConfigError(f'Ray Serve cannot be imported ({error}): pip install "headrace[ray]"') from error

_ANSWER_S = 5.0
"""How long one replica may take to tell its figures, or this deployment what it knows."""


class Overview:
    """A deployment of one small replica beside the model's, which it does not wake.

    Args:
        model: name of the application whose replicas are meant.
        owner: who deployed them.
        deployed: what `deploy` was called with, to return to when an update cannot be loaded.
        keys: the API keys of the server.
    """

    def __init__(self, model: str, owner: str, deployed: tuple[Any, ...], keys: Any) -> None:
        self._model = model
        self._known = owner, deployed
        self._keys = Keys(keys)

    def known(self) -> tuple[str, tuple[Any, ...]]:
        """Who deployed the replicas, and with what."""
        return self._known

    async def __call__(self, request: Request) -> Response:
        """The metrics of every replica on one page."""
        try:
            self._keys.check_metrics(request.scope["headers"])
        except ApiError as error:
            return error_response(error)
        return Response(merged(await self._pages(), "replica"), headers={"content-type": METRICS_TYPE})

    async def _pages(self) -> dict[str, bytes]:
        """Of each replica by its name; one that cannot answer in time is left out."""
        try:
            asked = serve.get_app_handle(self._model).broadcast("metrics_page")
            answers = await asked.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except (DeploymentUnavailableError, RayServeException, TimeoutError):
            return {}
        return dict(answer for answer in answers if not isinstance(answer, BaseException))


def known(name: str) -> tuple[str, tuple[Any, ...]] | None:
    """Who deployed last on this cluster, and with what; None where nobody has, or nobody says so in time."""

    def ask() -> tuple[str, tuple[Any, ...]] | None:
        try:
            found: tuple[str, tuple[Any, ...]] = serve.get_app_handle(name).known.remote().result(timeout_s=_ANSWER_S)
        except (RayServeException, TimeoutError):
            return None
        return found

    with ThreadPoolExecutor(1) as thread:  # Ray Serve waits for no answer where an event loop runs: in a notebook, say
        return thread.submit(ask).result()
