"""/classify and /v1/embeddings for images."""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
from typing import TypeAlias

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from headrace import openai_protocol
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.bodies import labels_body
from headrace.serving.protocol.requests import HEAVY_BYTES, BaseRequest, VectorRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Classifications, EmbeddingList
from headrace.serving.protocol.vectors import vector_format
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState


class Image(BaseModel):
    """An image as an object, as in Jina's API."""

    model_config = ConfigDict(extra="forbid")

    image: str


Images: TypeAlias = str | Image | list[str | Image]
"""One or more images."""


class ImageClassifyRequest(BaseRequest):
    """POST /classify."""

    input: Images


class ImageEmbeddingRequest(VectorRequest):
    """POST /v1/embeddings."""

    input: Images


def _decoded(image: str, index: int) -> bytes:
    """Decode an image. File names and URLs are refused: the server does not open them for a client.

    Raises:
        ApiError: 400 for an image that is not base64.
    """
    header, comma, encoded = image.partition(",") if image.startswith("data:") else ("", "", image)
    if comma and not header.endswith(";base64"):
        raise _invalid(index, "its data URL must have the form data:image/png;base64,...")
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(index, "it must be base64 or a data URL; URLs and file names are not opened") from None
    if not content:
        raise _invalid(index, "it is empty")
    return content


def _invalid(index: int, why: str) -> ApiError:
    return ApiError(400, f"image {index} of input: {why}", code="invalid_image", param="input")


def classify_router(state: ServerState) -> APIRouter:
    """The route that classifies images."""
    router = APIRouter(tags=["images"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ImageClassifyRequest, request: Request) -> Response:
        """Classify images: the most likely label of each, with its score."""
        answers = await _infer(state, body, body.input, request)
        return JsonReply({**labels_body(answers), "model": state.service.name})

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
    listed = given if isinstance(given, list) else [given]
    images = [one if isinstance(one, str) else one.image for one in listed]
    state.check_count(len(images), "images", "input")
    heavy = sum(map(len, images)) > HEAVY_BYTES
    decoded = map(_decoded, images, itertools.count())
    files = await asyncio.to_thread(list, decoded) if heavy else list(decoded)
    return await state.service.infer(files, len(files), state.call(request, body.timeout, "input"))
