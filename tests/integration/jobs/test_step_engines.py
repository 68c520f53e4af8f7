"""A job through an engine that works in steps: the same promises as through any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.app.jobs.job import JobSettings, execute
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import EngineDeadError, JobError
from headrace.jobs.pipeline.job import StopRequest
from headrace.testing import FakeStepEngine

ENGINE = f"{__name__}:make"
_hooks: dict[str, Any] = {}


def make(model: str | None = None) -> FakeStepEngine:
    """The engine of these tests."""
    engine = FakeStepEngine(model, max_slots=4, max_cost=400, most=40, **_hooks)
    _hooks["engine"] = engine
    return engine


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _hooks.clear()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Forty prompts of one to nine words, and one that is null."""
    rows = [{"id": f"r{number}", "text": " ".join(["w"] * (1 + number * 7 % 9))} for number in range(40)]
    rows[17]["text"] = None
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return source


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def settings(source: Path, sink: Path) -> JobSettings:
    return JobSettings(source=source, sink=sink, config=EngineConfig(task="generate", engine=ENGINE))


def test_answers_come_in_input_order_and_a_bad_record_costs_itself(prompts: Path, tmp_path: Path) -> None:
    sink = tmp_path / "answers.jsonl"
    report = headrace.run(prompts, sink=sink, task="generate", engine=ENGINE, progress=False)
    answers = rows_of(sink)
    assert [row["id"] for row in answers] == [f"r{number}" for number in range(40) if number != 17]
    assert all(row["generation"] == " ".join(["w"] * (1 + int(row["id"][1:]) * 7 % 9)) for row in answers)
    assert [row["id"] for row in rows_of(tmp_path / "answers.errors.jsonl")] == ["r17"]
    assert (report.ok, report.failed) == (39, 1)
    assert report.tokens == 2 * sum(len(row["generation"].split()) for row in answers)  # prompts and answers
    assert report.mean_batch_size > 2  # records in the engine at each step


def test_a_stopped_job_finishes_what_has_begun_and_goes_on_with_the_rest(prompts: Path, tmp_path: Path) -> None:
    sink, stop = tmp_path / "answers.jsonl", StopRequest()
    taken: list[int] = []

    def count() -> None:
        taken.append(1)
        if len(taken) == 9:
            stop.request()

    _hooks["before_step"] = count
    end, _ = execute(settings(prompts, sink), stop, progress=False)
    assert end.state == "interrupted"
    assert 0 < end.records < 40
    assert not sink.exists()
    begun = {text for texts in _hooks.pop("engine").steps for text in texts}
    assert begun
    _hooks.clear()
    end, _ = execute(settings(prompts, sink), StopRequest(), progress=False)
    assert (end.state, end.records, end.failed) == ("finished", 40, 1)
    assert len(rows_of(sink)) == 39
    assert sum(map(len, _hooks["engine"].steps)) < sum(len(row["generation"].split()) for row in rows_of(sink))


def test_a_dead_engine_ends_the_job_and_what_was_finished_is_kept(prompts: Path, tmp_path: Path) -> None:
    sink = tmp_path / "answers.jsonl"
    steps: list[int] = []

    def die(texts: list[str]) -> Exception | None:
        steps.append(1)
        return EngineDeadError("pulled the plug") if len(steps) > 20 else None

    _hooks["fails"] = die
    with pytest.raises(JobError, match="pulled the plug"):
        execute(settings(prompts, sink), StopRequest(), progress=False)
    _hooks.clear()
    end, _ = execute(settings(prompts, sink), StopRequest(), progress=False)
    assert (end.state, end.records) == ("finished", 40)
    done_again = sum(map(len, _hooks["engine"].steps))
    assert done_again < sum(len(row["generation"].split()) for row in rows_of(sink))
