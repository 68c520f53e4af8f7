"""/generate, /v1/embeddings and /classify for texts."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from headrace import openai_protocol
from headrace.engines.base import PromptedText, TokenIds
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.bodies import labels_body
from headrace.serving.protocol.requests import (
    ClassifyRequest,
    EmbeddingRequest,
    EmbedRequest,
    GenerateRequest,
    prompted,
    texts_of,
)
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Classifications, EmbeddingList, GenerateResponse
from headrace.serving.protocol.vectors import normalized, shortener, vector_format
from headrace.serving.service import Answers
from headrace.serving.state import ServerState


def generate_router(state: ServerState) -> APIRouter:
    """The route for `{"prompts": [...], "task_id": "..."}` → `{"results": [...]}`, for every task."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Run the model on each prompt; returns the outputs in order."""
        answers = await _infer(state, body, prompted(texts_of(body.prompts), body.prompt_name), request, "prompts")
        results = [
            output["text"] if isinstance(output, dict) and "text" in output else output for output in answers.outputs
        ]
        return JsonReply({"results": results, "task_id": body.task_id}, headers=truncation_header(answers))

    return router


def embedding_router(state: ServerState) -> APIRouter:
    """The route that embeds texts."""
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts: one vector per text."""
        service = state.service
        written = vector_format(body, service)
        answers = await _infer(state, body, body.inputs(service.profile.prompt_names), request, "input")
        vectors = [written(vector) for vector in answers.outputs]
        reply = openai_protocol.embeddings(vectors, answers.cost, answers.truncated)
        return JsonReply({**reply, "model": service.name}, headers=truncation_header(answers))

    @router.post("/", response_model=list[list[float]], include_in_schema=False)
    @router.post("/embed", response_model=list[list[float]], tags=["texts"])
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """Embed texts, as Text Embeddings Inference does: a list of vectors of length 1."""
        state.check_model(body.model)
        service, texts = state.service, body.texts()
        shorten = shortener(body.dimensions, service)
        call = state.call(request, body.timeout, "inputs", may_cut=body.truncate is True)
        answers = await service.infer(texts, state.check_texts(texts, "inputs"), call)
        vectors = [normalized(shorten(vector)) for vector in answers.outputs]
        return JsonReply(vectors, headers=truncation_header(answers))

    return router


def classify_router(state: ServerState) -> APIRouter:
    """The route that classifies texts."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Classify texts: the most likely label of each, with its score."""
        answers = await _infer(state, body, texts_of(body.input), request, "input")
        reply = {**labels_body(answers), "model": state.service.name}
        return JsonReply(reply, headers=truncation_header(answers))

    return router


async def _infer(
    state: ServerState,
    body: EmbeddingRequest | ClassifyRequest | GenerateRequest,
    texts: Sequence[str | TokenIds | PromptedText],
    request: Request,
    param: str,
) -> Answers:
    state.check_model(body.model)
    size = state.check_texts(texts, param)
    service = state.service
    may_cut = body.may_cut(service.longest)
    return await service.infer(texts, size, state.call(request, body.timeout, param, may_cut=may_cut))


def truncation_header(answers: Answers) -> dict[str, str] | None:
    """The header with the number of truncated texts."""
    return {"X-Truncated-Inputs": str(len(answers.truncated))} if answers.truncated else None
