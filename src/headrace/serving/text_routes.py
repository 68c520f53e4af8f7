"""Texts in, one output for each: /generate, /v1/embeddings and /classify."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from headrace.serving.direct import DirectRoute
from headrace.serving.host import Host
from headrace.serving.replies import JsonReply, as_base64
from headrace.serving.schemas import (
    ERRORS,
    Classifications,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    GenerateRequest,
    GenerateResponse,
)


def generate_router(host: Host) -> APIRouter:
    """`{"prompts": [...], "task_id": "..."}` → `{"results": [...]}`, whatever the model does."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Each prompt's output, in order."""
        size = host.check_texts(body.prompts, "prompts")
        outputs, _ = await host.service.infer(body.prompts, size, host.call(request, body.timeout, "prompts"))
        results = [output["text"] if isinstance(output, dict) and "text" in output else output for output in outputs]
        return JsonReply({"results": results, "task_id": body.task_id})

    return router


def embedding_router(host: Host) -> APIRouter:
    """OpenAI's embeddings."""
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """One vector per text."""
        host.check_model(body.model)
        texts = _texts(body.input)
        size = host.check_texts(texts, "input")
        service = host.service
        vectors, cost = await service.infer(texts, size, host.call(request, body.timeout, "input"))
        spell: Any = as_base64 if body.encoding_format == "base64" else _itself
        data = [
            {"object": "embedding", "index": index, "embedding": spell(vector)} for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": cost, "total_tokens": cost}
        return JsonReply({"object": "list", "data": data, "model": service.name, "usage": usage})

    return router


def classify_router(host: Host) -> APIRouter:
    """Labels of texts."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The likeliest label of each text, with its score."""
        host.check_model(body.model)
        texts = _texts(body.input)
        size = host.check_texts(texts, "input")
        service = host.service
        found, _ = await service.infer(texts, size, host.call(request, body.timeout, "input"))
        data = [{"index": index, **labels} for index, labels in enumerate(found)]
        return JsonReply({"object": "list", "data": data, "model": service.name})

    return router


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _itself(vector: Any) -> Any:
    return vector
