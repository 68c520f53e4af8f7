"""Texts in, one output for each: /generate, /v1/embeddings and /classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from headrace import openai_protocol
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import ClassifyRequest, EmbeddingRequest, GenerateRequest, texts_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Classifications, EmbeddingList, GenerateResponse
from headrace.serving.protocol.vectors import vector_format
from headrace.serving.service import Answers
from headrace.serving.state import ServerState


def generate_router(host: ServerState) -> APIRouter:
    """`{"prompts": [...], "task_id": "..."}` → `{"results": [...]}`, whatever the model does."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Each prompt's output, in order."""
        answers = await _infer(host, body, body.prompts, request, "prompts")
        results = [
            output["text"] if isinstance(output, dict) and "text" in output else output for output in answers.outputs
        ]
        return JsonReply({"results": results, "task_id": body.task_id}, headers=truncation_header(answers))

    return router


def embedding_router(host: ServerState) -> APIRouter:
    """OpenAI's embeddings."""
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """One vector per text."""
        service = host.service
        written = vector_format(body, service)
        answers = await _infer(host, body, body.input, request, "input")
        reply = openai_protocol.embeddings(map(written, answers.outputs), answers.cost, answers.truncated)
        return JsonReply({**reply, "model": service.name}, headers=truncation_header(answers))

    return router


def classify_router(host: ServerState) -> APIRouter:
    """Labels of texts."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The likeliest label of each text, with its score."""
        answers = await _infer(host, body, body.input, request, "input")
        data = [{"index": index, **labels} for index, labels in enumerate(answers.outputs)]
        mark_truncated(data, answers)
        return JsonReply(
            {"object": "list", "data": data, "model": host.service.name}, headers=truncation_header(answers)
        )

    return router


async def _infer(
    host: ServerState,
    body: EmbeddingRequest | ClassifyRequest | GenerateRequest,
    given: str | list[str],
    request: Request,
    param: str,
) -> Answers:
    host.check_model(body.model)
    texts = texts_of(given)
    size = host.check_texts(texts, param)
    service = host.service
    may_cut = body.may_cut(service.longest)
    return await service.infer(texts, size, host.call(request, body.timeout, param, may_cut=may_cut))


def mark_truncated(data: Sequence[dict[str, Any]], answers: Answers) -> None:
    """Mark the items whose texts were cut."""
    for place in answers.truncated:
        data[place]["truncated"] = True


def truncation_header(answers: Answers) -> dict[str, str] | None:
    """The header that says how many texts were cut."""
    return {"X-Truncated-Inputs": str(len(answers.truncated))} if answers.truncated else None
