"""Compare the time that `--dry-run` forecasts with the time that the job takes: docstrings embedded in three sizes.

python -m benchmarks.forecast
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.common import quick, report
from examples.docstrings import collect
from headrace.app.jobs.job import JobSettings, execute, rehearse
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.pipeline.job import StopRequest

SIZES = (100, 200) if quick() else (300, 1000, 3000)
ALLOWED = 0.25


def write(path: Path, texts: list[str]) -> None:
    """As JSON Lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main() -> None:
    """Rehearse and run each size, and print the table."""
    found = list(collect().values())
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES:
            source, sink = Path(name) / f"{size}.jsonl", Path(name) / f"{size}.parquet"
            write(source, found[:: len(found) // size][:size])
            settings = JobSettings(source, sink, EngineConfig(task="embed", engine_options={"device": "cpu"}))
            _, forecast = rehearse(settings)
            _, ended = execute(settings, StopRequest(), progress=False)
            assert forecast.seconds is not None and forecast.bytes is not None
            rows.append((size, forecast.seconds, ended.wall_s, forecast.seconds / ended.wall_s, forecast.bytes))
    worst = max(abs(row[3] - 1) for row in rows)
    report(
        "forecast",
        "**A forecast and the job**: embedding docstrings with all-MiniLM-L6-v2 on a CPU, without loading the model.",
        ("records", "forecast s", "real s", "forecast / real", "forecast bytes"),
        rows,
        [f"Allowed: within {ALLOWED:.0%}; the worst is off by {worst:.0%}."],
    )


if __name__ == "__main__":
    main()
