"""OpenAI's Responses API: /v1/responses, whole and streamed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.openai_responses import ResponsesRequest, message, new_head, text_part
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.generation import ReplyForm, converse
from headrace.serving.routes.streams import StreamChunks, event
from headrace.serving.state import ServerState


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "text":
        yield _router(state)


def _router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/responses", responses={200: {"content": {"text/event-stream": {}}}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        name = state.service.name

        def whole(answers: Sequence[GeneratorAnswer]) -> JsonObject:
            [answer] = answers
            item = message(_identity(), answer["text"], answer)
            return body.answer(name, [item], answer, new_head())

        form = ReplyForm(whole, lambda: _ResponsesEvents(body, name), "input")
        return await converse(state, body.request(), request, form)

    return router


def _identity() -> str:
    return f"msg_{uuid.uuid4().hex}"


class _ResponsesEvents(StreamChunks):
    """The events of a response with one message of one text."""

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        self._body = body
        self._model = model
        self._head = new_head()
        self._item = _identity()
        self._sent = 0

    def _event(self, kind: str, **content: object) -> bytes:
        found = event({"type": kind, "sequence_number": self._sent, **content}, kind)
        self._sent += 1
        return found

    def _of_text(self, kind: str, **content: object) -> bytes:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **content)

    def begin(self) -> bytes:
        """The beginning of the response, of its message and of its text."""
        begun = self._body.answer(self._model, [], None, self._head)
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=message(self._item, None, None))
            + self._of_text("response.content_part.added", part=text_part(""))
        )

    def delta(self, index: int, text: str) -> bytes:  # noqa: ARG002 - one record
        """The event for more text."""
        return self._of_text("response.output_text.delta", delta=text, logprobs=[])

    def ended(self, index: int, answer: GeneratorAnswer) -> bytes:  # noqa: ARG002 - one record
        """The end of the text, of the message and of the response."""
        text = answer["text"]
        item = message(self._item, text, answer)
        whole = self._body.answer(self._model, [item], answer, self._head)
        return (
            self._of_text("response.output_text.done", text=text, logprobs=[])
            + self._of_text("response.content_part.done", part=text_part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def failure(self, error: ApiError) -> bytes:
        """The event for an error."""
        told = error.body["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])


PROTOCOL = ServerProtocol(name="openai-responses", routers=_routers, order=13)
