"""/health, /ready, /metrics and /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Health, Model, ModelList
from headrace.serving.state import RETRY_WHEN_STOPPING_S, ServerState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def router(state: ServerState, task: str) -> APIRouter:
    """The routes."""
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
        """List the names of the served model."""
        served = state.service.model
        return JsonReply({"object": "list", "data": [described(name, task, served.commit) for name in served.names]})

    @routes.get("/v1/models/{model:path}", response_model=Model, tags=["OpenAI"])
    async def model(model: str) -> Response:
        """Describe the served model."""
        state.check_model(model)
        served = state.service.model
        return JsonReply(described(model if model in served.names else served.name, task, served.commit))

    return routes


def probed(status: str, *, good: bool) -> JsonReply:
    """The answer to a probe."""
    if good:
        return JsonReply({"status": status})
    return JsonReply({"status": status}, 503, {"Retry-After": f"{RETRY_WHEN_STOPPING_S:.0f}"})


def described(name: str, task: str, commit: str | None = None) -> dict[str, object]:
    """An entry of `/v1/models`."""
    known = {"id": name, "object": "model", "created": 0, "owned_by": "headrace", "task": task}
    return known if commit is None else {**known, "commit": commit}
