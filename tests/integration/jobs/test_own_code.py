"""A user's own functions at both ends, given as names and as functions, on threads and in processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import own
from tests.integration.jobs.harness import Runner, read_errors, write_rows

from headrace.errors import ConfigError, ResumeMismatchError
from headrace.jobs.pipeline.job import JobEnd
from headrace.testing import FakeEngine

ROWS = [{"id": f"q{n}", "question": "how many", "n": n} for n in range(40)]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl")


@pytest.mark.parametrize("kind", ["thread", "process", "auto"])
def test_rows_are_prepared_and_outputs_finished_and_what_they_raise_is_their_records(runner: Runner, kind: str) -> None:
    mine: dict[str, Any] = {"prepare": own.ask, "finish": "tests.integration.jobs.own:shorten", "worker_kind": kind}
    assert runner.run(**mine) == JobEnd("finished", 40, 3)
    rows = [json.loads(line) for line in runner.sink.read_text().splitlines()]
    engine = FakeEngine()
    assert rows == [
        {"id": row["id"], "embedding": engine.vector(f"how many {row['n']}")[0] + row["n"]}
        for row in ROWS
        if row["n"] not in (5, 6, 8)
    ]
    letters = [(letter["reason"], letter["message"], letter["record"]) for letter in read_errors(runner.sink)]
    assert letters[0] == ("ValueError", "five is right out", ROWS[5])
    assert [letter["id"] for letter in read_errors(runner.sink)] == ["q5", "q6", "q8"]
    assert letters[1][:2] == ("RecordError", "tests.integration.jobs.own:ask asked the process to exit with 0")
    assert letters[2][:2] == ("ZeroDivisionError", "eight")
    with pytest.raises(ResumeMismatchError, match=r"finish was 'tests\.integration\.jobs\.own:shorten', now not set"):
        runner.run(prepare=own.ask)


def test_columns_are_those_that_prepare_makes(runner: Runner) -> None:
    with pytest.raises(ConfigError, match="has a column 'text'; they have id, question, n"):
        runner.run()
    with pytest.raises(ConfigError, match="has a column 'question'; they have id, text, n"):
        runner.run(prepare=own.ask, text_column="question")


def test_a_function_that_is_not_there_is_one_clear_error(runner: Runner) -> None:
    with pytest.raises(ConfigError, match="no attribute 'nothing'"):
        runner.run(prepare="tests.integration.jobs.own:nothing")
    assert not Path(f"{runner.sink}.parts").exists()
