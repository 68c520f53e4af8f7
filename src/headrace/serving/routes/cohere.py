"""Cohere's API: /v2/embed, /v1/embed and /v2/chat. /v1/rerank and /v2/rerank are in `pairs`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import FailFast, Field

from headrace.engines.base import PromptedText, ToolCall
from headrace.engines.networks.quantizing import quantized
from headrace.engines.options import OutputDtype
from headrace.errors import RecordError
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, told_as
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import ChatRequest, RequestFields, Seconds, fields_of, prompted
from headrace.serving.protocol.responses import JsonReply, as_base64
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.vectors import VectorNumbers, shortener
from headrace.serving.protocols import ServerProtocol, for_outputs
from headrace.serving.routes.generation import ReplyForm, generated
from headrace.serving.routes.streams import BlockChunks, StreamBlock, typed_event
from headrace.serving.routes.text import truncation_header
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState

_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Names of the prompts that may stand for an `input_type`, the best first."""

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


errors = told_as("message")


class CohereEmbedV1Request(RequestFields):
    """POST /v1/embed."""

    model: str | None = None
    texts: Annotated[list[str], FailFast()]
    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Literal["NONE", "END"] | None = None
    timeout: Seconds | None = None

    def inputs(self, known: Sequence[str]) -> list[str] | list[PromptedText]:
        """The inputs for the engine, with a prompt for the type of input if the model has one."""
        wanted = _PROMPTS.get(self.input_type or "", ())
        return prompted(self.texts, next((name for name in wanted if name in known), None))


class CohereEmbedRequest(CohereEmbedV1Request):
    """POST /v2/embed."""

    output_dimension: Annotated[int | None, Field(ge=1)] = None
    images: None = None
    priority: int | None = None


class CohereChatRequest(RequestFields):
    """POST /v2/chat."""

    model: str
    messages: Annotated[list[JsonObject], Field(min_length=1)]
    stream: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    p: Annotated[float | None, Field(gt=0, le=1)] = None
    k: Annotated[int | None, Field(ge=0)] = None
    seed: Annotated[int | None, Field(ge=0, lt=1 << 63)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    stop_sequences: list[str] | None = None
    response_format: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    safety_mode: Literal["OFF", "NONE"] | None = None
    priority: int | None = None
    timeout: Seconds | None = None

    def request(self) -> ChatRequest:
        """The same request as OpenAI's API has it."""
        same = ("model", "stream", "max_tokens", "temperature", "seed", "timeout")
        given = fields_of(self, *same, "frequency_penalty", "presence_penalty", top_p="p", top_k="k")
        given |= {"messages": [_message(one) for one in self.messages], "stop": self.stop_sequences or None}
        if self.tools:
            given["tools"] = self.tools
        if self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice.lower()
        if self.response_format is not None:
            given["response_format"] = _format(self.response_format)
        return ChatRequest.of(given)


def _message(given: JsonObject) -> JsonObject:
    """A message as OpenAI's API has it, which tells reasoning beside the content."""
    content = given.get("content")
    if not isinstance(content, list):
        return given
    thoughts = [one for one in content if isinstance(one, dict) and one.get("type") == "thinking"]
    if not thoughts:
        return given
    thought = "\n".join(str(one.get("thinking") or "") for one in thoughts)
    return {**given, "content": [one for one in content if one not in thoughts] or None, "reasoning_content": thought}


def _format(wanted: JsonObject) -> JsonObject:
    schema = wanted.get("json_schema", wanted.get("schema"))
    if wanted.get("type") != "json_object" or schema is None:
        return wanted
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def finish_reason(answer: GeneratorAnswer) -> str:
    return {"length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}.get(answer["finish_reason"] or "", "COMPLETE")


def message(answer: GeneratorAnswer) -> JsonObject:
    calls, thought = ToolCall.all_of(answer), answer.get("reasoning")
    content = [{"type": "thinking", "thinking": thought}] if thought else []
    if answer["text"] or not calls:
        content.append({"type": "text", "text": answer["text"]})
    said: JsonObject = {"role": "assistant", "content": content}
    return {**said, "tool_calls": [one.as_openai for one in calls]} if calls else said


def usage(answer: GeneratorAnswer) -> JsonObject:
    tokens = {"input_tokens": answer["prompt_tokens"], "output_tokens": answer["completion_tokens"]}
    return {"billed_units": tokens, "tokens": tokens}


def in_type(vectors: Sequence[VectorNumbers], wanted: EmbeddingType) -> list[object]:
    """Vectors in a type of numbers. Raises RecordError: a vector holds NaN or an infinity."""
    if wanted == "float":
        return list(vectors)
    if wanted == "base64":
        return [as_base64(one) for one in vectors]
    dtype: OutputDtype = wanted
    found = quantized(np.asarray(vectors, np.float32), dtype)
    for one in found:
        if isinstance(one, RecordError):
            raise one
    return list(found)


def _embeddings(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Cohere"], responses=error_responses(errors), route_class=DirectRoute)

    async def infer(body: CohereEmbedV1Request, request: Request) -> RequestAnswers:
        texts, may_cut = body.inputs(state.service.profile.prompt_names), body.truncate != "NONE"
        return await state.infer_texts(texts, request, body.model, "texts", body.timeout, may_cut=may_cut)

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

        return await generated(state, body.request(), request, ReplyForm(whole, _CohereEvents, "messages"))

    return router


_NAMES = {"reasoning": "thinking", "text": "text"}
"""The type of a block of a content, which is the name of its field too."""


class _CohereEvents(BlockChunks):
    """The events of a message."""

    def __init__(self) -> None:
        self._id = str(uuid.uuid4())

    def begin(self) -> bytes:
        empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return typed_event("message-start", id=self._id, delta={"message": empty})

    def opened(self, block: StreamBlock) -> bytes:
        if block.call is not None:
            empty = {**block.call.as_openai, "function": {"name": block.call.name, "arguments": ""}}
            return typed_event("tool-call-start", index=block.index, delta={"message": {"tool_calls": empty}})
        name = _NAMES[block.kind]
        return typed_event("content-start", index=block.index, delta={"message": {"content": {"type": name, name: ""}}})

    def more(self, block: StreamBlock, piece: str) -> bytes:
        if block.kind == "call":
            more: JsonObject = {"tool_calls": {"function": {"arguments": piece}}}
            return typed_event("tool-call-delta", index=block.index, delta={"message": more})
        more = {"content": {_NAMES[block.kind]: piece}}
        return typed_event("content-delta", index=block.index, delta={"message": more})

    def closed(self, block: StreamBlock) -> bytes:
        return typed_event("tool-call-end" if block.kind == "call" else "content-end", index=block.index)

    def ending(self, answer: GeneratorAnswer) -> bytes:
        ending = {"finish_reason": finish_reason(answer), "usage": usage(answer)}
        return typed_event("message-end", id=self._id, delta=ending)

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:  # noqa: ARG002 - told in `ended`
        return b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        ending = {"finish_reason": "ERROR", "error": error.message}
        return typed_event("message-end", id=self._id, delta=ending) + b"data: [DONE]\n\n"


PROTOCOL = ServerProtocol(
    name="cohere",
    routers=for_outputs(vector=_embeddings, text=_chats),
    errors=errors,
    paths=("/v1/embed", "/v2/embed", "/v2/chat"),
    order=14,
)
