"""A user's own functions at both ends, given as names and as functions, on threads and in processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.jobs import own
from tests.integration.jobs.harness import Runner, read_errors, write_rows
from typer.testing import CliRunner

import headrace
from headrace.cli.app import app
from headrace.engines.custom import FunctionEngine
from headrace.errors import ConfigError, HeadraceError, ResumeMismatchError
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import Limits
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


def pairs(texts: list[str]) -> list[str]:
    return [text[:2] for text in texts]


@pytest.mark.parametrize("door", ["function", "name", "command"])
def test_an_engine_of_ones_own_is_of_the_same_task_at_every_door(door: str, tmp_path: Path) -> None:
    source, sink = write_rows(tmp_path / "in.jsonl", [{"id": 1, "text": "abc"}]), tmp_path / "out.jsonl"
    name = "tests.integration.jobs.test_own_code:pairs"
    if door == "command":
        done = CliRunner().invoke(app, ["run", "-i", str(source), "-o", str(sink), "--engine", name])
        assert done.exit_code == 0, done.output
    else:
        headrace.run(source, sink=sink, engine=pairs if door == "function" else name, progress=False)
    assert json.loads(sink.read_text()) == {"id": 1, "output": "ab"}


KEPT = np.zeros((8, 2))


def refilled(texts: list[str]) -> Any:
    for place, text in enumerate(texts):
        KEPT[place] = int(text)
    return KEPT[: len(texts)]


@pytest.mark.parametrize("engine_process", [False, True])
def test_an_array_that_is_filled_again_is_nobody_elses_row_in_any_process(engine_process: bool) -> None:
    rows = [{"text": str(number)} for number in range(100)]
    name = "tests.integration.jobs.test_own_code:refilled"
    found = headrace.run(rows, sink="list", engine=name, batch_size=8, engine_process=engine_process, progress=False)
    assert [list(row["output"]) for row in found] == [[number, number] for number in range(100)]


def leaving(texts: list[str]) -> list[str]:
    raise SystemExit(3)


class Leaving:
    """A whole engine whose batches end the process."""

    def __init__(self) -> None:
        self.prepare = FunctionEngine(leaving, "leaving").prepare
        self.profile = FunctionEngine(leaving, "leaving").profile

    def describe(self) -> dict[str, object]:
        return {}

    def forward(self, batch: list[object]) -> list[object]:
        raise SystemExit(3)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("engine", "named"), [(leaving, "tests.integration.jobs.test_own_code:leaving"), (Leaving, "the engine")]
)
def test_what_asks_the_process_to_exit_is_named(engine: Any, named: str, tmp_path: Path) -> None:
    report = headrace.run(
        [{"text": "a"}], sink=tmp_path / "out.jsonl", engine=engine, progress=False, limits=Limits(max_error_rate=1)
    )
    assert report.failed_records[0].message == f"{named} raised SystemExit: 3"


def nothing(row: dict[str, object]) -> None: ...


def test_a_function_that_returns_no_row_is_named_as_it_was_given(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"text": "a"}])
    own = [
        "--engine",
        "tests.integration.jobs.test_own_code:pairs",
        "--map",
        "tests.integration.jobs.test_own_code:nothing",
    ]
    done = CliRunner().invoke(app, ["run", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), *own])
    assert "--map returned NoneType, not a mapping of columns" in done.output
    with pytest.raises(HeadraceError, match="prepare returned NoneType, not a mapping of columns"):
        headrace.run(source, sink=tmp_path / "other.jsonl", engine=pairs, prepare=nothing, progress=False)


@pytest.mark.parametrize(("flag", "value"), [("--shard", "4/4"), ("--shard", "a"), ("--sample", "2")])
def test_a_selection_is_refused_by_its_flag(flag: str, value: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"text": "a"}])
    own = ["--engine", "tests.integration.jobs.test_own_code:pairs", flag, value]
    done = CliRunner().invoke(app, ["run", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), *own])
    assert (done.exit_code, f"{flag} is" in done.output) == (2, True)
