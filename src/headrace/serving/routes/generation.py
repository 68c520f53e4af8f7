"""OpenAI's completions and chat completions, with and without streaming."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from headrace.engines.base import ToolCall
from headrace.openai_protocol import (
    GeneratorAnswer,
    chat_completion,
    chat_logprobs,
    choice,
    completion,
    completion_logprobs,
    reasoning_fields,
)
from headrace.records import JsonObject
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.asked import generation
from headrace.serving.protocol.requests import ChatRequest, CompletionRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, ChatCompletion, Completion
from headrace.serving.routes.streams import EventStream, OpenAIChunks, StreamChunks
from headrace.serving.state import ServerState

_STREAM: dict[int | str, JsonObject] = {
    200: {"content": {"text/event-stream": {}}, "description": "The response, or its chunks with `stream`."}
}


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @routes.post("/v1/completions", response_model=Completion, responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete each prompt."""
        name = state.service.model.named(body.model)
        whole = lambda answers: {**_head("cmpl", name), **completion(answers, body.choices)}  # noqa: E731
        return await generated(state, body, request, ReplyForm(whole, lambda: _CompletionChunks(name, body), "prompt"))

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a chat."""
        name = state.service.model.named(body.model)
        whole = lambda answers: {**_head("chatcmpl", name), **chat_completion(answers)}  # noqa: E731
        return await generated(state, body, request, ReplyForm(whole, lambda: _ChatChunks(name, body), "messages"))

    return routes


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a protocol writes the answers to a request."""

    whole: Callable[[Sequence[GeneratorAnswer]], object]
    """Gives the body of an answer that is not streamed."""
    chunks: Callable[[], StreamChunks]
    """Makes what writes a stream."""
    param: str
    """The field that holds the prompts or the messages."""
    kept: Callable[[Sequence[GeneratorAnswer]], Awaitable[None]] | None = None
    """Keeps the answers before they are sent whole, or before the end of a stream."""


async def generated(
    state: ServerState, body: CompletionRequest | ChatRequest, request: Request, form: ReplyForm
) -> Response:
    """Complete the prompts, or continue the chat, of a request of any protocol."""
    state.check_model(body.model)
    asked = generation(state, body, form.param)
    call = state.call(request, body.timeout, form.param)
    if body.stream:
        return EventStream(state.service, asked.values, asked.size, call, form.chunks(), form.kept)
    answers = (await state.service.infer(asked.values, asked.size, call)).outputs
    if form.kept is not None:
        await form.kept(answers)
    return JsonReply(form.whole(answers))


def _head(prefix: str, model: str) -> JsonObject:
    created = int(datetime.now(UTC).timestamp())
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": created, "model": model}


class _CompletionChunks(OpenAIChunks):
    """The chunks of /v1/completions."""

    def __init__(self, model: str, body: CompletionRequest) -> None:
        super().__init__({**_head("cmpl", model), "object": "text_completion"}, body)

    def choice(self, index: int, text: str, answer: GeneratorAnswer | None = None) -> JsonObject:
        logprobs = None if answer is None else completion_logprobs(answer)
        return choice(index, text=text, finish=answer and answer["finish_reason"], logprobs=logprobs)


class _ChatChunks(OpenAIChunks):
    """The chunks of /v1/chat/completions. The first of each choice holds the role."""

    def __init__(self, model: str, body: ChatRequest) -> None:
        super().__init__({**_head("chatcmpl", model), "object": "chat.completion.chunk"}, body)
        self._started: set[int] = set()

    def choice(self, index: int, text: str, answer: GeneratorAnswer | None = None) -> JsonObject:
        delta: JsonObject = {"content": text} if text or index not in self._started else {}
        logprobs = None if answer is None else chat_logprobs(answer)
        finish = answer and answer["finish_reason"]
        return choice(index, delta=self._begun(index, delta), finish=finish, logprobs=logprobs)

    def _begun(self, index: int, delta: JsonObject) -> JsonObject:
        if index in self._started:
            return delta
        self._started.add(index)
        return {"role": "assistant", **delta}

    def thought(self, index: int, text: str) -> bytes:
        return self.further(index, self._begun(index, reasoning_fields(text)))

    def called(self, index: int, number: int, call: ToolCall | None, arguments: str) -> bytes:
        function = {"arguments": arguments} if call is None else {"name": call.name, "arguments": arguments}
        begins = {} if call is None else {"id": call.id, "type": "function"}
        return self.further(
            index, self._begun(index, {"tool_calls": [{"index": number, **begins, "function": function}]})
        )
