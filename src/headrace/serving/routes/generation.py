"""OpenAI's completions and chat completions, whole or as a stream."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from headrace.openai_protocol import chat_completion, choice, completion
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import ChatRequest, CompletionRequest, texts_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, ChatCompletion, Completion
from headrace.serving.routes.streams import Chunks, EventStream
from headrace.serving.state import ServerState

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or with `stream` its chunks."}
}


def router(host: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @routes.post("/v1/completions", response_model=Completion, responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """What follows each prompt."""
        host.check_model(body.model)
        prompts = texts_of(body.prompt)
        size = host.check_texts(prompts, "prompt") + len(prompts) * host.answer_cost(body.most_tokens)
        records = [body.asked(prompt=prompt) for prompt in prompts]
        call = host.call(request, body.timeout, "prompt")
        if body.stream:
            return EventStream(host.service, records, size, call, _CompletionChunks(host.service.name, body))
        answers = (await host.service.infer(records, size, call)).outputs
        return JsonReply({**_head("cmpl", host.service.name), **completion(answers)})

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """The assistant's next message."""
        host.check_model(body.model)
        size = host.check_messages(body.messages) + host.answer_cost(body.most_tokens)
        record = body.asked(messages=body.messages)
        call = host.call(request, body.timeout, "messages")
        if body.stream:
            return EventStream(host.service, [record], size, call, _ChatChunks(host.service.name, body))
        [answer] = (await host.service.infer([record], size, call)).outputs
        return JsonReply({**_head("chatcmpl", host.service.name), **chat_completion(answer)})

    return routes


def _head(prefix: str, model: str) -> dict[str, Any]:
    created = int(datetime.now(UTC).timestamp())
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": created, "model": model}


class _CompletionChunks(Chunks):
    """The chunks of /v1/completions."""

    def __init__(self, model: str, body: CompletionRequest) -> None:
        super().__init__({**_head("cmpl", model), "object": "text_completion"}, body.wants_usage)

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A piece of one prompt's answer."""
        return choice(index, text=text, finish=finish_reason)


class _ChatChunks(Chunks):
    """The chunks of /v1/chat/completions: the first says who speaks."""

    def __init__(self, model: str, body: ChatRequest) -> None:
        super().__init__({**_head("chatcmpl", model), "object": "chat.completion.chunk"}, body.wants_usage)
        self._begun = False

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A piece of the message."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if not self._begun:
            self._begun, delta = True, {"role": "assistant", "content": text}
        return choice(index, delta=delta, finish=finish_reason)
