"""Sampled answers of a job: equal prompts differ by their place, and each is the same whenever it is computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.app.jobs.job import JobSettings, execute
from headrace.engines.base import Placed
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation
from headrace.errors import RecordError
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import Limits

ENGINE = f"{__name__}:make"
SAMPLED: dict[str, Any] = {"temperature": 20.0, "max_tokens": 12, "ignore_eos": True}
_hooks: dict[str, Any] = {}


class Disturbed(GenerationEngine):
    """The arithmetic model, which refuses records and reports its steps."""

    def prepare(self, inputs: Sequence[object]) -> list[Any]:
        refused = _hooks.get("refused", ())
        places = [value.place for value in inputs if isinstance(value, Placed)]
        return [
            RecordError("not today") if place in refused else one
            for place, one in zip(places or [None] * len(inputs), super().prepare(inputs), strict=True)
        ]

    def step(self) -> Any:
        _hooks.get("before_step", lambda: None)()
        return super().step()


def make(model: str | None = None, **options: Any) -> Disturbed:
    """The engine of these tests."""
    return Disturbed(Generation(model=model, max_num_seqs=3, **{**SAMPLED, **options}))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _hooks.clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Thirty prompts, of which only five differ."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": f"{n % 5}+1="}) + "\n" for n in range(30)), encoding="utf-8")
    return path


def settings(source: Path, sink: Path, **more: Any) -> JobSettings:
    return JobSettings(source=source, sink=sink, config=EngineConfig(task="generate", engine=ENGINE), **more)


def texts(sink: Path) -> dict[int, str]:
    rows = map(json.loads, sink.read_text(encoding="utf-8").splitlines())
    return {row["id"]: row["generation"]["text"] for row in rows}


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[int, str]:
    """The answers of an undisturbed job."""
    sink = tmp_path / "whole.jsonl"
    assert execute(settings(source, sink), StopRequest(), progress=False)[0].failed == 0
    return texts(sink)


@pytest.mark.parametrize("dedupe", [None, True])
def test_equal_prompts_are_sampled_each_for_itself(
    source: Path, tmp_path: Path, whole: dict[int, str], dedupe: bool | None
) -> None:
    assert len(set(whole.values())) == 30
    sink = tmp_path / "again.jsonl"
    execute(settings(source, sink, dedupe=dedupe), StopRequest(), progress=False)
    assert texts(sink) == whole


def test_greedy_ones_are_computed_once(source: Path, tmp_path: Path) -> None:
    sink = tmp_path / "greedy.jsonl"
    report = headrace.run(
        source, sink=sink, task="generate", engine=ENGINE, engine_options={"temperature": 0.0}, progress=False
    )
    assert report.duplicates == 25
    assert len(set(texts(sink).values())) <= 5


def test_a_job_that_is_resumed_gives_the_same_answers(source: Path, tmp_path: Path, whole: dict[int, str]) -> None:
    sink, stop = tmp_path / "resumed.jsonl", StopRequest()
    taken: list[int] = []

    def count() -> None:
        taken.append(1)
        if len(taken) == 30:
            stop.request()

    _hooks["before_step"] = count
    end, _ = execute(settings(source, sink), stop, progress=False)
    assert end.state == "interrupted" and 0 < end.records < 30
    _hooks.clear()
    assert execute(settings(source, sink), StopRequest(), progress=False)[0].state == "finished"
    assert texts(sink) == whole


def test_records_that_are_retried_give_the_same_answers(source: Path, tmp_path: Path, whole: dict[int, str]) -> None:
    sink, limits = tmp_path / "retried.jsonl", Limits(max_error_rate=1.0)
    _hooks["refused"] = {3, 8, 9, 28}
    end, _ = execute(settings(source, sink, limits=limits), StopRequest(), progress=False)
    assert end.failed == 4
    _hooks.clear()
    execute(settings(source, sink, limits=limits, retry=True), StopRequest(), progress=False)
    assert texts(sink) == whole


def test_the_seed_of_the_job_and_that_of_a_record_decide(source: Path, tmp_path: Path, whole: dict[int, str]) -> None:
    sink = tmp_path / "other.jsonl"
    run = {"task": "generate", "engine": ENGINE, "progress": False}
    headrace.run(source, sink=sink, engine_options={"seed": 1}, **run)
    assert not set(texts(sink).values()) & set(whole.values())
    rows = [{"id": n, "body": {"prompt": "1+1=", "seed": 7 + n // 2}} for n in range(4)]
    headrace.run(rows, sink=tmp_path / "own.jsonl", text_column="body", **run)
    one, same, two, also = texts(tmp_path / "own.jsonl").values()
    assert one == same != two == also
