"""Processes that prepare records start before the model is loaded, where a job will want them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace
from headrace.app.jobs import job, plan
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, EngineError
from headrace.jobs.settings import JobSettings, Limits


def count(*, gpus: int = 1, asked: int | None = None, preparing: str = "json", **more: Any) -> int:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "cuda_devices", lambda: gpus)
        patched.setattr(job.os, "cpu_count", lambda: 16)
        declaration = SimpleNamespace(preparing=preparing)
        config = SimpleNamespace(
            declaration=declaration,
            engine_options=more.get("options", {}),
            call_timeout_s=more.get("timeout_s"),
            engine_process=False,
        )
        alone = dict.fromkeys(("prepare", "finish", "dedupe", "documents_column"))
        settings = SimpleNamespace(config=config, limits=SimpleNamespace(prepare_processes=asked), **alone)
        plan: Any = SimpleNamespace(settings=settings, source=SimpleNamespace(total_bytes=more.get("total_bytes")))
        return job._early_count(plan)


def test_a_gpu_has_one_for_each_other_core_and_a_cpu_none() -> None:
    assert count() == count(total_bytes=1 << 30) == 15
    assert count(gpus=0) == count(options={"device": "cpu"}) == 0
    assert count(gpus=0, asked=3) == 3
    assert count(asked=500) == 16
    assert count(asked=0) == 0


def test_none_start_for_a_short_input_or_an_engine_that_prepares_alone() -> None:
    assert count(total_bytes=1_000) == count(preparing="") == count(preparing="", asked=3) == 0


def test_none_start_where_records_are_prepared_one_by_one() -> None:
    assert count(timeout_s=5.0) == count(options={"on_too_long": "split"}) == 0


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"prepare": str}, "prepare"),
        ({"finish": str}, "finish"),
        ({"dedupe": True}, "dedupe"),
        ({"on_too_long": "split"}, "on_too_long"),
        ({"engine_timeout_s": 5.0}, "engine_timeout_s"),
        ({"engine_process": True}, "engine_process"),
        ({"task": "score", "model": "a/b", "documents_column": "d", "text_column": "q"}, "documents_column"),
    ],
)
def test_processes_that_would_stay_idle_are_refused(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    rows = [{"text": "the mill", "q": "mill", "d": ["a"]}]
    with pytest.raises(ConfigError, match=f"prepare_processes=2 does not go with {name}"):
        headrace.run(rows, sink=tmp_path / "out.jsonl", **{"task": "embed", "prepare_processes": 2, **settings})


def test_a_step_of_several_goes_without_them() -> None:
    limits = Limits(prepare_processes=2)
    alone = JobSettings(["row"], "out.jsonl", config=EngineConfig(engine_process=True), limits=limits)
    with pytest.raises(ConfigError, match="engine_process"):
        plan._check_preparing(alone)
    step: Any = object()
    plan._check_preparing(replace(alone, step=step))


def test_they_start_before_the_model_is_loaded_and_end_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Early:
        def __init__(self, count: int, module: str) -> None:
            log.append(f"{count} with {module}")

        def close(self) -> None:
            log.append("ended")

    def load(plan: Any) -> None:
        log.append("load")
        raise EngineError("no weights")

    monkeypatch.setattr(job, "EarlyProcesses", Early)
    monkeypatch.setattr(job, "load", load)
    with pytest.raises(EngineError, match="no weights"):
        headrace.run(["the mill"], sink=tmp_path / "out.jsonl", task="embed", prepare_processes=2)
    assert log == ["2 with headrace.engines.text.tokenizing", "load", "ended"]


@pytest.mark.parametrize("task", ["embed", "classify", "image-embed"])
def test_what_an_engine_says_that_it_imports_is_there(task: str) -> None:
    declared = EngineConfig(task=task).declaration
    assert declared is not None and importlib.import_module(declared.preparing)
