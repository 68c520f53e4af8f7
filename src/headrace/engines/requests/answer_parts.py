"""What a model writes, taken apart: its reasoning, its text, and the tools that it calls.

Models write calls in the way of their family (`FAMILIES`), as they saw it in training. The marks are read as
text: some are single tokens, which the decoded text must keep (`AnswerReader.marks`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from headrace.engines.base import AnswerParts, ToolCall
from headrace.engines.requests.tools import ToolUse
from headrace.records import Json
from headrace.wording import shown


@dataclass(frozen=True, slots=True)
class CallFamily:
    """How models of one family write calls.

    In the expressions, `head` matches up to the arguments and has the group `name`; `tail` what follows them, with
    the group `more` if another call must follow.
    """

    known_by: str
    """Matches chat templates of the family."""
    begin: str
    """Matches the beginning of a call in an answer."""
    marks: tuple[str, ...]
    """The literal texts that begin calls or stand in them, which may be single tokens."""
    head: str
    tail: str
    before: str
    """What a grammar writes before the arguments, with `{name}` in the place of the tool's name."""
    after: str = ""
    """Written after the arguments."""
    opens: str = ""
    """Written before all calls."""
    between: str = ""
    closes: str = ""
    """Written after all calls."""
    parameters: bool = False
    """Whether the arguments are elements named `parameter`, not JSON."""


_NAMED = r'\{{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*"(?:{})"\s*:\s*'
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

FAMILIES: Mapping[str, CallFamily] = {
    "qwen3_coder": CallFamily(
        known_by=r"<function=",
        begin=r"<tool_call>(?:\s*<function=)?|<function=",
        marks=("<tool_call>", "</tool_call>", "<function="),
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]*)>\s*",
        tail=r"\s*</function>(?:\s*</tool_call>)?",
        before="<tool_call>\n<function={name}>\n",
        after="</function>\n</tool_call>",
        between="\n",
        parameters=True,
    ),
    "hermes": CallFamily(
        known_by=r"<tool_call>",
        begin="<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
        head=r"<tool_call>\s*" + _NAMED.format("arguments|parameters"),
        tail=r"\s*\}\s*</tool_call>",
        before='<tool_call>\n{{"name": "{name}", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
    "mistral": CallFamily(
        known_by=r"\[TOOL_CALLS\](?![\s\S]*\[ARGS\])",
        begin=r"\[TOOL_CALLS\]",
        marks=("[TOOL_CALLS]",),
        head=r"(?:\[TOOL_CALLS\]\s*\[?\s*)?" + _NAMED.format("arguments|parameters"),
        tail=r'(?:\s*,\s*"id"\s*:\s*"[^"]*")?\s*\}\s*(?:(?P<more>,)|\])\s*',
        before='{{"name": "{name}", "arguments": ',
        after="}",
        opens="[TOOL_CALLS][",
        between=", ",
        closes="]",
    ),
    "mistral_args": CallFamily(
        known_by=r"\[TOOL_CALLS\][\s\S]*\[ARGS\]",
        begin=r"\[TOOL_CALLS\]",
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        head=r"\[TOOL_CALLS\]\s*(?P<name>[^\[{\s]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)",
        tail="",
        before="[TOOL_CALLS]{name}[ARGS]",
    ),
    "deepseek": CallFamily(
        known_by=_DEEPSEEK[1],
        begin=f"(?:{_DEEPSEEK[0]})?{_DEEPSEEK[1]}",
        marks=(*_DEEPSEEK, _DEEPSEEK[0] + _DEEPSEEK[1]),
        head=f"(?:{_DEEPSEEK[0]})?{_DEEPSEEK[1]}(?:function{_DEEPSEEK[2]}|(?!function{_DEEPSEEK[2]}))"
        f"(?P<name>[^<\n]+)(?:{_DEEPSEEK[2]}|\n```json)\\s*",
        tail=f"\\s*(?:```)?\\s*{_DEEPSEEK[3]}\\s*(?:{_DEEPSEEK[4]})?",
        before=f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}{{name}}\n```json\n",
        after=f"\n```{_DEEPSEEK[3]}",
        opens=_DEEPSEEK[0],
        between="\n",
        closes=_DEEPSEEK[4],
    ),
    "llama3_json": CallFamily(
        known_by=r'<\|python_tag\|>|"parameters": dictionary|\{\s*"name": function name, "parameters"',
        begin=r"<\|python_tag\|>|\A\s*\{",
        marks=("<|python_tag|>",),
        head=r"\s*(?:<\|python_tag\|>\s*)?" + _NAMED.format("arguments|parameters"),
        tail=r"\s*\}(?:\s*(?P<more>;)\s*)?",
        before='{{"name": "{name}", "parameters": ',
        after="}",
        between="; ",
    ),
    "json": CallFamily(
        known_by=r"(?!)",
        begin=r"\A\s*\[",
        marks=(),
        head=r"\s*\[?\s*" + _NAMED.format("arguments|parameters"),
        tail=r"\s*\}\s*(?:(?P<more>,)|\])\s*",
        before='{{"name": "{name}", "parameters": ',
        after="}",
        opens="[",
        between=", ",
        closes="]",
    ),
}
"""By the names that vLLM has for the parsers, where it has one; `json` is a list of calls, which any model can write
that is held to it."""

