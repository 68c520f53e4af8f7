"""Texts in, one output for each: /generate, /v1/embeddings and /classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from headrace.serving.direct import DirectRoute
from headrace.serving.errors import ApiError
from headrace.serving.host import Host
from headrace.serving.replies import JsonReply, as_base64
from headrace.serving.requests import ClassifyRequest, EmbeddingRequest, GenerateRequest, texts_of
from headrace.serving.schemas import ERRORS, Classifications, EmbeddingList, GenerateResponse
from headrace.serving.service import Answers, Service


def generate_router(host: Host) -> APIRouter:
    """`{"prompts": [...], "task_id": "..."}` → `{"results": [...]}`, whatever the model does."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Each prompt's output, in order."""
        answers = await _infer(host, body, body.prompts, request, "prompts")
        results = [
            output["text"] if isinstance(output, dict) and "text" in output else output for output in answers.outputs
        ]
        return JsonReply({"results": results, "task_id": body.task_id}, headers=_told(answers))

    return router


def embedding_router(host: Host) -> APIRouter:
    """OpenAI's embeddings."""
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """One vector per text."""
        service = host.service
        if body.dimensions is not None:
            _check_dimensions(service, body.dimensions)
        answers = await _infer(host, body, body.input, request, "input")
        vectors = answers.outputs
        if body.dimensions is not None:
            vectors = [_shortened(vector, body.dimensions, service) for vector in vectors]
        spell: Any = as_base64 if body.encoding_format == "base64" else _itself
        data = [
            {"object": "embedding", "index": index, "embedding": spell(vector)} for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": answers.cost, "total_tokens": answers.cost}
        if answers.truncated:
            usage["truncated_inputs"] = len(answers.truncated)
            _mark(data, answers)
        return JsonReply(
            {"object": "list", "data": data, "model": service.name, "usage": usage}, headers=_told(answers)
        )

    return router


def classify_router(host: Host) -> APIRouter:
    """Labels of texts."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The likeliest label of each text, with its score."""
        answers = await _infer(host, body, body.input, request, "input")
        data = [{"index": index, **labels} for index, labels in enumerate(answers.outputs)]
        _mark(data, answers)
        return JsonReply({"object": "list", "data": data, "model": host.service.name}, headers=_told(answers))

    return router


async def _infer(
    host: Host,
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


def _mark(data: Sequence[dict[str, Any]], answers: Answers) -> None:
    for place in answers.truncated:
        data[place]["truncated"] = True


def _told(answers: Answers) -> dict[str, str] | None:
    """The header that says how many texts were cut."""
    return {"X-Truncated-Inputs": str(len(answers.truncated))} if answers.truncated else None


def _check_dimensions(service: Service, wanted: int) -> None:
    """Raise 400 for a length that the model's vectors are known not to have."""
    own = getattr(service.engine, "dimension", None)
    if own is not None and wanted != own and wanted not in getattr(service.engine, "matryoshka", ()):
        raise _no_such_length(service, wanted, own)


def _shortened(vector: Any, wanted: int, service: Service) -> Any:
    """The first components, at length 1 again."""
    if len(vector) == wanted:
        return vector
    if wanted not in getattr(service.engine, "matryoshka", ()):
        raise _no_such_length(service, wanted, len(vector))
    short = np.asarray(vector, dtype=np.float32)[:wanted]
    return short / max(float(np.linalg.norm(short)), 1e-12)


def _no_such_length(service: Service, wanted: int, own: int) -> ApiError:
    lengths: Sequence[int] = getattr(service.engine, "matryoshka", ())
    known = (
        f"1 to {own}" if isinstance(lengths, range) else ", ".join(str(length) for length in sorted({own, *lengths}))
    )
    return ApiError(
        400,
        f"dimensions is {wanted}: vectors of the model {service.name!r} have {known} components",
        code="bad_dimensions",
        param="dimensions",
    )


def _itself(vector: Any) -> Any:
    return vector
