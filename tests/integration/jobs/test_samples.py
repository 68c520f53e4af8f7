"""Several answers to each record, and chats made from columns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.acceptance.command import python
from tests.integration.serving.test_endpoint_jobs import recording

import headrace
from headrace.engines.requests.templates import field_text, template_text
from headrace.errors import ConfigError
from headrace.records import has_value

ROWS = [{"id": str(number), "text": f"{number}+1="} for number in range(3)]
SOURCES = Path(headrace.__file__).parents[1]
SAMPLED: dict[str, Any] = {"temperature": 20.0, "max_tokens": 12, "ignore_eos": True}


def run(sink: Any = "list", **settings: Any) -> Any:
    return headrace.run(**{"source": ROWS, "sink": sink, "task": "generate", "progress": False, **settings})


def outputs(**settings: Any) -> list[Any]:
    return [row["generation"] for row in run(**settings)]


@pytest.mark.parametrize("engine", ["torch", "static"])
def test_answers_differ_and_are_the_same_in_each_run(engine: str) -> None:
    found = outputs(engine=engine, n=3, **SAMPLED)
    assert all(len({answer["text"] for answer in answers}) == 3 for answers in found)
    assert outputs(engine=engine, n=3, **SAMPLED) == found
    assert outputs(engine=engine, **SAMPLED) == [answers[0] for answers in found]


def test_a_seed_of_a_record_gives_its_answers_seeds_of_their_own() -> None:
    rows = [{"id": number, "text": {"prompt": "1+1=", "seed": 5}} for number in range(2)]
    first, second = outputs(source=rows, n=2, **SAMPLED)
    assert first == second
    assert first[0]["text"] != first[1]["text"]


def test_the_likeliest_are_kept() -> None:
    every = outputs(n=6, source=[{"text": {"prompt": "1+1=", "logprobs": 0, "seed": 3}}], **SAMPLED)[0]
    likely = [sum(one["logprob"] for one in answer["logprobs"]) / len(answer["logprobs"]) for answer in every]
    best = [every[place]["text"] for place in sorted(range(6), key=lambda place: -likely[place])[:2]]
    rows = [{"text": {"prompt": "1+1=", "seed": 3}}]
    [kept] = outputs(n=2, best_of=6, source=rows, **SAMPLED)
    assert [answer["text"] for answer in kept] == best
    assert "logprobs" not in kept[0]
    [one] = outputs(best_of=6, source=rows, **SAMPLED)
    assert one["text"] == best[0]


def test_a_schema_gives_the_list_its_type(tmp_path: Path) -> None:
    run(tmp_path / "out.parquet", n=2, output_schema={"a": bool}, temperature=2.0, max_tokens=40)
    kind = pq.read_table(tmp_path / "out.parquet").schema.field("generation").type
    assert kind.value_type.field("parsed").type == pa.struct([("a", pa.bool_())])
    run(tmp_path / "flat.parquet", n=2, output_schema={"a": bool}, flatten="parsed", temperature=2.0, max_tokens=40)
    table = pq.read_table(tmp_path / "flat.parquet")
    assert table.column_names == ["id", "parsed"]
    assert all(len(values) == 2 for values in table["parsed"].to_pylist())


def test_only_an_answer_without_its_form_is_asked_for_again(tmp_path: Path) -> None:
    guesses = itertools.cycle(["1", "one", "2"])
    asked: list[str] = []

    def model(prompts: Sequence[str]) -> list[str]:
        asked.extend(prompts)
        return ["3" if "not valid" in prompt else next(guesses) for prompt in prompts]

    settings: dict[str, Any] = {"engine": model, "n": 3, "answer_regex": "[0-9]"}
    assert outputs(source=ROWS[:1], **settings) == [["1", "3", "2"]]
    assert len(asked) == 4
    report = run(tmp_path / "out.jsonl", source=ROWS[:1], reask=0, max_error_rate=1, **settings)
    assert report.failures == {"InvalidAnswerError": 1}
    [letter] = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert [one["text"] for one in letter["answers"]] == ["one"]


def test_an_endpoint_gets_a_request_for_each_answer() -> None:
    with recording() as server:
        server.answer = {
            "choices": [{"message": {"content": "yes"}, "finish_reason": "stop",
                         "logprobs": {"content": [{"logprob": -0.5}]}}]
        }  # fmt: skip
        found = outputs(source=ROWS[:1], endpoints=[server.url], model="m", n=2, best_of=3, seed=7, temperature=1.0)
    assert [answer["text"] for answer in found[0]] == ["yes", "yes"]
    assert sorted(body["seed"] for body in server.bodies) == [7, 8, 9]
    assert all(body["logprobs"] is True for body in server.bodies)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "embed", "n": 2}, "several answers"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3}, "`?n`? is 3.* temperature 0"),
        ({"best_of": 3, "temperature": 0}, "best_of.* is 3.* temperature 0"),
        ({"n": 2, "on_too_long": "split", "chunk_join": "first"}, "on_too_long"),
        ({"task": "embed", "prompt_template": [{"role": "user", "content": "{text}"}]}, "chat"),
        ({"prompt_template": [{"role": "owner", "content": "{text}"}]}, "owner"),
        ({"prompt_template": [{"role": "user", "content": "hello"}]}, "names no column"),
        ({"prompt_template": "gone.json"}, "gone.json"),
        ({"task": "custom", "engine": list, "text_column": "text,"}, "'text,', of which one name is empty"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**settings)


def test_equal_answers_and_engines_without_likelihoods_fail_the_record(tmp_path: Path) -> None:
    asked = [{**row, "text": {"prompt": row["text"]}} for row in ROWS]
    for settings, words in (
        ({"n": 2, "source": asked}, "temperature"),
        ({"best_of": 2, "engine": lambda texts: texts}, "best_of"),
    ):
        run(tmp_path / "out.jsonl", overwrite=True, max_error_rate=1, **settings)
        letters = (tmp_path / "out.errors.jsonl").read_text().splitlines()
        assert all(words in json.loads(line)["message"] for line in letters)
        assert len(letters) == 3


def test_a_template_makes_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Sums {{a}}"}, {"role": "user", "content": "Q{id}: {text}"}]
    expected = [{"role": "system", "content": "Sums {a}"}, {"role": "user", "content": "Q0: 0+1="}]
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    for template in (chat, json.dumps(chat), str(tmp_path / "chat.json")):
        found = outputs(engine=lambda chats: [{"chat": chat} for chat in chats], prompt_template=template)
        assert found[0]["chat"] == expected


def test_a_file_of_json_holds_a_template(tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    file.write_text('"Q: {text}"')
    assert template_text(str(file)) == "Q: {text}"
    file.write_text("[{]")
    with pytest.raises(ConfigError, match=rf"{file}: it is not valid JSON"):
        template_text(str(file))


def test_a_key_of_an_empty_list_is_an_empty_list() -> None:
    rows = [{"text": [{"a": "x"}]}, {"text": []}]
    assert [field_text(row, "text.a") for row in rows] == ['["x"]', "[]"]
    assert has_value(rows[1], "text.a")


KILLED = """
import os, sys
import headrace

def finish(row, output):
    if row["id"] == sys.argv[1]:
        os._exit(9)  # as a kill: nothing is closed
    return output

rows = [{"id": str(number), "text": f"{number}+1="} for number in range(60)]
headrace.run(rows, sink="out.jsonl", task="generate", n=2, temperature=20.0, max_tokens=12, ignore_eos=True,
             finish=finish, worker_kind="thread", limits=headrace.Limits(part_records=5), progress=False)
"""


def test_a_killed_job_goes_on_with_the_same_answers(tmp_path: Path) -> None:
    found = {}
    for name, last in (("killed", "40"), ("whole", "-1")):
        folder = tmp_path / name
        folder.mkdir()

        def started(last: str, folder: Path = folder) -> int:
            with python(KILLED, ["python", last], folder=folder, imported="models") as process:
                process.communicate()
            return process.returncode

        assert started(last) == (9 if name == "killed" else 0)
        if name == "killed":
            assert list(folder.glob("out.jsonl.parts/*")), "some parts are kept"
            assert started("-1") == 0
        found[name] = (folder / "out.jsonl").read_bytes()
    assert found["killed"] == found["whole"]
    assert all(len(json.loads(line)["generation"]) == 2 for line in found["whole"].splitlines())
