"""Chats: content parts, roles and fields, and what a chat template leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.engines.requests.chat import checked_messages, rendered, with_known_roles
from headrace.engines.requests.generation import Sampling, meaningful, parse
from headrace.errors import RecordError

PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}{% endfor %}"


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def chat_of(*messages: dict[str, Any]) -> list[Mapping[str, Any]]:
    return checked_messages(list(messages))


def render(template: str) -> Callable[[Any], str]:
    compiled = ImmutableSandboxedEnvironment().from_string(template)
    return lambda messages: compiled.render(messages=[dict(message) for message in messages])


@given(st.lists(st.text(), min_size=1))
def test_text_parts_are_the_text_that_they_hold(texts: list[str]) -> None:
    joined = "\n".join(texts)
    if joined:
        assert chat_of({"role": "user", "content": text(*texts)}) == chat_of({"role": "user", "content": joined})
    assert parse([{"role": "system", "content": text(*texts)}], Sampling()).messages == [
        {"role": "system", "content": joined}
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.1.content.0"),
        ({"content": [*text("a"), {"type": "input_audio", "input_audio": {}}]}, "messages.1.content.1"),
        ({"content": [{"type": "file", "file": {}}]}, "messages.1.content.0"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "messages.1.content.0"),
        ({"content": [{"type": "text", "text": 5}]}, "messages.1.content.0.text"),
        ({"content": [{"text": "a"}]}, "messages.1.content.0"),
        ({"content": ["a"]}, "messages.1.content.0"),
        ({"content": {"type": "text", "text": "a"}}, "messages.1.content"),
        ({"content": 7}, "messages.1.content"),
        ({"content": None}, "messages.1.content"),
        ({"content": text("")}, "messages.1.content"),
        ({"role": "system", "content": None}, "messages.1.content"),
        ({"role": "wizard", "content": "a"}, "messages.1.role"),
        ({"role": ["user"], "content": "a"}, "messages.1.role"),
        ({"content": "a", "name": 5}, "messages.1.name"),
        ({"content": "a", "weight": 1}, "messages.1.weight"),
        ({"content": "a", "tool_calls": [{"function": {"name": "f"}}]}, "messages.1.tool_calls"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages.1.audio"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "messages.1.refusal"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages.1.tool_calls.0"),
        ({"role": "assistant", "content": None, "tool_calls": "f"}, "messages.1.tool_calls.0"),
    ],
)
def test_what_a_model_cannot_take_is_refused_by_its_place(message: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", **message}]}
    with pytest.raises(RecordError, match="message 1") as caught:
        parse(body, Sampling())
    assert caught.value.param == param


def test_fields_that_say_nothing_are_welcome() -> None:
    echoed = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "name": None}
    assert chat_of(echoed) == [{"role": "assistant", "content": ""}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat_of({"role": "assistant", "tool_calls": [call]}) == [
        {"role": "assistant", "content": "", "tool_calls": [call]}
    ]


def test_a_model_that_sees_gets_its_parts_as_they_are() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    mixed = [{"role": "user", "content": [*text("what is this?"), picture]}]
    assert checked_messages(mixed, {"text", "image_url"}) == mixed
    assert (
        checked_messages([{"role": "user", "content": text("a", "b")}], {"text", "image_url"})[0]["content"] == "a\nb"
    )


def test_a_developer_is_a_system_to_a_template_that_does_not_know_one() -> None:
    chat = chat_of({"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"})
    assert rendered(chat, PLAIN, render(PLAIN)) == "<system>be brief<user>hi"
    assert with_known_roles(chat, "{% if role == 'developer' %}") == chat


CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("message", "template", "param"),
    [
        ({"role": "user", "content": "a", "name": "ann"}, PLAIN, "messages.0.name"),
        ({"role": "assistant", "content": "a", "tool_calls": [CALL]}, PLAIN, "messages.0.tool_calls"),
        ({"role": "tool", "content": "what it gave"}, "{{ messages[1].content }}", "messages.0.content"),
        ({"role": "system", "content": "be brief"}, "{{ messages[-1].content }}", "messages.0.content"),
    ],
)
def test_what_a_template_leaves_out_is_refused(message: dict[str, Any], template: str, param: str) -> None:
    with pytest.raises(RecordError, match="chat template") as caught:
        rendered(chat_of(message, {"role": "user", "content": "hi"}), template, render(template))
    assert caught.value.param == param


def test_what_a_template_changes_is_not_lost() -> None:
    template = (
        "{% for m in messages %}{{ m.name }}{{ m.content | upper }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
        "{% endfor %}"
    )
    chat = chat_of(
        {"role": "user", "content": "shout", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"},
    )
    assert rendered(chat, template, render(template)) == "annSHOUTadd(1)add2"


def test_a_template_that_looks_at_names_itself_is_let_alone() -> None:
    def strict(messages: list[Mapping[str, Any]]) -> str:
        if any(message.get("name") not in (None, "ann") for message in messages):
            raise ValueError("who is that?")
        return "".join(message["content"] for message in messages)

    assert rendered(chat_of({"role": "user", "content": "hi", "name": "ann"}), "", strict) == "hi"


NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "logit_bias": {},
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "stream": False,
    "stream_options": {"include_usage": True},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "seed": 7,
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "reasoning_effort": None,
    "verbosity": "medium",
}


def test_neutral_values_are_welcome() -> None:
    assert parse({"prompt": "x", **NEUTRAL}, Sampling()) == parse({"prompt": "x", "seed": 7}, Sampling())
    assert meaningful({"prompt": "x", **NEUTRAL}) == {"prompt": "x", "seed": 7, "tool_choice": "none"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "s"),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("store", True),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("colour", "red"),
        ("max_tokens", 0),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RecordError, match=name) as caught:
        parse({"prompt": "x", name: value}, Sampling())
    assert caught.value.param == name


def test_the_two_names_of_the_most_tokens_must_agree() -> None:
    body = {"prompt": "x", "max_tokens": 5}
    assert parse({**body, "max_completion_tokens": 5}, Sampling()).sampling.max_tokens == 5
    with pytest.raises(RecordError, match="give one of them") as caught:
        parse({**body, "max_completion_tokens": 6}, Sampling())
    assert caught.value.param == "max_completion_tokens"
