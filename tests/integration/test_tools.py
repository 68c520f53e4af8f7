"""Tools and reasoning of chats, by models of random weights: calls that must come do, in each family's own way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
from tests.integration.serving.running import running
from tests.integration.test_structured import answers, nested
from tests.small_models import chat_model

import headrace
from headrace.app.servers.settings import ServerSettings
from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = {"type": "string", "maxLength": 4}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/digit"}, "s": SHORT},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "say",
            "description": "Say something.",
            "parameters": {"type": "object", "properties": {"words": SHORT}, "additionalProperties": False},
        },
    },
]
ADD = {"type": "function", "function": {"name": "add"}}
CHAT: list[Any] = [{"role": "user", "content": "1+1"}]
PARTS = (
    "{% for message in messages %}{{ message.content }} {% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {% endfor %}{% endfor %}"
)
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + PARTS
TEMPLATES = {
    "hermes": WITH_TOOLS + "{# <tool_call> #}",
    "qwen3_coder": WITH_TOOLS + "{# <function= #}",
    "mistral": WITH_TOOLS + "{# [TOOL_CALLS] #}",
    "mistral_args": WITH_TOOLS + "{# [TOOL_CALLS][ARGS] #}",
    "llama3_json": WITH_TOOLS + "{# <|python_tag|> #}",
    "deepseek": WITH_TOOLS + "{# <｜tool▁call▁begin｜> #}",
    "json": PARTS,
}
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "`", "▁", "｜", "_")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes calls as Hermes, and whose template begins its reasoning if it is told to think."""
    template = TEMPLATES["hermes"] + "{% if think %}<think>{% endif %}{# </think> #}"
    return chat_model(tmp_path_factory.mktemp("tools"), template, ADDED)


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_that_must_come_do(tmp_path: Path, family: str) -> None:
    engine = registry.create("generate", chat_model(tmp_path, TEMPLATES[family], ADDED, SPECIAL), engine="torch")
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    heats = [{**body, "temperature": heat, "max_tokens": 400, "seed": seed} for heat in (0, 1) for seed in range(3)]
    found = answers(engine, [*heats, {**body, "tool_choice": ADD, "parallel_tool_calls": True, "max_tokens": 120}])
    engine.close()
    ended = [one for one in found[:-1] if one["finish_reason"] == "tool_calls"]
    assert len(ended) >= 4, found
    for one in ended:
        [call] = one["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert (one["text"], one["tool_errors"], set(arguments) <= {"a", "s", "words"}) == ("", [], True)
        if call["function"]["name"] == "add":
            assert 0 <= arguments["a"] <= 9
    assert {call["function"]["name"] for call in found[-1]["tool_calls"]} <= {"add"}


def test_a_form_waits_for_the_end_of_the_reasoning(folder: Path) -> None:
    engine = registry.create("generate", folder, engine="torch")
    body = {"messages": CHAT, "chat_template_kwargs": {"think": True}, "max_tokens": 900, "temperature": 1.0}
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    found = answers(engine, [{**body, **form, "seed": seed} for seed in range(6)])
    ended = [one for one in found if one["finish_reason"] == "stop"]
    assert len(ended) >= 3
    assert {one["text"] for one in ended} <= {"yes", "no"}
    assert all(one["reasoning"] for one in ended)
    [without] = answers(engine, [{"messages": CHAT, **form}])
    assert (without["text"] in ("yes", "no"), without["reasoning"]) == (True, "")
    engine.close()


def test_an_answer_has_a_form_or_calls(folder: Path) -> None:
    engine = registry.create("generate", folder, engine="static")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    body = {"messages": CHAT, "tools": TOOLS, "parallel_tool_calls": False, "structured_outputs": {"json": schema}}
    found = answers(engine, [{**body, "temperature": 1.5, "max_tokens": 300, "seed": seed} for seed in range(12)])
    kinds = {one["finish_reason"] for one in found}
    assert {"stop", "tool_calls"} <= kinds
    assert all(json.loads(one["text"])["n"] in (1, 2) for one in found if one["finish_reason"] == "stop")
    engine.close()


def test_what_does_not_go_together_is_refused_by_name(folder: Path) -> None:
    engine = registry.create("generate", folder, engine="static")
    asked = {"messages": CHAT, "tools": TOOLS}
    for body, words, param in [
        ({"prompt": "x", "tools": TOOLS}, "tools go with messages", "tools"),
        ({**asked, "tool_choice": ADD, "structured_outputs": {"regex": "a"}}, "give one of them", "tool_choice"),
        ({**asked, "structured_outputs": {"regex": "a"}}, "not with a regex", "structured_outputs.regex"),
        ({**asked, "tools": [TOOLS[0] | {"function": {"name": "a", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, 'Unimplemented keys: ["not"]', "tools"),
        ({**asked, "tools": [TOOLS[0] | {"function": {"name": "a", "parameters": nested(300)}}]},
         "tools.0.function.parameters has more than 120 levels", "tools.0.function.parameters"),
        ({"messages": CHAT, "chat_template_kwargs": {"tools": []}}, "must be an object", "chat_template_kwargs"),
    ]:  # fmt: skip
        [refused] = engine.prepare([body])
        assert words in str(refused)
        assert refused.param == param
    engine.close()


def test_the_client_of_openai_gets_calls_whole_and_streamed(folder: Path) -> None:
    config = EngineConfig(task="generate", model=str(folder))
    asked: Any = {"model": "any", "messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400,
                  "parallel_tool_calls": False, "seed": 3, "temperature": 1.0}  # fmt: skip
    with (
        running(ServerSettings(config, name="any")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.message.content is None
        [call] = choice.message.tool_calls or []
        assert (choice.finish_reason, call.type) == ("tool_calls", "function")
        with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        assert kinds.count("tool_calls.function.arguments.delta") > 3
        [same] = streamed.message.tool_calls or []
        assert (streamed.finish_reason, same.function.name) == ("tool_calls", call.function.name)
        assert same.function.arguments == call.function.arguments
        again = [*CHAT, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        said = client.chat.completions.create(**{**asked, "messages": again, "tool_choice": "none"}).choices[0].message
        assert said.tool_calls is None
        thinking = {"model": "any", "messages": CHAT, "max_tokens": 300, "temperature": 1.0, "seed": 1,
                    "extra_body": {"chat_template_kwargs": {"think": True}}}  # fmt: skip
        message: Any = client.chat.completions.create(**thinking).choices[0].message
        assert message.reasoning_content
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**thinking, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
        assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_job_writes_calls_and_reasoning_as_columns(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
    (tmp_path / "examples.jsonl").write_text('{"text": "2+2", "answer": "4"}\n', encoding="utf-8")
    settings: Any = {
        "task": "generate", "model": str(folder), "max_tokens": 200, "tools": str(tmp_path / "tools.json"),
        "examples": str(tmp_path / "examples.jsonl"), "tool_choice": "say", "progress": False,
    }  # fmt: skip
    rows = [{"id": str(number), "text": f"{number}+1"} for number in range(4)]
    target = tmp_path / "out.parquet"
    headrace.run(source=rows, sink=target, flatten=("text", "reasoning", "tool_calls", "tool_errors"), **settings)
    table = pq.read_table(target)
    assert [str(table.schema.field(name).type) for name in ("text", "reasoning")] == ["string", "string"]
    calls = table["tool_calls"].to_pylist()
    assert all(one[0]["function"]["name"] == "say" for one in calls)
    [free] = headrace.run(source=rows[:1], sink="list", **{**settings, "tool_choice": None})
    assert free["generation"]["prompt_tokens"] == len("add say 2+2 4 0+1 ")
    assert free["generation"]["tool_calls"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": "none.json"}, "cannot read --tools none.json"),
        ({"tools": '[{"type": "x"}]'}, "--tools: tools.0 is"),
        ({"tools": json.dumps(TOOLS), "tool_choice": "ad"}, "--tool-choice: tool_choice names 'ad'"),
        ({"examples": "[3]"}, "must be a list of objects"),
        ({"examples": '[{"a": 1}]'}, "--examples: number 0 is {'a': 1}"),
        ({"tool_call_parser": "herms"}, "did you mean hermes?"),
    ],
)
def test_invalid_options_are_refused_before_the_model_is_loaded(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        headrace.run(source=[{"text": "1"}], sink="list", task="generate", progress=False, **options)
    assert words.replace("--tool-choice", "tool_choice").replace("--", "") in str(refused.value).replace("`", "")


def test_bias_and_echo_are_obeyed(folder: Path) -> None:
    engine = registry.create("generate", folder, engine="torch")
    plain: Any = {"prompt": "1+1=", "max_tokens": 3}
    [before] = answers(engine, [plain])
    [number] = engine.tokenize("7", add_special_tokens=False)
    found = answers(engine, [
        {**plain, "logit_bias": {str(number): 100}}, {**plain, "echo": True, "logit_bias": None}, plain,
    ])  # fmt: skip
    assert [one["text"] for one in found] == ["777", f"1+1={before['text']}", before["text"]]
    for body, words in [
        ({"logit_bias": {"99999": 1}}, "99999"), ({"logit_bias": [1]}, "must be an object"),
        ({"echo": 1}, "echo is 1"), ({"echo": True, "logprobs": 1}, "nor with logprobs"),
    ]:  # fmt: skip
        [refused] = engine.prepare([{**plain, **body}])
        assert words in str(refused)
    engine.close()
