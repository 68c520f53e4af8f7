"""/health, /ready, /metrics and /v1/models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response

from headrace.engines.choosing.served import ServedModel
from headrace.records import JsonObject
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Health, Model, ModelList
from headrace.serving.state import RETRY_WHEN_STOPPING_S, ServerState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def model_routes(state: ServerState, task: str) -> APIRouter:
    """The routes of a server of one model."""

    def listed() -> Sequence[JsonObject]:
        served = state.service.model
        return [described(name, task, served) for name in served.names]

    def named(name: str) -> JsonObject:
        state.check_model(name)
        served = state.service.model
        return described(name if name in served.names else served.name, task, served)

    return router(state, listed, named)


def router(
    state: ServerState, listed: Callable[[], Sequence[JsonObject]], named: Callable[[str], JsonObject]
) -> APIRouter:
    """The routes.

    Args:
        listed: returns the entries of all models.
        named: returns the entry of a model, or raises ApiError.
    """
    routes = APIRouter(tags=["status"], responses=ERRORS)

    @routes.get("/health", response_model=Health)
    async def health() -> Response:
        """Liveness: 200 while the process runs, 503 if the engine has died."""
        return probed("dead" if state.dead else "ok", good=not state.dead)

    @routes.get("/ready", response_model=Health)
    async def ready() -> Response:
        """Readiness: 503 while the server loads or drains, or if the engine has died."""
        return probed(state.status, good=state.ready)

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus. If any admin key exists, only admin keys may read them."""
        state.keys.check_metrics(request.scope["headers"])
        return Response(state.render_metrics(), media_type=METRICS_TYPE)

    @routes.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
    async def models() -> Response:
        """List the names of the models."""
        return JsonReply({"object": "list", "data": listed()})

    @routes.get("/v1/models/{model:path}", response_model=Model, tags=["OpenAI"])
    async def model(model: str) -> Response:
        """Describe a model."""
        return JsonReply(named(model))

    return routes


def probed(status: str, *, good: bool) -> JsonReply:
    """The answer to a probe."""
    if good:
        return JsonReply({"status": status})
    return JsonReply({"status": status}, 503, {"Retry-After": f"{RETRY_WHEN_STOPPING_S:.0f}"})


def described(name: str, task: str, served: ServedModel) -> JsonObject:
    """An entry of `/v1/models`; that of an adapter names its model, as vLLM's does."""
    entry: JsonObject = {"id": name, "object": "model", "created": 0, "owned_by": "headrace", "task": task}
    if served.commit is not None:
        entry["commit"] = served.commit
    return {**entry, "parent": served.name} if name in served.adapters else entry
