"""/classify and /v1/embeddings for images."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from headrace import openai_protocol
from headrace.records import JsonObject
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.images import (
    ImageClassifyRequest,
    ImageEmbeddingRequest,
    Images,
    decode_images,
    images_of,
)
from headrace.serving.protocol.requests import HEAVY_BYTES
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Classifications, EmbeddingList
from headrace.serving.protocol.vectors import vector_format
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState


def classify_router(state: ServerState) -> APIRouter:
    """The route that classifies images."""
    router = APIRouter(tags=["images"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ImageClassifyRequest, request: Request) -> Response:
        """Classify images: the most likely label of each, with its score."""
        answers = await _infer(state, body, body.input, request)
        data: list[JsonObject] = [{"index": index, **labels} for index, labels in enumerate(answers.outputs)]
        return JsonReply({"object": "list", "data": data, "model": state.service.name})

    return router


def embedding_router(state: ServerState) -> APIRouter:
    """The route that embeds images."""
    router = APIRouter(tags=["images"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: ImageEmbeddingRequest, request: Request) -> Response:
        """Embed images: one vector per image."""
        service = state.service
        written = vector_format(body, service)
        answers = await _infer(state, body, body.input, request)
        vectors = [written(vector) for vector in answers.outputs]
        reply = openai_protocol.embeddings(vectors, 0)  # an image has no tokens
        return JsonReply({**reply, "model": service.name})

    return router


async def _infer(
    state: ServerState, body: ImageClassifyRequest | ImageEmbeddingRequest, given: Images, request: Request
) -> RequestAnswers:
    state.check_model(body.model)
    images = images_of(given)
    state.check_count(len(images), "images", "input")
    heavy = sum(map(len, images)) > HEAVY_BYTES
    files = await asyncio.to_thread(decode_images, images) if heavy else decode_images(images)
    return await state.service.infer(files, len(files), state.call(request, body.timeout, "input"))
