"""What is foreseen of a job, beside the job: an engine whose time is known, lengths that differ across the input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.app.jobs.job import JobSettings, execute, rehearse
from headrace.cli.run import _rehearse as tell_forecast
from headrace.device.forward import ForwardMeter
from headrace.device.memory import AvailableMemory, PeakMeter
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import StopRequest
from headrace.testing import FakeEngine

FAKE = "headrace.testing:FakeEngine"


class Timed(FakeEngine):
    """4 ms a batch and 50 µs for each word of it, padding included, on a clock that stands still otherwise."""

    clock = 0.0

    def forward(self, batch: list[str]) -> list[list[float]]:
        Timed.clock += 0.004 + 50e-6 * len(batch) * max(len(text.split()) for text in batch)
        return super().forward(batch)


@pytest.mark.parametrize(("records", "batch_size"), [(300, None), (1000, 16)])
def test_the_time_foreseen_is_within_an_eighth_of_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, batch_size: int | None
) -> None:
    monkeypatch.setattr("headrace.engines.choosing.registry.create", lambda *args, **options: Timed())
    clock = SimpleNamespace(perf_counter=lambda: Timed.clock)
    monkeypatch.setattr("headrace.jobs.planning.measuring.time", clock)
    source = tmp_path / "in.jsonl"
    rows: list[dict[str, Any]] = [{"text": "word " * (1 + n * 7919 % (20 + n % 100))} for n in range(records)]
    rows[5] = {"text": None}
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    settings = JobSettings(source, output, EngineConfig(task="embed", batch_size=batch_size))
    survey, forecast = rehearse(settings)
    began = Timed.clock
    execute(settings, StopRequest(), progress=False)
    assert survey.records is not None
    assert survey.records == pytest.approx(records, rel=0.1)
    assert forecast.bytes == pytest.approx(2 * output.stat().st_size, rel=0.1)
    assert forecast.seconds == pytest.approx(Timed.clock - began, rel=0.125)


class Filled(PeakMeter):
    """40 MB for the model, and 0.1 MB for each word of the largest batch."""

    held = 40_000_000

    def restart(self) -> bool:
        return True

    def peak(self) -> int:
        return self.held


class Large(FakeEngine):
    meter = Filled()

    def hardware(self) -> dict[str, Any]:
        return {"device": "a test"}

    def dtype_speeds(self) -> dict[str, float]:
        return {}

    def forward_meter(self) -> ForwardMeter:
        return ForwardMeter(None, memory=lambda: (AvailableMemory(1_000_000_000, "a small device"), self.meter))

    def forward(self, batch: list[str]) -> list[list[float]]:
        words = len(batch) * max(len(text.split()) for text in batch)
        self.meter.held = max(self.meter.held, 40_000_000 + 100_000 * words)
        return super().forward(batch)


def test_the_memory_of_the_batches_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.engines.choosing.registry.create", lambda *args, **options: Large())
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": "word " * (1 + n % 20)}) + "\n" for n in range(500)))
    config = EngineConfig(task="embed", batch_tokens=400)
    tell_forecast(JobSettings(source, tmp_path / "out.jsonl", config), None, as_json=False)
    # 400 tokens take 40 MB, and 760 MB are 80 % without the model.
    assert "memory      80.0 MB at most, 8% of a small device; room for batches 19 times as large" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("left", [1_000_000, 20_000_000])
def test_a_disk_that_is_too_small_is_told_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(2000)))
    settings = JobSettings(
        source, tmp_path / "out.jsonl", EngineConfig(engine=FAKE, engine_options={"dimension": 2000})
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=left))
    if left < 16_000_000:
        with pytest.raises(ConfigError, match=r"cannot write .*out\.jsonl: its disk has 1\.0 MB left; make room"):
            execute(settings, StopRequest(), progress=False)
    else:
        with pytest.raises(ConfigError, match=r"the disk of .*out\.jsonl has too little room"):
            tell_forecast(settings, None, as_json=False)
    assert list(tmp_path.iterdir()) == [source]
