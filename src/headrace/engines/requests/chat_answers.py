"""How a model with a chat template is told of tools, and how its answers are taken apart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.engines.base import AnswerParts
from headrace.engines.requests.answer_parts import THINKING, AnswerReader, family_of, thinking_of
from headrace.engines.requests.chat import SYSTEM
from headrace.engines.requests.generation import GeneratedText, Request
from headrace.engines.requests.grammar_text import calls_grammar
from headrace.engines.requests.structure import Structure
from headrace.engines.requests.tools import ToolUse
from headrace.errors import RecordError
from headrace.records import Json
from headrace.wording import shown

PROMPT_END = 8
"""Tokens at the end of a prompt among which is the mark that begins reasoning."""
TEMPLATE_FIELD = "chat_template_kwargs"
_OURS = ("tools", "tokenize", "add_generation_prompt", "chat_template", "conversation")
_WORDS = """You can call these tools:
{}
To call some of them, answer with a list in JSON and nothing else: [{{"name": ..., "parameters": {{...}}}}]"""
_LIST = "json"
"""The family of a model whose template says nothing of tools, and which is told so."""


@dataclass(frozen=True, slots=True)
class ChatHabits:
    """What a chat template says of its model."""

    takes_tools: bool
    family: str | None
    """How the model writes calls; None if it is not known."""
    thinking: str | None

    @classmethod
    def of(cls, template: object, family: str | None, thinking: str | None) -> ChatHabits:
        """The habits of a model.

        Args:
            template: its chat template; None for none.
            family: of the calls; None for the one that the template shows.
            thinking: the kind of reasoning, "none" for none; None for the one that the template shows.
        """
        text = str(template or "")
        takes_tools = re.search(r"\btools\b", text) is not None
        family = family or (family_of(text) if takes_tools else _LIST)
        thinking = thinking_of(text) if thinking is None else thinking
        return cls(takes_tools, family, thinking if thinking in THINKING else None)

    def told(self, request: Request) -> Request:
        """The request, whose messages say the tools in words if the template does not.

        Raises:
            RecordError: nothing is known of how the model writes calls.
        """
        if request.tools is None or request.messages is None:
            return request
        if self.family is None:
            raise RecordError(
                "the model's chat template writes calls of tools in a way that is not known: name one that it knows "
                "(``tool_call_parser``)",
                param="tools",
            )
        return request if self.takes_tools else replace(request, messages=_spoken(request.messages, request.tools))

    def template_tools(self, request: Request) -> list[Json] | None:
        return list(request.tools.given) if request.tools is not None and self.takes_tools else None

    def check_told(self, request: Request, text: str) -> None:
        """Refuse a chat whose template leaves out its tools. Raises RecordError: it does."""
        for name in request.tools.schemas if request.tools is not None else ():
            if name not in text:
                raise RecordError(f"the model's chat template has no place for the tool {name!r}", param="tools")

    def reader(self, request: Request, end: str, key: str, *, listed: bool = False) -> AnswerReader | None:
        """Takes the answer apart; None if it is text alone.

        Args:
            key: distinguishes its calls.
            listed: whether calls that must come are a list, whatever the model's own way.
        """
        if request.messages is None or (request.tools is None and self.thinking is None):
            return None
        opened = self.thinking is not None and end.rstrip().endswith(THINKING[self.thinking][0])
        as_list = self.family is None or (listed and request.tools is not None and bool(request.tools.forced))
        return AnswerReader(request.tools, _LIST if as_list else self.family or _LIST, self.thinking, opened, key)

    def form(self, request: Request, special: Mapping[str, int]) -> Structure | None:
        """The form of the answer: that of the request, or of calls that must come.

        Args:
            request: its form may be a JSON schema if it has tools.
            special: the special tokens of the model, by their texts.

        Raises:
            RecordError: tools do not go with the form.
        """
        use, form = request.tools, request.structure
        if use is None or not (use.forced or form):
            return form
        if form is not None and form.kind != "json":
            raise RecordError(f"tools go with a JSON schema alone, not with a {form.kind}", param=form.said_in)
        grammar = calls_grammar(use, self.family or _LIST, form, special)
        return Structure("grammar", grammar, said_in="tools" if form is None else form.said_in)


def template_arguments(request: Request) -> dict[str, Json]:
    """What the request says to the chat template. Raises RecordError: it is no object, or says what the server says."""
    given: Json = request.extra.get(TEMPLATE_FIELD) or {}
    if not isinstance(given, dict) or not set(given).isdisjoint(_OURS):
        raise RecordError(
            f'{TEMPLATE_FIELD} is {shown(given)}: it must be an object, such as {{"enable_thinking": false}}, without '
            f"{', '.join(_OURS)}",
            param=TEMPLATE_FIELD,
        )
    return given


def _spoken(messages: Sequence[Mapping[str, Json]], tools: ToolUse) -> list[Mapping[str, object]]:
    """The messages with tools, calls and results in words."""
    words = _WORDS.format("\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools.given))
    first, chat = messages[0], [_plain(message) for message in messages]
    if first["role"] not in SYSTEM:
        return [{"role": "system", "content": words}, *chat]
    return [{**first, "content": f"{first['content']}\n\n{words}"}, *chat[1:]]


def _plain(message: Mapping[str, Json]) -> Mapping[str, object]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"The tool answers: {message['content']}"}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = ", ".join(f'{{"name": {json.dumps(one["name"])}, "parameters": {_json_of(one)}}}' for one in functions)
    said = f"{message['content']}\n" if message["content"] else ""
    return {"role": "assistant", "content": f"{said}[{calls}]"}


def _json_of(function: Mapping[str, Json]) -> str:
    given = function.get("arguments", {})
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def with_parts(answer: GeneratedText, parts: AnswerParts) -> GeneratedText:
    """The answer with its text, its reasoning and its calls."""
    found: GeneratedText = {**answer, "text": parts.text}
    if parts.reasoning is not None:
        found["reasoning"] = parts.reasoning
    if parts.calls is not None:
        found["tool_calls"] = [call.as_openai for call in parts.calls]
        found["tool_errors"] = list(parts.problems)
        if parts.calls and answer["finish_reason"] == "stop":
            found["finish_reason"] = "tool_calls"
    return found
