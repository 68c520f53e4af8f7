"""What is foreseen of a job, beside the job: an engine whose time is known, lengths that differ across the input."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.jobs.job import StopRequest
from headrace.testing import FakeEngine
from headrace.wiring import JobSettings, execute, rehearse


class Timed(FakeEngine):
    """4 ms a batch and 50 µs for each word of it, padding included."""

    def forward(self, batch: list[str]) -> list[list[float]]:
        time.sleep(0.004 + 50e-6 * len(batch) * max(len(text.split()) for text in batch))
        return super().forward(batch)


@pytest.mark.parametrize(("records", "batch_size"), [(300, None), (1000, 16)])
def test_the_time_foreseen_is_within_a_quarter_of_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, batch_size: int | None
) -> None:
    monkeypatch.setattr("headrace.engines.registry.create", lambda *args, **options: Timed())
    source = tmp_path / "in.jsonl"
    rows: list[dict[str, Any]] = [{"text": "word " * (1 + n * 7919 % (20 + n % 100))} for n in range(records)]
    rows[5] = {"text": None}
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = JobSettings(source, tmp_path / "out.jsonl", task="embed", batch_size=batch_size)
    survey, forecast = rehearse(settings)
    _, report = execute(settings, StopRequest(), progress=False)
    assert survey.records is not None
    assert survey.records == pytest.approx(records, rel=0.1)
    assert forecast.seconds == pytest.approx(report.wall_s, rel=0.25)
    written = (tmp_path / "out.jsonl").stat().st_size
    assert forecast.bytes == pytest.approx(2 * written, rel=0.1)
