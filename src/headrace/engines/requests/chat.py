"""Chat messages: validation, joining of text parts, and rendering with a model's chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from headrace.errors import HeadraceError, RecordError, model_code
from headrace.records import Json
from headrace.wording import shown

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")
TEXT_ONLY = frozenset({"text"})
"""The content part types that a text-only model takes."""
_DROPPED = frozenset({"content", "tool_errors"})
"""What is read apart, and what our own answers tell beside what the model said."""
_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking"}
)


def checked_messages(messages: Sequence[object], parts: Collection[str] = TEXT_ONLY) -> list[Mapping[str, object]]:
    """The messages without empty fields. Content that consists only of text parts is joined by newlines.

    Args:
        parts: the content part types that the model takes.

    Raises:
        RecordError: there is no message, a role or content is missing, or a role, field or part is not supported. Its
            `param` is the location, such as `messages.0.content.1`.
    """
    if not messages:
        raise RecordError("the chat has no message; there is nothing to answer", param="messages")
    return [_checked(message, number, parts) for number, message in enumerate(messages)]


def _checked(message: object, number: int, parts: Collection[str]) -> Mapping[str, object]:
    place = f"messages.{number}"
    if not isinstance(message, dict) or "role" not in message:
        raise RecordError(
            f"message {number} is {shown(message)}: it must be an object with role and content", param=place
        )
    role = message["role"]
    if role not in ROLES:
        raise RecordError(
            f"message {number} has the role {shown(role, 40)}; known: {', '.join(ROLES)}", param=f"{place}.role"
        )
    given = {name: value for name, value in message.items() if value not in (None, [], {}) and name not in _DROPPED}
    for name in given:
        if name not in _FIELDS or (name == "tool_calls" and role != "assistant"):
            raise RecordError(
                f"message {number} ({role}) has the field {shown(name)}, which no model here takes; remove it",
                param=f"{place}.{name}",
            )
    if not isinstance(given.get("name", ""), str):
        raise RecordError(
            f"message {number} has the name {shown(given['name'], 40)}: it must be text", param=f"{place}.name"
        )
    _check_calls(given.get("tool_calls", []), number)
    content = _content(message.get("content"), number, parts)
    if (content is None and role != "assistant") or (not content and role == "user"):
        raise RecordError(f"message {number} ({role}) has no content", param=f"{place}.content")
    return {"role": role, "content": content or "", **given}


def _content(content: object, number: int, parts: Collection[str]) -> object:
    """The content as text, as a list of parts if some are not text, or None if there is none."""
    if content is None or isinstance(content, str):
        return content
    place = f"messages.{number}.content"
    if not isinstance(content, list):
        raise RecordError(
            f"message {number} has a content of type {type(content).__name__}: it must be text or a list of parts",
            param=place,
        )
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RecordError(
                f"part {index} of message {number} is {shown(part)}: it must be an object with a type, such as "
                '{"type": "text", "text": "..."}',
                param=f"{place}.{index}",
            )
        if kind not in parts:
            raise RecordError(
                f"part {index} of message {number} is of type {shown(kind, 40)}; this model takes "
                f"{', '.join(sorted(parts))}",
                param=f"{place}.{index}",
            )
        if kind == "text" and not isinstance(part.get("text"), str):
            raise RecordError(
                f"part {index} of message {number} has no text: {shown(part)}", param=f"{place}.{index}.text"
            )
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _check_calls(calls: object, number: int) -> None:
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError(
                f"tool call {index} of message {number} is {shown(call)}: it must have a function with a name",
                param=f"messages.{number}.tool_calls.{index}",
            )


def messages_of(examples: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """The messages of examples, each of which is a message, or a user's text with its answer.

    Raises:
        RecordError: one is neither.
    """
    found: list[object] = []
    for number, one in enumerate(examples):
        if set(one) == {"text", "answer"}:
            found += [{"role": "user", "content": one["text"]}, {"role": "assistant", "content": one["answer"]}]
        elif "role" in one:
            found.append(one)
        else:
            raise RecordError(
                f'number {number} is {shown(one)}: it must be {{"text": ..., "answer": ...}} or a message'
            )
    return checked_messages(found) if found else []


def with_more(
    messages: Sequence[Mapping[str, object]], system_prompt: str | None, examples: Sequence[Mapping[str, object]]
) -> Sequence[Mapping[str, object]]:
    """The messages with the system's before them, and the examples after the system's."""
    if system_prompt and messages[0]["role"] not in SYSTEM:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    first = messages[:1] if messages[0]["role"] in SYSTEM else []
    return [*first, *examples, *messages[len(first) :]]


def with_known_roles(messages: Sequence[Mapping[str, object]], template: str) -> list[Mapping[str, object]]:
    """The messages with role `developer` replaced by `system` if the template does not support it."""
    if "developer" in template:
        return list(messages)
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def rendered(
    messages: Sequence[Mapping[str, object]], template: str, render: Callable[[list[Mapping[str, object]]], str]
) -> str:
    """Render checked messages with a chat template.

    Raises:
        RecordError: the template drops a field of a message.
        Exception: from `render`.
    """
    chat = list(_with_arguments(with_known_roles(messages, template)))
    text = render(chat)
    doubtful = [
        (number, name)
        for number, message in enumerate(chat)
        for name, value in message.items()
        if _says_something(message, name) and not (name == "content" and str(value).strip() in text)
    ]
    lost = _lost(chat, doubtful, render) if doubtful else None
    if lost is not None:
        number, name = lost
        raise RecordError(
            f"the model's chat template has no place for the {name} of message {number} ({chat[number]['role']}); "
            "remove it",
            param=f"messages.{number}.{name}",
        )
    return text


def _says_something(message: Mapping[str, object], name: str) -> bool:
    if name == "name":
        return bool(message["role"] != "tool")  # a tool message repeats the name of its call
    return name in ("content", "tool_calls")


def _lost(
    chat: Sequence[Mapping[str, object]],
    fields: Sequence[tuple[int, str]],
    render: Callable[[list[Mapping[str, object]]], str],
) -> tuple[int, str] | None:
    """The first of `fields` that the template drops: each field is replaced by a random mark to find in the output."""
    marks = [secrets.token_hex(8) for _ in fields]
    marked: list[dict[str, Json]] = [dict(message) for message in chat]
    for (number, name), mark in zip(fields, marks, strict=True):
        if name == "tool_calls":
            first, *others = marked[number][name]
            marked[number][name] = [{**first, "function": {**first["function"], "name": mark}}, *others]
        elif marked[number][name]:
            marked[number][name] = mark
    try:
        with model_code():
            text = render(list(marked)).lower()
    except HeadraceError:  # a template that rejects a mark has read the field
        return None
    missing = (
        field for field, mark in zip(fields, marks, strict=True) if chat[field[0]][field[1]] and mark not in text
    )
    return next(missing, None)


def _with_arguments(messages: Sequence[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """Parse JSON arguments of tool calls: OpenAI's API sends them as text, and templates expect objects."""
    for message in messages:
        if "tool_calls" not in message:
            yield message
            continue
        calls: Json = message["tool_calls"]
        yield {**message, "tool_calls": [{**call, "function": _parsed(call["function"])} for call in calls]}


def _parsed(function: Mapping[str, object]) -> Mapping[str, object]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": json.loads(arguments or "{}")}
    except (ValueError, RecursionError):
        return function
