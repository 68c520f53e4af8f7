"""OpenAI's API: embeddings of texts and images, completions and chats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from headrace import openai_protocol
from headrace.engines.declaring import Task
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.asked import embedding
from headrace.serving.protocol.requests import EmbeddingRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, EmbeddingList
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes import generation, images
from headrace.serving.routes.text import infer, truncation_header
from headrace.serving.state import ServerState


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "vector":
        yield images.embedding_router(state) if task.images else _embeddings(state)
    elif task.outputs == "text":
        yield generation.router(state)


def _embeddings(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts: one vector per text."""
        state.check_model(body.model)
        asking = (state, body, "input")
        asked = await asyncio.to_thread(embedding, *asking) if body.holds_ids else embedding(*asking)
        answers = await infer(state, body, asked, request)
        vectors = [asked.format_output(vector) for vector in answers.outputs]
        reply = openai_protocol.embeddings(vectors, answers.cost, answers.truncated)
        return JsonReply({**reply, "model": state.service.name}, headers=truncation_header(answers))

    return router


PROTOCOL = ServerProtocol(name="openai", routers=_routers, order=0)