THINKING: Mapping[str, tuple[str, str]] = {"deepseek_r1": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""The marks around reasoning, by vLLM's names."""


def family_of(template: str) -> str | None:
    """The family whose calls a chat template writes; None if it is not known."""
    return next((name for name, family in FAMILIES.items() if re.search(family.known_by, template)), None)


def thinking_of(template: str) -> str | None:
    """The kind of reasoning that a chat template knows."""
    return next((name for name, (_, end) in THINKING.items() if end in template), None)


@dataclass(frozen=True)
class AnswerReader:
    """Takes the answers to one request apart."""

    tools: ToolUse | None = None
    family: str = "json"
    """How the model writes calls."""
    thinking: str | None = None
    """The kind of reasoning; None to leave it in the text."""
    opened: bool = False
    """Whether the prompt ends with the beginning of the reasoning."""
    key: str = ""
    """Distinguishes the ids of calls from those of other requests."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What the decoded text must keep, although it may be a special token."""
        return (() if self.tools is None else self._way.marks) + THINKING.get(self.thinking or "", ())

    def parts(self, text: str, *, ended: bool = True) -> AnswerParts:
        """The parts of an answer, or of its beginning."""
        thought = None
        if self.thinking is not None:
            thought, text = _split(text, THINKING[self.thinking], opened=self.opened, ended=ended)
        if self.tools is None:
            return AnswerParts(text, thought)
        return self._read(text, thought, ended=ended)

    def stops(self, text: str) -> bool:
        """Whether the answer ends here, with its only call."""
        return self.single and self.parts(text, ended=False).whole_calls > 0

    @cached_property
    def _way(self) -> CallFamily:
        return FAMILIES[self.family]

    @cached_property
    def _schemas(self) -> Mapping[str, Json]:
        return {} if self.tools is None else self.tools.schemas

    @property
    def single(self) -> bool:
        """Whether the answer may have one call alone."""
        return self.tools is not None and self.tools.single

    def _read(self, text: str, thought: str | None, *, ended: bool) -> AnswerParts:
        """The text and the calls; what looks like a call and is none stays in the text."""
        said: list[str] = []
        calls: list[ToolCall] = []
        problems: list[str] = []
        begin, ending = re.compile(self._way.begin), re.compile(self._way.tail)
        at, more, whole = 0, False, 0
        while at < len(text) or more:
            begun = None if more else begin.search(text, at)
            start = at if more else len(text) if begun is None else begun.start()
            said.append(text[at:start] if ended or start < len(text) else _certain(text[at:], self._way.marks))
            if start == len(text):
                break
            name, value, end = self._call(text, start, start if begun is None else begun.end())
            if name is None:
                found = begin.search(text, max(start + 1, begun.end() if begun is not None else 0))
                at, more = len(text) if found is None else found.start(), False
                if not ended and at == len(text):
                    break
                said.append(text[start:at])
                problems += self._no_call(text[start:at])
                continue
            calls.append(ToolCall(self._id(len(calls)), name, value))
            tail = None if end is None else ending.match(text, end)
            if end is None or (tail is None and not ended):
                problems += [f"the call of {name!r} is cut"] if ended else []
                break
            problems += self._problems(name, value)
            whole += 1
            more = tail is not None and tail.groupdict().get("more") is not None
            at = len(text) - len(text[end:].lstrip("} \n\t]")) if tail is None else tail.end()
        text = "".join(said)
        return AnswerParts(text.rstrip() if calls or not ended else text, thought, tuple(calls), tuple(problems), whole)

    def _call(self, text: str, start: int, after: int) -> tuple[str | None, str, int | None]:
        """The name, the arguments and their end of a call that begins at `start`, with a mark up to `after`."""
        head = re.compile(self._way.head).match(text, start)
        return self._object(text, start, after) if head is None else (head["name"], *self._arguments(text, head))

    def _no_call(self, text: str) -> list[str]:
        is_marked = any(text.startswith(mark) for mark in self._way.marks)
        return [f"what begins a call of a tool is none: {shown(text)}"] if is_marked else []

    def _arguments(self, text: str, head: re.Match[str]) -> tuple[str, int | None]:
        """The arguments after the head of a call, and where they end; None if they go on."""
        start = head.end()
        if self._way.parameters:
            end = text.find("</function>", start)
            return ("", None) if end < 0 else (self._elements(head["name"], text[start:end]), end)
        found = value_end(text, start)
        return text[start:found].rstrip() if found is None else text[start:found], found

    def _elements(self, name: str, inner: str) -> str:
        """The JSON of arguments that are elements: those that are no text by their schema are JSON each."""
        types = self._schemas.get(name, {}).get("properties", {})
        values: dict[str, Json] = {}
        for key, value in re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", inner, re.DOTALL):
            schema = types.get(key) if isinstance(types, Mapping) else None
            values[key] = value
            if not isinstance(schema, Mapping) or schema.get("type") != "string":
                try:
                    values[key] = json.loads(value)
                except (ValueError, RecursionError):
                    pass
        return json.dumps(values, ensure_ascii=False)

    def _object(self, text: str, start: int, after: int) -> tuple[str | None, str, int | None]:
        """A call as an object whose fields have another order, up to its last brace, which `tail` matches."""
        brace = text.find("{", start)
        end = None if brace < 0 or text[after:brace].strip("[ \n\t") else value_end(text, brace)
        try:
            found: Json = json.loads(text[brace:end]) if end is not None else None
        except (ValueError, RecursionError):
            found = None
        name = found.get("name") if isinstance(found, dict) else None
        if end is None or not isinstance(name, str):
            return None, "", None
        value = found.get("arguments", found.get("parameters", {}))
        return name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), end - 1

    def _problems(self, name: str, arguments: str) -> list[str]:
        if name not in self._schemas:
            return [f"the answer calls {name!r}, which is not among the tools {', '.join(self._schemas)}"]
        try:
            value, why = json.loads(arguments), "they are no object"
        except (ValueError, RecursionError) as error:
            value, why = None, str(error)
        return [] if isinstance(value, dict) else [f"the arguments of {name!r} are no JSON object: {why}"]

    def _id(self, number: int) -> str:
        """Nine letters and digits, as templates of Mistral ask for."""
        return blake2b(f"{self.key}:{number}".encode(), digest_size=5).hexdigest()[:9]


def _split(text: str, marks: tuple[str, str], *, opened: bool, ended: bool) -> tuple[str, str]:
    """The reasoning and the text after it."""
    begin, end = marks
    lead = text.lstrip()
    if lead.startswith(begin):
        lead = lead[len(begin) :]
    elif not opened:
        return "", text if ended or not begin.startswith(lead) else ""
    thought, found, rest = lead.partition(end)
    if not found and not ended:
        thought = _certain(thought, (end,))
    return thought.strip(), rest.lstrip()


def _certain(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark."""
    held = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - held]


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BETWEEN = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*"?|[^{}\[\]",\s]+|[,\s]+', re.DOTALL)


def value_end(text: str, start: int) -> int | None:
    """Where a JSON value ends that begins at `start`; None if it may go on."""
    depth = 0
    for part in _BETWEEN.finditer(text, start):
        one = part[0]
        if one in "{[":
            depth += 1
        elif one in "}]":
            depth -= 1
        elif one[0] == '"' and _STRING.fullmatch(one) is None:
            return None
        elif one[0] in ", \n\t\r":
            continue
        if depth < 0:
            return part.start()
        if depth == 0:
            return None if one[0] not in '}]"' and part.end() == len(text) else part.end()
    return None
