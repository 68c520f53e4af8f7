"""The form of a job's answers: typed columns, answers asked for again, dead letters with all answers, refusals."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel
from tests.families import change
from tests.integration.test_structured import nested
from tests.small_models import chat_model

import headrace
from headrace.errors import ConfigError
from headrace.jobs.answer_form import AnswerForm, InvalidAnswerError, schema_of

ROWS = [{"id": number, "text": f"row {number}"} for number in range(4)]


class Home(BaseModel):
    street: str
    number: int | None = None


@dataclasses.dataclass
class Person:
    age: float
    mood: Literal["good", "bad"]
    tags: list[str]
    home: Home | None = None


def answering(*answers: str) -> Any:
    """A model that gives its first answer first, and the next one each time it is told that one is not valid."""

    def model(prompts: Sequence[str]) -> list[str]:
        return [answers[min(prompt.count("not valid"), len(answers) - 1)] for prompt in prompts]

    return model


def run(sink: Any, engine: Any, **settings: Any) -> Any:
    return headrace.run(source=ROWS, sink=sink, task="generate", engine=engine, progress=False, **settings)


def letters(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_class_becomes_the_type_of_a_column(tmp_path: Path) -> None:
    model = answering('{"age": 3, "mood": "good", "tags": []}')
    run(tmp_path / "out.parquet", model, output_schema=Person)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field("generation").type.field("parsed").type == pa.struct([
        ("age", pa.float64()), ("mood", pa.string()), ("tags", pa.list_(pa.string())),
        ("home", pa.struct([("street", pa.string()), ("number", pa.int64())])),
    ])  # fmt: skip
    assert table["generation"][0].as_py()["parsed"] == {"age": 3.0, "mood": "good", "tags": [], "home": None}


@pytest.mark.parametrize(
    ("form", "wrong", "right", "error"),
    [
        ({"output_schema": {"n": int}}, "{n: 1}", '```json\n{"n": 1}\n```', "no JSON"),
        ({"output_schema": {"n": int}}, '{"n": "x"}', '{"n": 1}', "n: 'x' is not of type 'integer'"),
        ({"answer_regex": "[0-9]+"}, "12a", "12", "[0-9]+"),
        ({"choices": ("yes", "no")}, "maybe", " no ", "'yes', 'no'"),
    ],
)
def test_an_answer_without_its_form_is_asked_for_again(
    tmp_path: Path, form: Any, wrong: str, right: str, error: str
) -> None:
    again = run("list", answering(wrong, wrong, right), **form)
    assert [
        row["generation"] if isinstance(row["generation"], str) else row["generation"]["text"] for row in again
    ] == [right] * 4
    sink = tmp_path / "out.jsonl"
    report = run(sink, answering(wrong, wrong, right), **form, reask=1, max_error_rate=1)
    assert report.failures == {"InvalidAnswerError": 4}
    for letter in letters(tmp_path / "out.errors.jsonl"):
        assert letter["attempts"] == 2
        assert [answer["text"] for answer in letter["answers"]] == [wrong, wrong]
        assert all(error in answer["error"] for answer in letter["answers"])
        assert error in letter["message"]


def test_an_answer_that_was_cut_is_not_asked_for_again() -> None:
    form = AnswerForm.of_schema(schema_of({"n": int}), 2, in_prompt=True)
    with pytest.raises(InvalidAnswerError, match="max_tokens") as caught:
        form.checked({"text": '{"n": 1', "finish_reason": "length"})
    assert not caught.value.may_pass


def test_the_prompt_says_the_form_unless_it_shall_not() -> None:
    def model(prompts: Sequence[str]) -> list[str]:
        return ["yes" if prompt.startswith("Answer with one of these") else "no" for prompt in prompts]

    assert {row["generation"] for row in run("list", model, choices=("yes", "no"))} == {"yes"}
    assert {row["generation"] for row in run("list", model, choices="yes,no", schema_in_prompt=False)} == {"no"}


def test_a_model_in_a_process_of_its_own_is_held_to_the_form_too() -> None:
    rows = run("list", "static", choices=("12345", "xy"), schema_in_prompt=False, engine_process=True, max_tokens=9)
    assert {row["generation"]["text"] for row in rows} <= {"12345", "xy"}


def test_what_cannot_be_forced_is_checked_and_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": pair}, "required": ["a"]}
    rows = [{"text": f"{number}"} for number in range(12)]
    headrace.run(
        source=rows, sink=tmp_path / "out.jsonl", task="generate", output_schema=schema, schema_in_prompt=False,
        temperature=1.5, max_tokens=60, max_error_rate=1, progress=False,
    )  # fmt: skip
    assert 'output_schema: only checked, not forced: Unimplemented keys: ["uniqueItems"]' in caplog.text
    assert {tuple(sorted(row["generation"]["parsed"]["a"])) for row in letters(tmp_path / "out.jsonl")} == {("1", "2")}
    wrong = [one["error"] for letter in letters(tmp_path / "out.errors.jsonl") for one in letter["answers"]]
    assert all("has non-unique elements" in error for error in wrong)


def test_a_value_that_is_nested_too_deep_is_no_answer() -> None:
    form = AnswerForm.of_schema({"type": "array", "items": {"$ref": "#"}}, 0, in_prompt=False)
    with pytest.raises(InvalidAnswerError, match="nested too deep"):
        form.checked({"text": "[" * 500 + "]" * 500})


@pytest.mark.parametrize(("fields", "tokens"), [(8, "[0-9]{3}"), (500, "more than 512")])
def test_a_prompt_that_its_schema_makes_too_long_says_so(fields: int, tokens: str, tmp_path: Path) -> None:
    properties = {f"{number}": {"type": "integer"} for number in range(fields)}
    given: Any = {"output_schema": {"type": "object", "properties": properties}, "max_error_rate": 1, "max_tokens": 9}
    rows = [{"text": "1" * 400}]
    settings: Any = {"task": "generate", "progress": False, **given}
    headrace.run(source=rows, sink=tmp_path / "out.jsonl", **settings)
    [letter] = letters(tmp_path / "out.errors.jsonl")
    said = f"; {tokens} of its tokens say the form of the answer \\(output_schema\\): shorten the form, or"
    assert re.search(said, letter["message"]), letter["message"]
    assert "(schema_in_prompt=False)" in letter["message"]
    headrace.run(source=rows, sink=tmp_path / "short.jsonl", schema_in_prompt=False, **settings)
    assert not (tmp_path / "short.errors.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"output_schema": {"enum": []}}, "output_schema: the enum at the top is empty"),
        ({"output_schema": {"type": "strin"}}, "output_schema is no JSON schema: at type"),
        ({"output_schema": {"a": 1}}, "must be a JSON schema"),
        ({"output_schema": "nowhere.json"}, "cannot read output_schema"),
        ({"output_schema": {"a": int}, "choices": ("a",)}, "give one"),
        ({"answer_regex": "["}, "answer_regex is '\\['"),
        ({"choices": ("a",), "task": "embed"}, "task 'embed'"),
        ({"output_schema": {"type": "integer", "minimum": 5, "maximum": 3}, "engine": "torch"}, "minimum"),
        ({"output_schema": nested(200)}, "output_schema has more than 120 levels of objects and lists"),
        ({"output_schema": {"type": "integer", "minimum": float("inf")}}, "output_schema holds the number inf"),
        ({"output_schema": {"a": object()}}, "has no JSON schema"),
        ({"output_schema": nested(5000)}, "output_schema is nested too deep"),
    ],
)
def test_what_cannot_be_a_form_is_refused_before_the_job_starts(settings: Any, words: str) -> None:
    given = {"task": "generate", "engine": answering("a"), **settings}
    with pytest.raises(ConfigError, match=words):
        headrace.run(source=ROWS, sink="list", progress=False, **given)


@pytest.mark.parametrize("engine", ["torch", "static"])
def test_a_model_that_cannot_be_held_to_a_form_is_refused_before_the_first_row(engine: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model", "{% for message in messages %}{{ message.content }} {% endfor %}")
    change(model, "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    said = (
        "output_schema: no answer of this model can be held to a form: its tokenizer: can't determine decoder type: "
        "WordPiece; use another model, or leave it out and say the form in the prompt"
    )
    with pytest.raises(ConfigError, match=f"^{said}$"):
        run(tmp_path / "out.jsonl", engine, model=model, output_schema={"a": int})
    assert not list(tmp_path.glob("out*"))


def test_a_value_has_one_type_in_every_row() -> None:
    schema: Any = {
        "properties": {
            "any": {}, "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "self": {"$ref": "#"},
            "list": {"type": ["array", "null"], "items": {"enum": ["a", None]}}, "flag": {"const": "x"},
        },
        "type": "object",
    }  # fmt: skip
    form = AnswerForm.of_schema(schema_of(schema), 0, in_prompt=False)
    value = {"any": [1], "either": 3, "list": ["a", None], "self": {"flag": "x"}}
    found: Any = form.checked({"text": json.dumps(value)})
    assert found["parsed"]["any"] == "[1]"
    assert found["parsed"]["either"] == "3"
    assert found["parsed"]["list"] == ["a", None]
    assert found["parsed"]["self"]["flag"] == "x"
    assert found["parsed"]["flag"] is None


@pytest.mark.parametrize(
    "form",
    [
        AnswerForm.of_regex("(a|aa)+[bc]", 0, in_prompt=False),
        AnswerForm.of_schema({"type": "object", "properties": {"a": {"pattern": "^(a|aa)+[bc]"}}}, 0, in_prompt=False),
    ],
)
def test_a_regular_expression_that_never_ends_does_not_stop_a_job(
    form: AnswerForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.jobs.answer_form._MATCH_S", 0.05)
    text = "a" * 60
    answer = text if form.validator is None else json.dumps({"a": text})
    with pytest.raises(InvalidAnswerError, match=r"takes more than 0.05 s"):
        form.checked({"text": answer})
