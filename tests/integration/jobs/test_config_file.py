"""`headrace run --config FILE` with settings: flags and variables go before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.acceptance.command import FAKE, headrace

SETTINGS = {
    "task": "embed",
    "engine": "headrace.testing:FakeEngine",
    "source": "in.jsonl",
    "output-file": "out.jsonl",
    "keep_columns": ["n", "text"],
    "overwrite": True,
    "limit": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"text": f"text {n}", "n": n} for n in range(5))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_a_file_gives_what_flags_do_not(folder: Path) -> None:
    status, said = headrace("run", "--config", "job.json", "--limit", "3", folder=folder, imported="light")
    assert status == 0, said
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [list(row) for row in found] == [["id", "n", "text", "embedding"]] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": "many"}, "job.json: limit is 'many'"),
        ({"limit": [2]}, "job.json: limit is [2]; it must be a whole number or None"),
        ({"limit": True}, "job.json: limit is True; it must be a whole number or None"),
        ({"batch_size": [8]}, "job.json: batch_size is [8]; it must be a whole number or None"),
        ({"max_error_rate": [0.1, 7]}, "job.json: max_error_rate is [0.1, 7]; it must be a number"),
        ({"max_error_rate": 7}, "job.json: max_error_rate is 7; it must be between 0 and 1"),
        ({"overwrite": "maybe"}, "job.json: overwrite is 'maybe'; it must be true or false"),
        ({"overwrite": 1}, "job.json: overwrite is 1; it must be true or false"),
        ({"text_column": {"a": 1}}, "job.json: text_column is {'a': 1}; it must be a text or None"),
        ({"keep_columns": [1]}, "job.json: keep_columns is (1,); it must be a tuple, each item a text"),
        ({"model": 5}, "job.json: model is 5; it must be a text or None"),
        ({"data_parallel_size": 0}, "job.json: data_parallel_size is 0; it must be >= 1"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_name(change: dict[str, object], message: str, folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(SETTINGS | change))
    status, said = headrace("run", "--config", "job.json", folder=folder, imported="light")
    assert status == 2
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("key", "meant"), [("kep_columns", "keep_columns"), ("inptu-file", "input-file"), ("inptu_file", "input_file")]
)
def test_an_unknown_key_is_an_option_that_the_engine_lacks(key: str, meant: str, folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(SETTINGS | {key: "a"}))
    status, said = headrace("run", "--config", "job.json", folder=folder, imported="light")
    assert status == 2
    assert f"job.json: {key}: 'headrace.testing:FakeEngine' has no such option; known: dimension, " in said
    assert f"did you mean {meant}?" in said


def test_a_file_gives_an_option_to_an_engine_of_your_own(folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(SETTINGS | {"dimension": 2}))
    status, said = headrace("run", "--config", "job.json", folder=folder, imported="light")
    assert status == 0, said
    assert [len(json.loads(line)["embedding"]) for line in (folder / "out.jsonl").read_text().splitlines()] == [2, 2]


def test_a_value_of_a_file_is_what_python_takes(folder: Path) -> None:
    """A comma in an item of a list separates nothing, and a variable may name the file."""
    (folder / "in.jsonl").write_text('{"text": "one", "a, b": 1}\n')
    job = (
        f"{{input-file: in.jsonl, output-file: out.jsonl, engine: '{FAKE[1]}', keep_columns: ['a, b'], shard: [0, 1]}}"
    )
    (folder / "job.yaml").write_text(job)
    status, said = headrace("run", folder=folder, imported="light", HEADRACE_CONFIG="job.yaml")
    assert status == 0, said
    assert json.loads((folder / "out.jsonl").read_text())["a, b"] == 1


@pytest.mark.parametrize("flags", [(), ("-i", "in.jsonl", "-o", "out.jsonl")], ids=["alone", "beside files"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("job.yaml", "input-file: a\ntask: embed\ntask: embed\n", "job.yaml: the key 'task' is given twice"),
        ("job.yaml", "input-file: a\n\ttask: embed\n", "job.yaml is not YAML: line 2"),
        ("job.yaml", "", "job.yaml must be a mapping of settings"),
        ("job.yaml", "- task: embed\n", "job.yaml must be a mapping of settings"),
        ("job.yaml", "steps: [{tsak: embed}]\n", "job.yaml: step 1: 'tsak' is unknown; did you mean task?"),
        ("job.yaml", "steps: [{task: embed}]\ninput-file: a\n", "job.yaml: 'input-file' is unknown; known: steps"),
        ("none.yaml", "", "cannot read none.yaml: No such file or directory"),
    ],
)
@pytest.mark.parametrize("door", ["flag", "variable"])
def test_a_file_that_cannot_be_used_is_told_before_what_it_would_give(
    name: str, content: str, message: str, flags: tuple[str, ...], door: str, folder: Path
) -> None:
    (folder / "job.yaml").write_text(content)
    if door == "flag":
        status, said = headrace("run", "--config", name, *flags, folder=folder, imported="light")
    else:
        status, said = headrace("run", *flags, folder=folder, imported="light", HEADRACE_CONFIG=name)
    assert status == 2
    assert said.startswith(f"headrace: {message}"), said
