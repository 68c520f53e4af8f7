"""Answers taken apart: reasoning, text and the calls of each family of models, whole and as they grow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.engines.base import AnswerParts
from headrace.engines.requests.answer_parts import FAMILIES, AnswerReader, family_of, thinking_of, value_end
from headrace.engines.requests.tools import ToolUse, checked_tools, tools_in
from headrace.errors import RecordError

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
SAY = {"type": "function", "function": {"name": "say"}}
TOOLS = ToolUse(checked_tools([ADD, SAY]))
NAMED = {"type": "function", "function": {"name": "say"}}
OPEN, CALL, SEP, END, CLOSE = (f"<｜tool▁{name}｜>" for name in (
    "calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))  # fmt: skip
ANSWERS = {
    "hermes": (
        (
            'Hi.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "</tool_call> }\\" {"}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"x": []}, "name": "say"}\n</tool_call>'
        ),
        "Hi.",
        [("add", {"a": 1, "s": '</tool_call> }" {'}), ("say", {"x": []})],
    ),
    "llama3_json": (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "say", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("say", {})],
    ),
    "mistral": (
        'Yes[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {}}]',
        "Yes",
        [("add", {"a": 1}), ("say", {})],
    ),
    "mistral_args": (
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]say{"b": 2}',
        "",
        [("add", {"a": 1}), ("say", {"b": 2})],
    ),
    "deepseek": (
        f'So{OPEN}{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{END}\n{CALL}say{SEP}{{}}{END}{CLOSE}',
        "So",
        [("add", {"a": 1}), ("say", {})],
    ),
    "qwen3_coder": (
        (
            "Go.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n12\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=say>\n</function>\n</tool_call>"
        ),
        "Go.",
        [("add", {"a": 1, "s": "12"}), ("say", {})],
    ),
    "json": (
        '[{"name": "add", "parameters": {"a": 1}}, {"parameters": {}, "name": "say"}]',
        "",
        [("add", {"a": 1}), ("say", {})],
    ),
}


def called(parts: AnswerParts) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parts.calls or ()]


def test_each_family_has_an_example() -> None:
    assert set(ANSWERS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_whole_and_as_they_grow(family: str) -> None:
    answer, text, calls = ANSWERS[family]
    reader = AnswerReader(TOOLS, family, key="k")
    whole = reader.parts(answer)
    assert (whole.text, called(whole), whole.problems, whole.whole_calls) == (text, calls, (), len(calls))
    assert len({call.id for call in whole.calls or ()}) == len(calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in whole.calls or ())
    before = AnswerParts("", calls=())
    for length in range(len(answer) + 1):
        parts = reader.parts(answer[:length], ended=False)
        assert whole.text.startswith(parts.text)
        assert parts.text.startswith(before.text)
        assert len(parts.calls or ()) >= len(before.calls or ())
        for own, final in zip(parts.calls or (), whole.calls or (), strict=False):
            assert (own.id, own.name) == (final.id, final.name)
            assert final.arguments.startswith(own.arguments)
        before = parts
    assert len(before.calls or ()) == len(calls)


def test_arguments_are_streamed() -> None:
    parts = AnswerReader(TOOLS, "hermes").parts('<tool_call>\n{"name": "add", "arguments": {"a": [1, 2', ended=False)
    assert [(call.name, call.arguments) for call in parts.calls or ()] == [("add", '{"a": [1, 2')]
    assert parts.whole_calls == 0


@pytest.mark.parametrize(
    ("answer", "text", "calls", "problem"),
    [
        ('<tool_call>\n{"name": "ad", "arguments": {}}\n</tool_call>', "", [("ad", "{}")], "calls 'ad', which is not"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1,,}}\n</tool_call>', "", [("add", '{"a": 1,,}')], "no JSON"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "", [("add", "[1]")], "they are no object"),
        ('A <tool_call>\n{"name": "add", "arguments": {"a": 1', "A", [("add", '{"a": 1')], "'add' is cut"),
        ("A <tool_call>nonsense</tool_call> B", "A <tool_call>nonsense</tool_call> B", [], "is none"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}', "", [("add", '{"a": 1}')], None),
        ('<tool_call>\n{"name": "say"}\n</tool_call>', "", [("say", "{}")], None),
        ('Only {"a": 1} and <tool', 'Only {"a": 1} and <tool', [], None),
    ],
)
def test_what_is_wrong_is_told_and_never_lost(
    answer: str, text: str, calls: list[tuple[str, str]], problem: str | None
) -> None:
    parts = AnswerReader(TOOLS, "hermes").parts(answer)
    assert (parts.text, [(call.name, call.arguments) for call in parts.calls or ()]) == (text, calls)
    assert [problem is not None and problem in one for one in parts.problems] == [True] * (problem is not None)


def test_json_that_is_no_call_stays_text() -> None:
    assert AnswerReader(TOOLS, "llama3_json").parts('{"a": 1}') == AnswerParts('{"a": 1}', calls=())


def test_reasoning_is_apart() -> None:
    written, opened = AnswerReader(thinking="deepseek_r1"), AnswerReader(thinking="deepseek_r1", opened=True)
    assert written.parts("<think>\nso\n</think>\n\nyes") == AnswerParts("yes", "so")
    assert written.parts("yes") == AnswerParts("yes", "")
    assert written.parts("<thi", ended=False) == AnswerParts("", "")
    assert written.parts("<thi") == AnswerParts("<thi", "")
    assert opened.parts("so</thi", ended=False) == AnswerParts("", "so")
    assert opened.parts("so</think>\nyes") == AnswerParts("yes", "so")
    assert opened.parts("so, cut") == AnswerParts("", "so, cut")
    assert AnswerReader(thinking="mistral").parts("[THINK]so[/THINK]yes") == AnswerParts("yes", "so")
    both = AnswerReader(TOOLS, "hermes", "deepseek_r1", opened=True)
    parts = both.parts('so</think><tool_call>{"name": "say", "arguments": {}}</tool_call>')
    assert (parts.reasoning, called(parts)) == ("so", [("say", {})])


def test_an_answer_with_one_call_ends_with_it() -> None:
    answer = '<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'
    assert AnswerReader(ToolUse(TOOLS.given, single=True), "hermes").stops(answer)
    assert not AnswerReader(ToolUse(TOOLS.given, single=True), "hermes").stops(answer[:-1])
    assert not AnswerReader(TOOLS, "hermes").stops(answer)


@pytest.mark.parametrize(
    ("template", "family", "thinking"),
    [
        ("{{ tools }}<tool_call>{'name'}</tool_call>{{ '</think>' }}", "hermes", "deepseek_r1"),
        ("<tool_call><function=example>", "qwen3_coder", None),
        ("[TOOL_CALLS] [{", "mistral", None),
        ("[TOOL_CALLS]name[ARGS]{}[THINK][/THINK]", "mistral_args", "mistral"),
        (CALL, "deepseek", None),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("{{ messages }}", None, None),
    ],
)
def test_a_template_shows_its_family(template: str, family: str | None, thinking: str | None) -> None:
    assert (family_of(template), thinking_of(template)) == (family, thinking)


@pytest.mark.parametrize("value", ['{"a": [1, {"b": "}"}]}', '"a\\"b"', "[]", '{"a": "\\\\"}'])
def test_a_value_ends_where_it_is_whole(value: str) -> None:
    assert value_end(value + "}", 0) == len(value)
    assert all(value_end(value[:length], 0) is None for length in range(len(value)))


def test_the_choice_among_tools() -> None:
    body = {"tools": [ADD, SAY]}
    assert tools_in({}) is None
    assert tools_in(body) == TOOLS
    assert tools_in({**body, "tool_choice": "none"}) is None
    assert tools_in({"tool_choice": "none"}, TOOLS) is None
    assert tools_in({**body, "tool_choice": "required"}) == ToolUse(TOOLS.given, ("add", "say"))
    assert tools_in({**body, "tool_choice": NAMED, "parallel_tool_calls": False}) == ToolUse(
        TOOLS.given, ("say",), True
    )
    forced = ToolUse(TOOLS.given, ("say",))
    assert tools_in({}, forced) == forced
    assert tools_in({"tool_choice": "auto"}, forced) == TOOLS


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"tools": "x"}, "must be a list", "tools"),
        ({"tools": [{"type": "code"}]}, "tools.0 is", "tools.0"),
        ({"tools": [{"type": "function", "function": {}}]}, "the name None", "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "the name 'a b'", "tools.0.function.name"),
        ({"tools": [SAY, SAY]}, "two tools have the name 'say'", "tools.1.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]},
            "must be a JSON schema",
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"tools": [SAY], "tool_choice": "must"}, "it must be auto, none, required", "tool_choice"),
        (
            {"tools": [SAY], "tool_choice": {"type": "function", "function": {"name": "sya"}}},
            "not among the tools say",
            "tool_choice",
        ),
        ({"tools": [SAY], "parallel_tool_calls": 1}, "must be true or false", "parallel_tool_calls"),
    ],
)
def test_invalid_tools_are_refused_by_name(body: Any, words: str, param: str) -> None:
    with pytest.raises(RecordError) as refused:
        tools_in(body)
    assert words in str(refused.value)
    assert refused.value.param == param
