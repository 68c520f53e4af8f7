"""OpenAI's Responses API: /v1/responses, whole and streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.openai_responses import ResponsesRequest, message, new_head, text_part
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocols import ServerProtocol
from headrace.serving.responses_kept import KeptResponse, KeptResponses
from headrace.serving.routes.batches import tenant_of
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
        turn = await _Turn.of(state, body, request)
        chunks = _ResponsesEvents(turn)
        form = ReplyForm(lambda answers: turn.answer(answers[0]), lambda: chunks, "input", turn.keep)
        return await converse(state, body.request(turn.before), request, form)

    if (kept := state.responses) is not None:

        @router.get("/v1/responses/{response_id}")
        async def retrieve(request: Request) -> Response:
            """An answer that was kept."""
            identity = request.path_params["response_id"]
            return JsonReply((await asyncio.to_thread(kept.get, identity, tenant_of(request)))["response"])

        @router.delete("/v1/responses/{response_id}")
        async def delete(request: Request) -> Response:
            """Delete an answer that was kept."""
            identity = request.path_params["response_id"]
            await asyncio.to_thread(kept.delete, identity, tenant_of(request))
            return JsonReply({"id": identity, "object": "response", "deleted": True})

    return router


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request, and what it continues."""

    body: ResponsesRequest
    model: str
    before: Sequence[JsonObject]
    """Messages of the answers that it continues."""
    head: JsonObject
    item: str
    """The id of the message in the answer."""
    kept: KeptResponses | None
    """Where the answer is kept."""
    owner: str | None

    @classmethod
    async def of(cls, state: ServerState, body: ResponsesRequest, request: Request) -> Self:
        """The turn of a request.

        Raises:
            ApiError: 404 for an answer before it that is not kept, 400 on a server that keeps none.
        """
        kept, before, tenant = state.responses, list[JsonObject](), tenant_of(request)
        if kept is None:
            body.check_kept()
        elif (previous := body.previous_response_id) is not None:
            before = (await asyncio.to_thread(kept.get, previous, tenant, "previous_response_id"))["messages"]
        if body.store is False:
            kept = None
        head = new_head(kept=kept is not None)
        return cls(body, state.service.name, before, head, f"msg_{uuid.uuid4().hex}", kept, tenant.name)

    def answer(self, answer: GeneratorAnswer) -> JsonObject:
        """The response."""
        item = message(self.item, answer["text"], answer)
        return self.body.answer(self.model, [item], answer, self.head)

    async def keep(self, answers: Sequence[GeneratorAnswer]) -> None:
        """Keep the answer for requests that continue it."""
        if self.kept is not None:
            said: JsonObject = {"role": "assistant", "content": answers[0]["text"]}
            messages = [*self.before, *self.body.messages(), said]
            entry = KeptResponse(owner=self.owner, messages=messages, response=self.answer(answers[0]))
            await asyncio.to_thread(self.kept.keep, entry)


class _ResponsesEvents(StreamChunks):
    """The events of a response with one message of one text."""

    def __init__(self, turn: _Turn) -> None:
        self._turn = turn
        self._item = turn.item
        self._sent = 0

    def _event(self, kind: str, **content: object) -> bytes:
        found = event({"type": kind, "sequence_number": self._sent, **content}, kind)
        self._sent += 1
        return found

    def _of_text(self, kind: str, **content: object) -> bytes:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **content)

    def begin(self) -> bytes:
        """The beginning of the response, of its message and of its text."""
        begun = self._turn.body.answer(self._turn.model, [], None, self._turn.head)
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
        """The end of the text and of the message."""
        text = answer["text"]
        item = message(self._item, text, answer)
        return (
            self._of_text("response.output_text.done", text=text, logprobs=[])
            + self._of_text("response.content_part.done", part=text_part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:
        """The end of the response."""
        whole = self._turn.answer(answers[0])
        return self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: ApiError) -> bytes:
        """The event for an error."""
        told = error.body["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])


PROTOCOL = ServerProtocol(name="openai-responses", routers=_routers, order=13)
