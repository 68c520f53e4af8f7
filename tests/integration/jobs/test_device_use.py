"""A job says what its device did: computing time, arithmetic as PyTorch counts it, and a share of a measured peak."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_models import text_model
from torch.utils.flop_counter import FlopCounterMode

import headrace
from headrace.app.jobs import device_use
from headrace.device import native
from headrace.device.cache import TuningCache
from headrace.device.forward import ForwardMeter, NetworkSize
from headrace.device.nvml import GpuActivity, GpuReading
from headrace.engines.text.embedding import EmbeddingEngine
from headrace.engines.text.options import Embedding
from headrace.events import DeviceUsed, Event, JobDone, JobStarted


def test_the_arithmetic_is_what_pytorch_counts(tmp_path: Path) -> None:
    engine = EmbeddingEngine(
        Embedding(model=text_model(tmp_path, head=False, hidden_size=32), dtype="float32", device="cpu")
    )
    meter = engine.forward_meter()
    assert meter is not None
    before = meter.read()
    text = engine.prepare(["the canal feeds a mill and its wheel turns"])[0].payload  # type: ignore[union-attr]
    with FlopCounterMode(display=False) as counter:
        engine.forward([text, text])
    done = meter.read().since(before)
    assert done.passes == 1 and done.seconds > 0
    # PyTorch does not count attention on CPUs, which is little here; the pooler counts for one token of each text.
    assert done.operations == pytest.approx(counter.get_total_flops(), rel=0.1)
    weights = sum(one.numel() for one in engine.network.module[0].model.encoder.parameters())  # type: ignore[attr-defined]
    assert done.weight_bytes == pytest.approx(4 * weights, rel=0.1)


def test_a_job_reports_it_and_measures_the_peak_once(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def peaks(kind: str, dtype: str) -> dict[str, float]:
        measured.append(f"{kind} {dtype}")
        return {"operations": 1e15, "bytes": 1e12}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # not what earlier tests have measured
    monkeypatch.setattr(native, "peaks", peaks)
    monkeypatch.setattr(device_use, "WORTH_S", 0.0)
    rows = [{"id": str(n), "text": "a canal feeds a mill " * (n % 5 + 1)} for n in range(100)]
    for name in ("one", "two"):
        report = headrace.run(rows, encoder_folder, sink=tmp_path / f"{name}.jsonl", task="embed", progress=False)
        device = report.device
        assert device is not None and 0 < device.computed <= report.busy + 0.02
        computing = report.causes["real"] + report.causes["padding"]
        assert computing / report.wall_s == pytest.approx(device.computed, abs=0.02)
        assert device.operations_per_record > 0 and device.mfu is not None and 0 < device.mfu < 1
        kept = json.loads((tmp_path / f"{name}.jsonl.parts" / "report.json").read_text())
        assert kept["runs"][-1]["figures"]["device"]["mfu"] == device.mfu
    assert measured == ["cpu float32"]


def test_peaks_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(0 < value < math.inf for value in native.peaks("cpu", "float32").values())
    assert native.peaks("cpu", "int8") == {}
    monkeypatch.setattr(native, "best_s", lambda run, device: len(run()) * 1e-6)
    found = native.peaks("cpu", "float32")  # a product of 1,024 rows, and a copy of 16 Mi numbers of four bytes
    assert found == pytest.approx({"operations": 2 * 1024**3 / 1024e-6, "bytes": 2 * 4 / 1e-6})


def test_a_gpu_is_measured_with_products_that_take_longer_than_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no type would seem faster than another there."""
    operations: list[int] = []
    monkeypatch.setattr(native, "product_of", lambda shape, dtype, device: operations.append(2 * math.prod(shape)))
    monkeypatch.setattr(native, "speed_ratio", lambda exact, half, device: 4.0)
    assert native._speed(torch.bfloat16, torch.device("cuda")) == pytest.approx(4)
    assert min(operations) / 1e15 >= 30e-6, "a launch and a wait take some 10 µs, at 1,000 TFLOP/s"


def test_peaks_of_a_model_on_the_second_gpu_are_measured_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def describe(self) -> dict[str, str]:
            return {"dtype": "bfloat16"}

        def hardware(self) -> dict[str, str]:
            return {"device": "a GPU"}

    measured: list[str] = []
    monkeypatch.setattr(native, "peaks", lambda device, dtype: measured.append(device) or {"operations": 1e15})
    engine: Any = Engine()
    meter = ForwardMeter(NetworkSize(1, 1, 1), "GPU-1", device="cuda:1")
    watch = device_use.DeviceWatch(engine, meter, lambda event: None, TuningCache(tmp_path), None)
    meter.add(9.0, [512])
    watch(JobDone("finished", 3.0))
    assert measured == ["cuda:1"]


def test_energy_is_that_of_the_job(tmp_path: Path) -> None:
    class Gpu:
        readings = iter([GpuReading(100.0, 1_000.0, 700.0), GpuReading(160.0, 1_900.0, 650.0)])

        def read(self) -> GpuReading:
            return next(self.readings)

        def activity(self, first: GpuReading, last: GpuReading) -> GpuActivity:
            assert (first.energy_j, last.energy_j) == (100.0, 160.0)
            return GpuActivity(0.9, 0.5, 0.25)

    class Engine:
        def describe(self) -> dict[str, str]:
            return {"dtype": "float16"}

    told: list[Event] = []
    meter = ForwardMeter(None, "GPU-1")
    meter.add(9.0, [])  # before the job: not counted
    engine: Any = Engine()
    gpu: Any = Gpu()
    watch = device_use.DeviceWatch(engine, meter, told.append, TuningCache(tmp_path), gpu)
    watch(JobStarted(None, None, 0, 0.0))
    meter.add(0.5, [])
    watch(JobDone("finished", 3.0))
    [used] = told
    assert isinstance(used, DeviceUsed)
    assert (used.computed_s, used.energy_j, used.clock_mhz, used.operations) == (0.5, 60.0, 1_900.0, 0.0)
    assert (used.power_limit_w, used.kernels, used.tensor_cores, used.memory_bus) == (650.0, 0.9, 0.5, 0.25)
    assert np.isfinite(used.at) and not torch.cuda.is_initialized()
