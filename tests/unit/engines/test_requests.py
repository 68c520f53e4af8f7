"""What a text generator is asked: prompts, chats, request bodies, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engines.requests.generation import Sampling, default_sampling, parse, sampling_from
from headrace.errors import ConfigError, RecordError

DEFAULTS = Sampling(max_tokens=7)
CHAT = [{"role": "user", "content": "hi"}]


def test_a_text_is_a_prompt() -> None:
    request = parse("1+1=", DEFAULTS)
    assert (request.prompt, request.messages, request.sampling) == ("1+1=", None, DEFAULTS)


@pytest.mark.parametrize("options", [{"chat": True}, {"system_prompt": "Add."}])
def test_a_text_becomes_a_users_message_where_a_chat_is_wanted(options: Any) -> None:
    request = parse("1+1=", DEFAULTS, **options)
    assert request.prompt is None
    assert request.messages is not None
    assert request.messages[-1] == {"role": "user", "content": "1+1="}
    assert [message["role"] for message in request.messages] == (["user"] if "chat" in options else ["system", "user"])


def test_a_system_prompt_does_not_replace_the_records_own() -> None:
    own = [{"role": "system", "content": "Subtract."}, *CHAT]
    assert parse(own, DEFAULTS, system_prompt="Add.").messages == own


def test_a_request_body_says_itself_what_it_is_and_how_to_sample() -> None:
    body = {"model": "any", "messages": CHAT, "temperature": 0.5, "stop": "\n", "max_completion_tokens": 3, "n": 1}
    request = parse(body, DEFAULTS)
    assert request.messages == CHAT
    assert request.sampling == Sampling(max_tokens=3, temperature=0.5, stop=("\n",))
    assert parse({"prompt": "go on", "seed": None}, DEFAULTS, chat=True).prompt == "go on"


def test_further_fields_reach_the_engine_that_takes_them() -> None:
    body = {"prompt": "x", "response_format": {"type": "json_object"}, "bad_words": None}
    assert parse(body, DEFAULTS, extra=("response_format", "bad_words")).extra == {
        "response_format": {"type": "json_object"}
    }
    with pytest.raises(RecordError, match="response_format"):
        parse(body, DEFAULTS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "empty"),
        (None, "null"),
        (7, "of type int"),
        ([], "no message"),
        (["hi"], "message 0"),
        ([{"content": "hi"}], "role and content"),
        ([*CHAT, {"role": "wizard", "content": "hi"}], "message 1 has the role 'wizard'; known: system, developer"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": ""}], "no content"),
        ({"messages": CHAT, "prompt": "x"}, "either"),
        ({"model": "x"}, "either"),
        ({"prompt": ["a", "b"]}, "one text per record"),
        ({"messages": "hi"}, "not a list"),
        ({"prompts": "x"}, r"""either "prompt" or "messages"; unknown field 'prompts'; did you mean prompt\?"""),
        ({"prompt": "x", "temprature": 1}, r"unknown field 'temprature'; known: .*; did you mean temperature\?"),
        ({"prompt": "x", "n": 2}, "n is 2: this engine takes only 1; n of the job gives"),
        ({"prompt": "x", "stream": True}, "stream is True"),
    ],
)
def test_what_is_no_request_says_why(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse(value, DEFAULTS)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("max_tokens", 0, 1),
        ("max_tokens", 2.0, 2),
        ("max_tokens", True, 1),
        ("min_tokens", -1, 0),
        ("temperature", -0.1, 2),
        ("temperature", float("nan"), 0.0),
        ("temperature", "hot", 1),
        ("top_p", 0, 1.0),
        ("top_p", 1.1, 0.1),
        ("top_k", -2, 40),
        ("min_p", 2, 0.5),
        ("repetition_penalty", 0, 1.2),
        ("presence_penalty", 3, -2),
        ("frequency_penalty", -2.5, 2),
        ("stop", [""], ["a"]),
        ("stop", [1], ["1"]),
        ("seed", -1, 0),
        ("ignore_eos", 1, True),
    ],
)
def test_a_parameter_out_of_range_names_itself_its_value_and_the_range(name: str, bad: Any, good: Any) -> None:
    with pytest.raises(RecordError, match=f"{name} is .*must be"):
        sampling_from({name: bad})
    with pytest.raises(ConfigError, match=f"{name} is .*must be"):
        default_sampling({name: bad})
    assert getattr(sampling_from({name: good}), name) in (good, tuple(good) if isinstance(good, list) else None)


def test_parameters_must_agree() -> None:
    with pytest.raises(RecordError, match="min_tokens is 8: it must be <= max_tokens, 7"):
        sampling_from({"min_tokens": 8}, DEFAULTS)


def test_top_k_of_minus_one_is_all_as_in_vllm() -> None:
    assert sampling_from({"top_k": -1}) == Sampling()
