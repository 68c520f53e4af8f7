"""OpenAI's Responses API: /v1/responses, whole and streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field

from headrace.engines.base import ToolCall
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import BaseRequest, ChatRequest, StrictFields, fields_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocols import ServerProtocol, for_outputs
from headrace.serving.response_store import KeptResponse, KeptResponses
from headrace.serving.routes.batches import tenant_of
from headrace.serving.routes.generation import ReplyForm, generated
from headrace.serving.routes.streams import BlockChunks, BlockKind, StreamBlock, typed_event
from headrace.serving.state import ServerState
from headrace.wording import shown

_PARTS = ("input_text", "output_text", "text")


class TextFormat(StrictFields):
    """What the text of an answer must look like."""

    format: JsonObject | None = None
    verbosity: Literal["medium"] | None = None

    def response_format(self) -> JsonObject | None:
        """The same as chat completions have it."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        return {
            "type": "json_schema",
            "json_schema": {name: self.format[name] for name in self.format if name != "type"},
        }


class ResponsesRequest(BaseRequest):
    """POST /v1/responses."""

    input: str | list[JsonObject]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stream: bool | None = None
    store: Annotated[
        bool | None, Field(description="False keeps nothing; only a server with a state folder keeps.")
    ] = None
    previous_response_id: Annotated[str | None, Field(description="Of an answer that was kept: goes on from it.")] = (
        None
    )
    text: TextFormat | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: JsonObject | None = None
    include: Annotated[list[str] | None, Field(max_length=0)] = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    metadata: dict[str, str] | None = None
    stream_options: JsonObject | None = None
    prompt_cache_key: str | None = None

    def check_kept(self) -> None:
        """Raise 400 for what needs a server that keeps answers."""
        for name in ("previous_response_id", "store"):
            if getattr(self, name):
                message = f"{name}: this server keeps no answers; start it with ``state=DIR``, or send all as input"
                raise ApiError(400, message, code="invalid_value", param=name)

    def request(self, before: Sequence[JsonObject] = ()) -> ChatRequest:
        """The same request as a chat completion.

        Args:
            before: messages of the answers that this request continues.

        Raises:
            ApiError: 400 for an item that no model here takes.
        """
        given = fields_of(self, "model", "temperature", "top_p", "stream", "timeout", max_tokens="max_output_tokens")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        given["messages"] = [*system, *before, *self.messages()]
        if self.text is not None and (wanted := self.text.response_format()) is not None:
            given["response_format"] = wanted
        if self.tools:
            given["tools"] = [_tool(one, f"tools.{at}") for at, one in enumerate(self.tools)]
        if self.tool_choice is not None:
            given["tool_choice"] = _choice(self.tool_choice)
        effort = None if self.reasoning is None else self.reasoning.get("effort")
        if effort is not None:
            given["reasoning_effort"] = effort
        return ChatRequest.of(given)

    def messages(self) -> list[JsonObject]:
        """What the input adds to the conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [one for at, item in enumerate(self.input) for one in _messages(item, f"input.{at}")]

    def answer(
        self, model: str, output: Sequence[JsonObject], answer: GeneratorAnswer | None, head: JsonObject
    ) -> JsonObject:
        """The response with its output; without an answer, one that is under way."""
        cut = answer is not None and answer["finish_reason"] == "length"
        return {
            **head,
            "object": "response",
            "status": "in_progress" if answer is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": model,
            "output": output,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "temperature": self.temperature,
            "text": {"format": {"type": "text"} if self.text is None else self.text.format or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": None if answer is None else _usage(answer),
            "user": self.user,
        }


def output(identity: str, answer: GeneratorAnswer) -> list[JsonObject]:
    """The items of an answer; `identity` is that of its message."""
    calls, thought = ToolCall.all_of(answer), answer.get("reasoning")
    found = [part_item(identity, "reasoning", thought)] if thought else []
    if answer["text"] or not calls:
        status = "incomplete" if answer["finish_reason"] == "length" else "completed"
        found.append({**part_item(identity, "text", answer["text"]), "status": status})
    return found + [part_item(identity, "call", one.arguments, one) for one in calls]


def part_item(identity: str, kind: BlockKind, written: str | None, call: ToolCall | None = None) -> JsonObject:
    """The item with a part of an answer; without what is written, as it begins."""
    status = "in_progress" if written is None else "completed"
    if call is not None:
        called: JsonObject = {"call_id": call.id, "name": call.name, "arguments": written or ""}
        return {"id": f"fc_{call.id}", "type": "function_call", "status": status, **called}
    content = [] if written is None else [part(kind, written)]
    if kind == "reasoning":
        own = {"id": identity.replace("msg_", "rs_"), "type": "reasoning", "summary": []}
    else:
        own = {"id": identity, "type": "message", "role": "assistant"}
    return {**own, "status": status, "content": content}


def part(kind: BlockKind, text: str) -> JsonObject:
    """The part of an item with its text."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(answer: GeneratorAnswer) -> JsonObject:
    read, made = answer["prompt_tokens"], answer["completion_tokens"]
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": answer.get("cached_tokens", 0)},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + made,
    }


def _messages(item: JsonObject, place: str) -> list[JsonObject]:
    """An item of the input as messages."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = [_part(one, f"{place}.content.{at}") for at, one in enumerate(content)]
        return [{"role": item.get("role"), "content": content}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}]
    if kind == "reasoning":  # of an answer that is continued: templates leave out what was thought before
        return []
    raise _unknown(item, place, "message, reasoning, function_call and function_call_output")


def _part(part: object, place: str) -> JsonObject:
    found = part if isinstance(part, dict) else {}
    kind = found.get("type")
    if kind in _PARTS:
        return {"type": "text", "text": found.get("text")}
    if kind == "input_image" and isinstance(found.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": found["image_url"]}}
    raise _unknown(part, place, "input_text, output_text and input_image with image_url")


def _unknown(given: object, place: str, known: str) -> ApiError:
    return ApiError(400, f"{place} is {shown(given)}: known are {known}", code="invalid_value", param=place)


def _tool(tool: JsonObject, place: str) -> JsonObject:
    if tool.get("type") != "function":
        raise _unknown(tool, place, "tools of type function")
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _choice(choice: str | JsonObject) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=DirectRoute)

    @router.post("/v1/responses", responses={200: {"content": {"text/event-stream": {}}}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        turn = await _Turn.of(state, body, request)
        chunks = _ResponsesEvents(turn)
        form = ReplyForm(lambda answers: turn.answer(answers[0]), lambda: chunks, "input", turn.keep)
        return await generated(state, body.request(turn.before), request, form)

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
        made_at = int(datetime.now(UTC).timestamp())
        head = {"id": f"resp_{uuid.uuid4().hex}", "created_at": made_at, "store": kept is not None}
        name = state.service.model.named(body.model)
        return cls(body, name, before, head, f"msg_{uuid.uuid4().hex}", kept, tenant.name)

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
        self._sent += 1
        return typed_event(kind, sequence_number=self._sent - 1, **content)

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


PROTOCOL = ServerProtocol(name="openai-responses", routers=for_outputs(text=_router), order=13)
