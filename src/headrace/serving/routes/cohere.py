"""Cohere's API: /v2/embed, /v1/embed and /v2/chat. /v1/rerank and /v2/rerank are in `pairs`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.cohere import (
    CohereChatRequest,
    CohereEmbedRequest,
    CohereEmbedV1Request,
    errors,
    finish_reason,
    in_type,
    message,
    usage,
)
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.vectors import VectorNumbers, shortener
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.generation import ReplyForm, converse
from headrace.serving.routes.streams import BlockChunks, StreamBlock, event
from headrace.serving.routes.text import truncation_header
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "vector" and not task.images:
        yield _embeddings(state)
    elif task.outputs == "text":
        yield _chats(state)


def _embeddings(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Cohere"], responses=error_responses(errors), route_class=DirectRoute)

    async def infer(body: CohereEmbedV1Request, request: Request) -> RequestAnswers:
        state.check_model(body.model)
        texts = body.inputs(state.service.profile.prompt_names)
        size = state.check_texts(texts, "texts")
        call = state.call(request, body.timeout, "texts", may_cut=body.truncate != "NONE")
        return await state.service.infer(texts, size, call)

    def reply(
        body: CohereEmbedV1Request, answers: RequestAnswers, vectors: Sequence[VectorNumbers], version: str
    ) -> Response:
        kinds = body.embedding_types or (["float"] if version == "2" else None)
        found: object = vectors
        if kinds is not None:
            found = {kind: in_type(vectors, kind) for kind in kinds}
        content: JsonObject = {
            "id": str(uuid.uuid4()),
            "embeddings": found,
            "texts": body.texts,
            "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": answers.cost}},
            "response_type": "embeddings_floats" if kinds is None else "embeddings_by_type",
        }
        return JsonReply(content, headers=truncation_header(answers))

    @router.post("/v2/embed")
    async def embed(body: CohereEmbedRequest, request: Request) -> Response:
        """Embed texts, in one type of numbers or several."""
        shorten = shortener(body.output_dimension, state.service)
        answers = await infer(body, request)
        return reply(body, answers, [shorten(one) for one in answers.outputs], "2")

    @router.post("/v1/embed")
    async def embed_v1(body: CohereEmbedV1Request, request: Request) -> Response:
        """Embed texts, as the older client has it."""
        answers = await infer(body, request)
        return reply(body, answers, answers.outputs, "1")

    return router


def _chats(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Cohere"], responses=error_responses(errors), route_class=DirectRoute)

    @router.post("/v2/chat", responses={200: {"content": {"text/event-stream": {}}}})
    async def chat(body: CohereChatRequest, request: Request) -> Response:
        """Generate the next message of a chat."""

        def whole(answers: Sequence[GeneratorAnswer]) -> JsonObject:
            [answer] = answers
            ending = {"finish_reason": finish_reason(answer), "usage": usage(answer)}
            return {"id": str(uuid.uuid4()), "message": message(answer), **ending}

        return await converse(state, body.request(), request, ReplyForm(whole, _CohereEvents, "messages"))

    return router


_NAMES = {"reasoning": "thinking", "text": "text"}
"""The type of a block of a content, which is the name of its field too."""


class _CohereEvents(BlockChunks):
    """The events of a message."""

    def __init__(self) -> None:
        self._id = str(uuid.uuid4())

    def begin(self) -> bytes:
        empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return _event("message-start", id=self._id, delta={"message": empty})

    def opened(self, block: StreamBlock) -> bytes:
        if block.call is not None:
            empty = {**block.call.as_openai, "function": {"name": block.call.name, "arguments": ""}}
            return _event("tool-call-start", index=block.index, delta={"message": {"tool_calls": empty}})
        name = _NAMES[block.kind]
        return _event("content-start", index=block.index, delta={"message": {"content": {"type": name, name: ""}}})

    def more(self, block: StreamBlock, piece: str) -> bytes:
        if block.kind == "call":
            more: JsonObject = {"tool_calls": {"function": {"arguments": piece}}}
            return _event("tool-call-delta", index=block.index, delta={"message": more})
        more = {"content": {_NAMES[block.kind]: piece}}
        return _event("content-delta", index=block.index, delta={"message": more})

    def closed(self, block: StreamBlock) -> bytes:
        return _event("tool-call-end" if block.kind == "call" else "content-end", index=block.index)

    def ending(self, answer: GeneratorAnswer) -> bytes:
        ending = {"finish_reason": finish_reason(answer), "usage": usage(answer)}
        return _event("message-end", id=self._id, delta=ending)

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:  # noqa: ARG002 - told in `ended`
        return b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        ending = {"finish_reason": "ERROR", "error": error.message}
        return _event("message-end", id=self._id, delta=ending) + b"data: [DONE]\n\n"


def _event(kind: str, **content: object) -> bytes:
    return event({"type": kind, **content}, kind)


PROTOCOL = ServerProtocol(
    name="cohere", routers=_routers, errors=errors, paths=("/v1/embed", "/v2/embed", "/v2/chat"), order=14
)
