"""`headrace tune` with a language model on vLLM, which starts anew for each size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm.random_llama import save_random_llama

import headrace
from headrace.app import step_grid
from headrace.app.jobs import vllm_arguments
from headrace.app.jobs.job import JobSettings
from headrace.cli.tune import step_lines
from headrace.device.step_sizes import StepSize
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import BrokenOffError, EngineDeadError


@pytest.mark.timeout(900)
def test_vllm_is_measured_at_each_size_that_it_starts_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(step_grid, "_OF_VLLM", ([16], [1_024]))
    folder = save_random_llama(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "text": f"{n} + {n} ="}) + "\n" for n in range(20)))
    options = {"dtype": "float32", "enforce_eager": True, "max_tokens": 4, "ignore_eos": True}
    config = EngineConfig("generate", str(folder), "vllm", options)
    grid = step_grid.measure_steps(JobSettings(rows, lambda rows: None, config), 600)
    assert len(grid.rows) == 3 and grid.chosen in grid.rows
    speculation, cache = grid.additions
    assert speculation.name == "n-gram speculation" and speculation.same == 1 and speculation.speed > 0
    assert cache.name == "8-bit key-value cache" and (cache.speed > 0 or "AVX512" in cache.why_not)
    assert all(row.tokens_per_s > 4 * row.records_per_s > 0 and row.step_s is None for row in grid.rows)
    assert step_lines(grid)[-2].startswith("chosen: --max-num-seqs ")
    from headrace.engines.vllm import core

    started: list[dict[str, object]] = []
    start = core._start

    def noted(folder: Path, options: Mapping[str, object]) -> object:
        started.append(dict(options))
        return start(folder, options)

    monkeypatch.setattr(core, "_start", noted)
    report = headrace.run(
        rows, str(folder), task="generate", engine="vllm", sink=lambda rows: None, progress=False, **options
    )
    size = grid.chosen.size
    assert (started[0]["max_num_seqs"], started[0]["max_num_batched_tokens"]) == (size.answers, size.tokens)
    assert report.step_size is not None and report.step_size.answers == size.answers


@pytest.mark.timeout(900)
def test_a_resumed_job_keeps_the_speculation_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engines.vllm.engine import VllmEngine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_random_llama(tmp_path / "model")
    texts = [f"{n} + {n} = {n} + {n} =" for n in range(30)]
    options = {"dtype": "float32", "enforce_eager": True, "max_tokens": 8, "ignore_eos": True}
    given = {"model": str(folder), "task": "generate", "engine": "vllm", "progress": False, **options}
    config = EngineConfig("generate", str(folder), "vllm", options)
    usual = headrace.run(texts, sink="list", **given)
    vllm_arguments.keep(config, StepSize(16, 1_024), vllm_arguments.ADDITIONS["n-gram speculation"])
    output, infer, started = tmp_path / "answers.jsonl", VllmEngine.infer, []

    async def dies(self: VllmEngine, payload: Any) -> Any:
        started.append(self.describe()["options"])
        if len(started) > 10:
            raise EngineDeadError("it is gone")
        return await infer(self, payload)

    with monkeypatch.context() as patched:
        patched.setattr(VllmEngine, "infer", dies)
        with pytest.raises(BrokenOffError):
            headrace.run(texts, sink=output, **given)
    assert started[0]["speculative_config"]["method"] == "ngram"
    vllm_arguments.keep(config, StepSize(32, 1_024), {})
    report = headrace.run(texts, sink=output, **given)
    assert report.step_size is not None and report.step_size.answers == 32
    summary = json.loads((tmp_path / "answers.jsonl.parts" / "report.json").read_text())
    assert "ngram" in summary["runs"][-1]["settings"]["engine option speculative_config"]
    answers = {row["id"]: row["generation"] for row in map(json.loads, output.read_text().splitlines())}
    assert answers == {row["id"]: row["generation"] for row in usual}
