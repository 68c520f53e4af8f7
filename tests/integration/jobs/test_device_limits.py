"""Devices that are not there, budgets that are too small, and trials that run out of memory: one clear line each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.app.grid import GridOptions, measure
from headrace.app.jobs import tuning
from headrace.app.jobs.job import JobSettings
from headrace.app.servers import warm_up as warm_up_module
from headrace.app.servers.warm_up import warm_up
from headrace.device.cache import TuningCache
from headrace.device.memory import AvailableMemory, PeakMeter
from headrace.device.placement import choose_device
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.networks import pytorch as torch_network
from headrace.engines.networks.base import TextBatch
from headrace.engines.text.embedding import EmbeddingEngine
from headrace.engines.text.options import Embedding
from headrace.errors import ConfigError, EngineOutOfMemoryError

ROWS = [{"id": str(n), "text": "a canal feeds a mill " * (n % 9 + 1)} for n in range(60)]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The tokens of a batch that fit on the device by dtype; bfloat16 is found to be fast."""
    fits = {"float32": float("inf"), "bfloat16": float("inf")}
    run = torch_network.TorchNetwork.run_texts

    def limited(self: torch_network.TorchNetwork, batch: TextBatch, packed: bool) -> Any:
        if batch.lengths.sum() > fits[str(self.describe()["dtype"])]:
            raise EngineOutOfMemoryError("the device has no room")
        return run(self, batch, packed)

    def speeds(device: object) -> Mapping[str, float]:
        return {"bfloat16": 4.0}

    monkeypatch.setattr(torch_network.TorchNetwork, "run_texts", limited)
    monkeypatch.setattr(torch_network, "speeds", speeds)
    monkeypatch.setattr(torch_network, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(torch_network, "MOST_CPU_TOKENS", 1_024)  # a model this small would take more
    monkeypatch.setattr(tuning, "WORTH_S", 0.0)
    return fits


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_named(encoder_folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}': PyTorch sees 0 CUDA devices; use device=.cpu"):
        EmbeddingEngine(Embedding(model=encoder_folder, device=device))


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    old = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."

    def init() -> None:
        raise RuntimeError(old)

    def is_available() -> bool:
        warnings.warn(f"CUDA initialization: {old}", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"^device 'cuda': .* use device=.cpu. \(.* too old \(found version 11040\)\)$"
    ):
        choose_device("cuda")
    assert choose_device("auto").type == "cpu"
    assert "the model runs on the CPU: CUDA initialization: The NVIDIA driver on your system is too old" in caplog.text


def test_a_budget_below_one_record_runs_records_alone(
    encoder_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = headrace.run(
        ROWS, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False, batch_tokens=1
    )
    assert (report.ok, report.failed, report.batches) == (len(ROWS), 0, len(ROWS))
    assert caplog.text.count("more than batch_tokens (1): each such record runs alone") == 1


def test_a_dtype_that_runs_out_of_memory_when_tried_is_not_used(
    encoder_folder: Path, tmp_path: Path, room: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "BATCH_SHARE", 1)
    room["bfloat16"] = 300  # of its padding test alone
    report = headrace.run(ROWS, encoder_folder, sink=tmp_path / "out.jsonl", task="embed", progress=False)
    assert report.precision is not None and report.precision.dtype == "float32"
    assert report.precision.detail.startswith("bfloat16 gives NaN or no output for ")
    assert report.ok == len(ROWS)


def test_budgets_that_run_out_of_memory_leave_the_table(
    encoder_folder: Path, tmp_path: Path, room: dict[str, float]
) -> None:
    source = tmp_path / "in.jsonl"
    alike = [{"id": str(n), "text": ROWS[8]["text"]} for n in range(60)]  # in one batch, if the budget allows it
    source.write_text("".join(json.dumps(row) + "\n" for row in alike))
    settings = JobSettings(source, lambda rows: None, EngineConfig("embed", str(encoder_folder)))
    room["float32"] = 1_500  # more than the engine's own test of padding takes
    options = GridOptions((128, 256, 4_096), ("float32",), seconds=0.05)
    grid = measure(settings, options, lambda line: None)
    assert [row.measured.budget for row in grid.rows] == [128, 256]


@pytest.mark.parametrize("own", [1_024, 8_192])
def test_a_server_whose_trial_runs_out_of_memory_takes_a_smaller_budget(
    encoder_folder: Path, tmp_path: Path, room: dict[str, float], monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    room["float32"] = 1_100
    monkeypatch.setattr(torch_network, "MOST_CPU_TOKENS", own)
    config = EngineConfig("embed", str(encoder_folder), engine_options={"device": "cpu", "dtype": "float32"})
    found = warm_up(config, None, TuningCache(tmp_path))
    assert found.tokens is not None and found.tokens <= 1_024


class Peaks(PeakMeter):
    """A model of 100 MB, and 100 kB for each token of the largest batch so far."""

    largest = 0

    def restart(self) -> bool:
        return True

    def peak(self) -> int:
        return 100_000_000 + 100_000 * self.largest


@pytest.mark.parametrize(("tokens", "most"), [(700, 512), (3_000, 2_048)])
def test_a_server_takes_no_budget_that_would_fill_the_memory(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, most: int
) -> None:
    """A job follows its memory; a server keeps the budget that it begins with."""
    peaks, run = Peaks(), torch_network.TorchNetwork.run_texts

    def counted(self: torch_network.TorchNetwork, batch: TextBatch, packed: bool) -> Any:
        peaks.largest = max(peaks.largest, int(batch.lengths.sum()))
        return run(self, batch, packed)

    limit = AvailableMemory(round((100_000_000 + 100_000 * tokens) / 0.8), "a test")
    monkeypatch.setattr(torch_network.TorchNetwork, "run_texts", counted)
    monkeypatch.setattr(torch_network, "MOST_CPU_TOKENS", 1_024)  # a model this small would take more
    monkeypatch.setattr(warm_up_module, "memory_of", lambda engine: (limit, peaks))
    monkeypatch.setattr(warm_up_module, "knee", lambda points, most_s: max(points, key=lambda point: point.budget))
    config = EngineConfig("embed", str(encoder_folder), engine_options={"device": "cpu", "dtype": "float32"})
    found = warm_up(config, None, TuningCache(tmp_path)).tokens
    assert found == most


def test_a_cache_that_names_an_unknown_dtype_is_told_and_ignored(
    encoder_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig("embed", str(encoder_folder), engine_options={"device": "cpu"})
    warm_up(config, None, TuningCache(tmp_path)).engine.close()
    [kept] = tmp_path.glob("*.json")
    content = json.loads(kept.read_text())
    content["found"]["dtype"] = "float3"
    kept.write_text(json.dumps(content))
    found = warm_up(config, None, TuningCache(tmp_path))
    assert found.engine.describe()["dtype"] == "float32"
    assert "float3 was chosen for this model before, and cannot be loaded now" in caplog.text
