"""OpenAI's Responses API: /v1/responses, whole and streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from fastapi import APIRouter, Request, Response

from headrace.engines.base import ToolCall
from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.openai_responses import ResponsesRequest, new_head, output, part, part_item
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocols import ServerProtocol
from headrace.serving.responses_kept import KeptResponse, KeptResponses
from headrace.serving.routes.batches import tenant_of
from headrace.serving.routes.generation import ReplyForm, converse
from headrace.serving.routes.streams import BlockChunks, StreamBlock, event
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
        return self.body.answer(self.model, output(self.item, answer), answer, self.head)

    async def keep(self, answers: Sequence[GeneratorAnswer]) -> None:
        if self.kept is not None:
            [answer] = answers
            said: JsonObject = {"role": "assistant", "content": answer["text"]}
            if calls := ToolCall.all_of(answer):
                said |= {"tool_calls": [one.as_openai for one in calls]}
            messages = [*self.before, *self.body.messages(), said]
            entry = KeptResponse(owner=self.owner, messages=messages, response=self.answer(answer))
            await asyncio.to_thread(self.kept.keep, entry)


_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""What the events of a block are called."""


class _ResponsesEvents(BlockChunks):
    """The events of a response, each of whose blocks is an item with one part."""

    def __init__(self, turn: _Turn) -> None:
        self._turn = turn
        self._sent = 0

    def _event(self, kind: str, **content: object) -> bytes:
        found = event({"type": kind, "sequence_number": self._sent, **content}, kind)
        self._sent += 1
        return found

    def _of(self, block: StreamBlock, kind: str, **content: object) -> bytes:
        place: JsonObject = {} if block.kind == "call" else {"content_index": 0}
        item = part_item(self._turn.item, block.kind, None, block.call)["id"]
        return self._event(kind, item_id=item, output_index=block.index, **place, **content)

    def begin(self) -> bytes:
        begun = self._turn.body.answer(self._turn.model, [], None, self._turn.head)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def opened(self, block: StreamBlock) -> bytes:
        item = part_item(self._turn.item, block.kind, None, block.call)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._of(block, "response.content_part.added", part=part(block.kind, ""))

    def more(self, block: StreamBlock, piece: str) -> bytes:
        extra: JsonObject = {"logprobs": []} if block.kind == "text" else {}
        return self._of(block, f"response.{_EVENTS[block.kind]}.delta", delta=piece, **extra)

    def closed(self, block: StreamBlock) -> bytes:
        if block.kind == "call":
            done = self._of(block, "response.function_call_arguments.done", arguments=block.written)
        else:
            extra: JsonObject = {"logprobs": []} if block.kind == "text" else {}
            done = self._of(block, f"response.{_EVENTS[block.kind]}.done", text=block.written, **extra)
            done += self._of(block, "response.content_part.done", part=part(block.kind, block.written))
        return done + self._event(
            "response.output_item.done",
            output_index=block.index,
            item=part_item(self._turn.item, block.kind, block.written, block.call),
        )

    def ending(self, answer: GeneratorAnswer) -> bytes:  # noqa: ARG002 - told in `finish`
        """Nothing, before the answer is kept."""
        return b""

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:
        whole = self._turn.answer(answers[0])
        return self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: ApiError) -> bytes:
        told = error.body["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])


PROTOCOL = ServerProtocol(name="openai-responses", routers=_routers, order=13)
