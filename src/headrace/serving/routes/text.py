"""Headrace's own API: /generate, /classify and the tokenizer's routes."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol import asked
from headrace.serving.protocol.asked import Asked
from headrace.serving.protocol.bodies import labels_body
from headrace.serving.protocol.requests import BaseRequest, ClassifyRequest, GenerateRequest, prompted, texts_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Classifications, GenerateResponse
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes import images, tokens
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "labels":
        yield images.classify_router(state) if task.images else classify_router(state)
    if task.takes_single_texts:
        yield generate_router(state)
    if not task.images:
        yield tokens.router(state)


def generate_router(state: ServerState) -> APIRouter:
    """The route for `{"prompts": [...], "task_id": "..."}` → `{"results": [...]}`, for every task."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Run the model on each prompt; returns the outputs in order."""
        texts = prompted(texts_of(body.prompts), body.prompt_name)
        may_cut = body.may_cut(state.service.longest)
        answers = await state.infer_texts(texts, request, body.model, "prompts", body.timeout, may_cut=may_cut)
        results = [
            output["text"] if isinstance(output, dict) and "text" in output else output for output in answers.outputs
        ]
        return JsonReply({"results": results, "task_id": body.task_id}, headers=truncation_header(answers))

    return router


def classify_router(state: ServerState) -> APIRouter:
    """The route that classifies texts."""
    router = APIRouter(tags=["texts"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/classify", response_model=Classifications)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Classify texts: the most likely label of each, with its score."""
        state.check_model(body.model)
        answers = await infer(state, body, asked.classify(state, body, "input"), request)
        reply = {**labels_body(answers), "model": state.service.name}
        return JsonReply(reply, headers=truncation_header(answers))

    return router


async def infer(state: ServerState, body: BaseRequest, wanted: Asked, request: Request) -> RequestAnswers:
    """The answers to what a request asks."""
    call = state.call(request, body.timeout, wanted.param, may_cut=wanted.may_cut)
    return await state.service.infer(wanted.values, wanted.size, call)


def truncation_header(answers: RequestAnswers) -> dict[str, str] | None:
    """The header with the number of truncated texts."""
    return {"X-Truncated-Inputs": str(len(answers.truncated))} if answers.truncated else None


PROTOCOL = ServerProtocol(name="headrace", routers=_routers, order=3)
