"""Anthropic's Messages API: /v1/messages, whole and streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.errors import RecordError
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, api_error
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    answered,
    errors,
    message_object,
    stop_reason,
    usage,
)
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.generation import ReplyForm, converse
from headrace.serving.routes.streams import BlockChunks, StreamBlock, event
from headrace.serving.routes.tokens import tokenizing
from headrace.serving.state import ServerState


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "text":
        yield _router(state)


def _router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], responses=error_responses(errors), route_class=DirectRoute)

    @router.post("/v1/messages", responses={200: {"content": {"text/event-stream": {}}}})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a chat."""
        name = state.service.name

        def whole(answers: Sequence[GeneratorAnswer]) -> JsonObject:
            return answered(_new_id(), name, answers[0])

        form = ReplyForm(whole, lambda: _AnthropicEvents(name), "messages")
        return await converse(state, body.request(), request, form)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a chat."""
        state.check_model(body.model)
        chat = body.chat()
        state.check_messages(chat)
        count = partial(tokenizing(state).tokenize, add_special_tokens=False)
        try:
            return JsonReply({"input_tokens": len(await state.service.on_thread(count, chat))})
        except RecordError as error:
            raise api_error(error, "messages", request.scope["headrace_request_id"]) from error

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
        return _event("message_start", message=message_object(_new_id(), self._model, [], usage(()))) + _event("ping")

    def opened(self, block: StreamBlock) -> bytes:
        empty: JsonObject = {"type": "text", "text": ""}
        if block.call is not None:
            empty = {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
        elif block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        return _event("content_block_start", index=block.index, content_block=empty)

    def more(self, block: StreamBlock, piece: str) -> bytes:
        name, kind = _DELTAS[block.kind]
        return _event("content_block_delta", index=block.index, delta={"type": kind, name: piece})

    def closed(self, block: StreamBlock) -> bytes:
        return _event("content_block_stop", index=block.index)

    def ending(self, answer: GeneratorAnswer) -> bytes:
        reason = {"stop_reason": stop_reason(answer), "stop_sequence": None}
        return _event("message_delta", delta=reason, usage=usage([answer]))

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:  # noqa: ARG002 - told in `ended`
        return _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return event(errors(error)[1], "error")


def _event(kind: str, **content: object) -> bytes:
    return event({"type": kind, **content}, kind)


PROTOCOL = ServerProtocol(name="anthropic", routers=_routers, errors=errors, paths=("/v1/messages",), order=12)
