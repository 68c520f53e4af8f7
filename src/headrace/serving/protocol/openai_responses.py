"""Requests and answers of OpenAI's Responses API."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from headrace.engines.base import ToolCall
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import BaseRequest, ChatRequest
from headrace.wording import shown

_PARTS = ("input_text", "output_text", "text")


class TextFormat(BaseModel):
    """What the text of an answer must look like."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
        given: JsonObject = {
            name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream", "timeout")
        }
        given |= {"max_tokens": self.max_output_tokens, "messages": [*self._instructed(), *before, *self.messages()]}
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

    def _instructed(self) -> list[JsonObject]:
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]

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


def new_head(*, kept: bool) -> JsonObject:
    """The id of a response, when it was made, and whether it is kept."""
    return {"id": f"resp_{uuid.uuid4().hex}", "created_at": int(datetime.now(UTC).timestamp()), "store": kept}


PartKind: TypeAlias = Literal["reasoning", "text", "call"]


def output(identity: str, answer: GeneratorAnswer) -> list[JsonObject]:
    """The items of an answer; `identity` is that of its message."""
    calls, thought = ToolCall.all_of(answer), answer.get("reasoning")
    found = [part_item(identity, "reasoning", thought)] if thought else []
    if answer["text"] or not calls:
        status = "incomplete" if answer["finish_reason"] == "length" else "completed"
        found.append({**part_item(identity, "text", answer["text"]), "status": status})
    return found + [part_item(identity, "call", one.arguments, one) for one in calls]


def part_item(identity: str, kind: PartKind, written: str | None, call: ToolCall | None = None) -> JsonObject:
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


def part(kind: PartKind, text: str) -> JsonObject:
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
