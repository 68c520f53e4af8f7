"""/embed, as Text Embeddings Inference has it."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import EmbedRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocol.vectors import normalized, shortener
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.text import truncation_header
from headrace.serving.state import ServerState


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "vector" and not task.images:
        yield _embed(state)


def _embed(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/", response_model=list[list[float]], include_in_schema=False)
    @router.post("/embed", response_model=list[list[float]])
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """Embed texts: a list of vectors of length 1."""
        state.check_model(body.model)
        service, texts = state.service, body.texts()
        shorten = shortener(body.dimensions, service)
        call = state.call(request, body.timeout, "inputs", may_cut=body.truncate is True)
        answers = await service.infer(texts, state.check_texts(texts, "inputs"), call)
        vectors = [normalized(shorten(vector)) for vector in answers.outputs]
        return JsonReply(vectors, headers=truncation_header(answers))

    return router


PROTOCOL = ServerProtocol(name="tei", routers=_routers, order=1)
