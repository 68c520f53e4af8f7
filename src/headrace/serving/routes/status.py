"""What the server says of itself: /health, /ready, /metrics, /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from headrace.serving.errors import ApiError
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Health, Model, ModelList
from headrace.serving.state import ServerState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def router(host: ServerState, task: str) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["status"], responses=ERRORS)

    @routes.get("/health", response_model=Health)
    async def health() -> Response:
        """Whether the process lives: 200 also while the model works; 503 when its engine is gone."""
        return JsonReply({"status": "dead" if host.dead else "ok"}, 503 if host.dead else 200)

    @routes.get("/ready", response_model=Health)
    async def ready() -> Response:
        """Whether requests are taken: 503 while loading, draining, or without an engine."""
        status = "ready" if host.ready else "dead" if host.dead else "draining" if host.draining else "loading"
        return JsonReply({"status": status}, 200 if host.ready else 503)

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms for Prometheus; where keys have an admin among them, for that alone."""
        host.keys.check_metrics(request.scope["headers"])
        return Response(host.render_metrics(), media_type=METRICS_TYPE)

    @routes.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
    async def models() -> Response:
        """The one model there is."""
        return JsonReply({"object": "list", "data": [_described(host.service.name, task)]})

    @routes.get("/v1/models/{model:path}", response_model=Model, tags=["OpenAI"])
    async def model(model: str) -> Response:
        """The model by its name."""
        if model != host.service.name:
            raise ApiError(
                404,
                f"there is no model {model!r:.200}; this server has {host.service.name!r}",
                code="model_not_found",
                param="model",
            )
        return JsonReply(_described(model, task))

    return routes


def _described(name: str, task: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headrace", "task": task}
