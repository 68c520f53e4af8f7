"""Anthropic's Messages API: /v1/messages, whole and streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from headrace.engines.base import ToolCall
from headrace.engines.requests.chat import ROLES
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import ChatRequest, RequestFields, Seconds, fields_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocols import ServerProtocol, for_outputs
from headrace.serving.routes.generation import ReplyForm, generated
from headrace.serving.routes.streams import BlockChunks, StreamBlock, event, typed_event
from headrace.serving.routes.tokens import on_tokenizer, tokenizing
from headrace.serving.state import ServerState
from headrace.wording import shown

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Blocks = str | list[JsonObject]


def errors(error: ApiError) -> tuple[int, JsonObject]:
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    return error.status_code, error_object(kind, error.message)


def error_object(kind: str, message: str) -> JsonObject:
    return {"type": "error", "error": {"type": kind, "message": message}}


class CountTokensRequest(RequestFields):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[JsonObject], Field(min_length=1)]
    system: Blocks | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    cache_control: JsonObject | None = None
    timeout: Seconds | None = None

    def chat(self) -> list[JsonObject]:
        """The messages as OpenAI's API has them. Raises ApiError: 400 for a block that no model here takes."""
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            message = f"thinking is {shown(self.thinking)}: no engine here takes it; leave it out"
            raise ApiError(400, message, code="invalid_value", param="thinking")
        system: list[JsonObject] = []
        if self.system:
            system = [{"role": "system", "content": _text(self.system, "system")}]
        return [*system, *(one for at, given in enumerate(self.messages) for one in _messages(given, f"messages.{at}"))]


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    stop_sequences: list[str] | None = None

    def request(self) -> ChatRequest:
        """The same request as OpenAI's API has it. Raises as `chat`."""
        return ChatRequest.of(self.chat_body())

    def chat_body(self) -> JsonObject:
        """Its body as OpenAI's API has it. Raises as `chat`."""
        given = fields_of(self, "model", "max_tokens", "stream", "timeout", "temperature", "top_p", "top_k")
        given |= {"messages": self.chat(), "stop": self.stop_sequences or None}
        if self.tools:
            given["tools"] = [_tool(one, f"tools.{at}") for at, one in enumerate(self.tools)]
        if self.tool_choice is not None:
            given["tool_choice"] = _choice(self.tool_choice)
        return given


def _role(message: JsonObject, place: str) -> object:
    """The role of a message. Raises ApiError: 400 for one that is not known, or a user who says nothing."""
    role = message.get("role")
    if role not in ROLES:
        refused = f"{place}.role is {shown(role, 40)}: known are {', '.join(ROLES)}"
        raise ApiError(400, refused, code="invalid_value", param=f"{place}.role")
    if not message.get("content") and role == "user":
        refused = f"{place}.content is empty: the user says nothing"
        raise ApiError(400, refused, code="invalid_value", param=f"{place}.content")
    return role


def _messages(message: JsonObject, place: str) -> list[JsonObject]:
    """A message as OpenAI's API has it: results of tools are messages of their own there."""
    content, role = message.get("content"), _role(message, place)
    if not isinstance(content, list):
        return [message]
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    results: list[JsonObject] = []
    thoughts: list[str] = []
    for at, block in enumerate(content):
        kind, where = block.get("type") if isinstance(block, dict) else None, f"{place}.content.{at}"
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": _url(block.get("source"), where)}})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            said = _text(block.get("content") or "", f"{where}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(str(block.get("thinking") or ""))
        else:
            known = "text, image, thinking, tool_use and tool_result"
            raise ApiError(400, f"{where} is {shown(block)}: known are {known}", code="invalid_value", param=where)
    own = {"role": role, "content": parts or None}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, own] if parts or calls or not results else results


