"""The form of an answer: how a request asks for it, and what is refused before anything is compiled."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from headrace.engines.requests import grammar_text
from headrace.engines.requests.generation import Sampling, parse
from headrace.engines.requests.structure import structure_in, written_out
from headrace.errors import RecordError

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TREE = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"c": {"$ref": "#/$defs/a"}}}}}
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"c": {"$ref": "#/$defs/a"}}, "required": ["c"]}}}


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}}, "json", NUMBER),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "json", {"type": "integer"}),
        ({"structured_outputs": {"regex": "[0-9]+", "json": None}}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"guided_grammar": "start: x"}, "grammar", "start: x"),
        ({"structured_outputs": {"json": TREE}}, "json", TREE),
    ],
)
def test_forms_have_the_names_of_openai_and_vllm(body: Any, kind: str | None, value: Any) -> None:
    found = structure_in(body)
    assert (found and found.kind, found and found.value) == (kind, value)
    assert parse({"prompt": "x", **body}, Sampling(), structures=()).structure == found


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "give one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean regex"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "is an object"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_json": {"properties": {"a": {"enum": []}}}}, "guided_json", "properties/a is empty"),
        ({"guided_json": ENDLESS}, "guided_json", "no value ends"),
        ({"guided_json": {"type": "string", "pattern": "(a{1000}){1000}"}}, "guided_json", "1,000,000 characters"),
        ({"guided_regex": "(([ab]{90}){90}){90}"}, "guided_regex", "729,000 characters"),
    ],
)
def test_what_no_answer_can_have_is_refused_by_name(body: Any, param: str, words: str) -> None:
    with pytest.raises(RecordError, match=words) as caught:
        parse({"prompt": "x", **body}, Sampling(), structures=())
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_what_would_go_on_after_the_end_is_refused(field: Any) -> None:
    with pytest.raises(RecordError, match="give one of them") as caught:
        parse({"prompt": "x", "guided_regex": "a", **field}, Sampling(), structures=())
    assert [caught.value.param] == list(field)


@pytest.mark.parametrize(
    ("regex", "characters"),
    [("abc", 3), (r"a\{3", 3), ("a{3}", 3), ("(ab){2,5}c", 11), ("[a{9}]{4}", 4), ("((a{3}b){2}|c){10}", 100)],
)
def test_repeats_are_written_out(regex: str, characters: int) -> None:
    assert written_out(regex) == characters


def test_forced_dates_exist() -> None:
    pattern = json.loads(grammar_text.forced_schema({"type": "string", "format": "date"}))["pattern"]

    def exists(text: str) -> bool:
        try:
            datetime.date.fromisoformat(text)
        except ValueError:
            return False
        return True

    for year in (0, 1, 4, 96, 100, 400, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert (re.fullmatch(pattern, text) is not None) == exists(text), text
