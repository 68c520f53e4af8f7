"""Answers of a given form, by a model of random weights: every one parses, whatever the engine and the sampling."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tests.integration.serving.running import running
from tests.small_models import chat_model

from headrace.app.servers.settings import ServerSettings
from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.answer_form import AnswerForm

pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 3, "maximum": 70},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/home"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "home": {"type": "object", "properties": {"no": {"type": "integer", "maximum": 99, "minimum": 0}},
                 "required": ["no"], "additionalProperties": False},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return chat_model(tmp_path_factory.mktemp("llama"), template)


def answers(engine: Any, bodies: list[Any]) -> list[Any]:
    payloads = [item.payload for item in engine.prepare(bodies)]
    if hasattr(engine, "forward"):
        return list(engine.forward(payloads))
    for key, payload in enumerate(payloads):
        engine.add(key, payload)
    found: dict[int, Any] = {}
    while len(found) < len(payloads):
        found.update(engine.step())
    return [found[key] for key in range(len(payloads))]


@pytest.mark.parametrize("kind", ["static", "torch"])
def test_every_answer_has_its_form(folder: Path, kind: str) -> None:
    forms: list[tuple[Any, Any]] = [
        ({"json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
        ({"regex": "[0-9]{3}-(a|b)+c"}, lambda text: re.fullmatch("[0-9]{3}-(a|b)+c", text)),
        ({"choice": ["yes", "no", 'o"k']}, lambda text: text in ("yes", "no", 'o"k')),
        ({"grammar": 'start: "a" | "(" start ")"'}, lambda text: re.fullmatch(r"\(*a\)*", text)),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ]
    cases = [(form, check, heat) for form, check in forms for heat in (0, 0.7, 1, 1.5) for _ in range(3)]
    bodies = [{"prompt": f"{n}+1=", "structured_outputs": form, "max_tokens": 150, "temperature": heat}
              for n, (form, _, heat) in enumerate(cases)]  # fmt: skip
    engine = registry.create("generate", folder, engine=kind)
    found = answers(engine, bodies)
    engine.close()
    ended = [(case, answer) for case, answer in zip(cases, found, strict=True) if answer["finish_reason"] == "stop"]
    assert len(ended) > len(cases) / 2
    for (form, check, _), answer in ended:
        assert check(answer["text"]), (form, answer)


def test_tokens_without_a_choice_take_no_steps_and_change_no_answer(folder: Path) -> None:
    """Where the form leaves no choice, where `max_tokens` cuts it, and where each token is looked at."""
    named = {"type": "object", "properties": {"a_long_name_of_a_field": {"enum": ["several words", 7]}}}
    schema = {**named, "required": ["a_long_name_of_a_field"], "additionalProperties": False}
    asked: dict[str, Any] = {"prompt": "1+1=", "temperature": 1.0, "structured_outputs": {"json": schema}}
    bodies = [{**asked, "seed": seed, "max_tokens": most} for seed in range(6) for most in (1, 9, 26, 60)]
    watched = [{**asked, "logprobs": 1}, {**asked, "stop": ["name"]}]
    continuous, static = (registry.create("generate", folder, engine=kind) for kind in ("torch", "static"))
    found = [answers(engine, [*bodies, *watched]) for engine in (continuous, static)]
    assert len(found[0][-2].pop("logprobs")) == len(found[1][-2].pop("logprobs"))  # equal up to rounding
    assert found[0] == found[1]
    for body, fewest, most in ((bodies[3], 1, 8), (watched[0], 30, 60)):
        continuous.add(0, continuous.prepare([body])[0].payload)
        steps = 1
        while not continuous.step():
            steps += 1
        assert fewest <= steps <= most, body
    continuous.close()
    static.close()


def test_an_answer_begun_anew_keeps_its_form(folder: Path) -> None:
    body = {"prompt": "1+1=", "structured_outputs": {"json": PERSON}, "temperature": 1.0, "seed": 4}
    engine = registry.create("generate", folder, engine="torch")
    [expected] = answers(engine, [body])
    [prepared] = engine.prepare([body])
    engine.add(0, prepared.payload)
    for _ in range(6):
        engine.step()
    resumed = engine.remove(0)
    engine.add(0, resumed)
    ended: list[Any] = []
    while not ended:
        ended = engine.step()
    assert ended == [(0, expected)]
    assert engine.remove(0) is None
    engine.close()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_of_as_many_levels_as_allowed_is_held(folder: Path) -> None:
    engine = registry.create("generate", folder, engine="static")
    [held] = engine.prepare([{"prompt": "x", "structured_outputs": {"json": nested(59)}}])
    assert not isinstance(held, Exception), held
    AnswerForm.of_schema(nested(59), 0, in_prompt=False)
    engine.close()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"properties": {"a": {"not": {}}}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json": {"type": "string", "format": "colour"}}, "colour"),
        ({"json": {"properties": {f"f{n}": {"type": "integer"} for n in range(20_000)}}}, "schema too large"),
        (
            {"json": nested(300)},
            "structured_outputs.json has more than 120 levels of objects and lists: make it flatter",
        ),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "["}, "unclosed"),
        ({"grammar": "start: a"}, 'unknown name: "a"'),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(folder: Path, form: Any, words: str) -> None:
    engine = registry.create("generate", folder, engine="static")
    for _ in range(2):  # the second time from the cache
        [refused] = engine.prepare([{"prompt": "x", "structured_outputs": form}])
        assert words in str(refused)
        assert refused.param == f"structured_outputs.{next(iter(form))}"
    engine.close()


class Person(BaseModel):
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]


def test_the_client_of_openai_parses_a_model_class(folder: Path) -> None:
    config = EngineConfig(task="generate", model=str(folder))
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "1"}], "max_tokens": 60}
    with running(ServerSettings(config, name="any")) as server, openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:  # fmt: skip
        parsed = client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
        assert isinstance(parsed, Person)
        with client.chat.completions.stream(**asked, response_format=Person) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed
        text = client.chat.completions.create(**asked, response_format={"type": "json_object"})
        assert (text.choices[0].message.content or "").startswith("{")
        done = client.completions.create(
            model="any", prompt="1", max_tokens=9, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert done.choices[0].text in ("yes", "no")
        endless = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}
        with pytest.raises(openai.BadRequestError, match="no value ends") as caught:
            client.completions.create(model="any", prompt="1", extra_body={"guided_json": endless})
        assert caught.value.param == "guided_json"