def _text(content: object, place: str) -> str:
    """The text of a text or of a list of blocks of text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        return "\n".join(one["text"] for one in content)
    raise ApiError(400, f"{place} must be a text or blocks of text", code="invalid_value", param=place)


def _url(source: object, place: str) -> str:
    found = source if isinstance(source, dict) else {}
    if found.get("type") == "base64":
        return f"data:{found.get('media_type')};base64,{found.get('data')}"
    if isinstance(found.get("url"), str):
        return str(found["url"])
    raise ApiError(400, f"{place}.source must be base64 or a URL", code="invalid_value", param=f"{place}.source")


def _tool(tool: JsonObject, place: str) -> JsonObject:
    if "input_schema" not in tool:
        message = f"{place} is {shown(tool)}: only tools with input_schema are known"
        raise ApiError(400, message, code="invalid_value", param=place)
    function: JsonObject = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(choice: JsonObject) -> object:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        message = f"tool_choice is {shown(choice)}: its type must be auto, any, tool or none"
        raise ApiError(400, message, code="invalid_value", param="tool_choice")
    return "required" if kind == "any" else kind


def message_object(identity: str, model: str, content: Sequence[JsonObject], tokens: JsonObject) -> JsonObject:
    """A message that has not ended."""
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": tokens,
    }


def answered(identity: str, model: str, answer: GeneratorAnswer) -> JsonObject:
    """The message of an answer."""
    message = message_object(identity, model, content(answer), usage([answer]))
    return {**message, "stop_reason": stop_reason(answer)}


def content(answer: GeneratorAnswer) -> list[JsonObject]:
    calls, thought = ToolCall.all_of(answer), answer.get("reasoning")
    found: list[JsonObject] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    if answer["text"] or not calls:
        found.append({"type": "text", "text": answer["text"]})
    return found + [{"type": "tool_use", "id": one.id, "name": one.name, "input": one.value} for one in calls]


def stop_reason(answer: GeneratorAnswer) -> Literal["end_turn", "max_tokens", "tool_use"]:
    if answer["finish_reason"] == "length":
        return "max_tokens"
    return "tool_use" if answer["finish_reason"] == "tool_calls" else "end_turn"


def usage(answers: Sequence[GeneratorAnswer]) -> JsonObject:
    """The tokens of an answer, or none before it is there."""
    for answer in answers:
        cached = answer.get("cached_tokens", 0)
        return {
            "input_tokens": answer["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": answer["completion_tokens"],
        }
    return {"input_tokens": 0, "output_tokens": 0}


def _router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], responses=error_responses(errors), route_class=DirectRoute)

    @router.post("/v1/messages", responses={200: {"content": {"text/event-stream": {}}}})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a chat."""
        name = state.service.model.named(body.model)

        def whole(answers: Sequence[GeneratorAnswer]) -> JsonObject:
            return answered(_new_id(), name, answers[0])

        form = ReplyForm(whole, lambda: _AnthropicEvents(name), "messages")
        return await generated(state, body.request(), request, form)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a chat."""
        state.check_model(body.model)
        chat = body.chat()
        state.check_messages(chat)
        count = partial(tokenizing(state).tokenize, add_special_tokens=False)
        return JsonReply({"input_tokens": len(await on_tokenizer(state, count, chat, "messages", request))})

    return router


def _new_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


_DELTAS = {
    "reasoning": ("thinking", "thinking_delta"),
    "text": ("text", "text_delta"),
    "call": ("partial_json", "input_json_delta"),
}
"""The field and the type of more of a block."""


class _AnthropicEvents(BlockChunks):
    """The events of a message. What its prompt costs is known at its end."""

    def __init__(self, model: str) -> None:
        self._model = model

    def begin(self) -> bytes:
        return typed_event(
            "message_start", message=message_object(_new_id(), self._model, [], usage(()))
        ) + typed_event("ping")

    def opened(self, block: StreamBlock) -> bytes:
        empty: JsonObject = {"type": "text", "text": ""}
        if block.call is not None:
            empty = {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
        elif block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        return typed_event("content_block_start", index=block.index, content_block=empty)

    def more(self, block: StreamBlock, piece: str) -> bytes:
        name, kind = _DELTAS[block.kind]
        return typed_event("content_block_delta", index=block.index, delta={"type": kind, name: piece})

    def closed(self, block: StreamBlock) -> bytes:
        return typed_event("content_block_stop", index=block.index)

    def ending(self, answer: GeneratorAnswer) -> bytes:
        reason = {"stop_reason": stop_reason(answer), "stop_sequence": None}
        return typed_event("message_delta", delta=reason, usage=usage([answer]))

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:  # noqa: ARG002 - told in `ended`
        return typed_event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return event(errors(error)[1], "error")


PROTOCOL = ServerProtocol(
    name="anthropic", routers=for_outputs(text=_router), errors=errors, paths=("/v1/messages",), order=12
)
