"""What `headrace tune` finds of n-gram speculation and of an 8-bit key-value cache for vLLM. It starts it for each.

.venv-vllm/bin/python -m benchmarks.step_additions_vllm --minutes 9   # and again, until the table is complete
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.common import Parts, new_cache, report
from benchmarks.step_sizes import KINDS
from benchmarks.step_sizes_vllm import DEFAULT, OPTIONS, saved_networks, written
from headrace.app import step_grid
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.settings import JobSettings

PROMPTS = 128


def tuned(model: Path, source: Path) -> list[dict[str, Any]]:
    """What is said of each addition at the default size, as a user would call it."""
    config = EngineConfig("generate", str(model), "vllm", OPTIONS)
    settings = JobSettings(source, list[dict[str, Any]]().extend, config, text_column="prompt")
    with new_cache(), patch.object(step_grid, "_OF_VLLM", ([DEFAULT.answers], [DEFAULT.tokens])):
        return [asdict(addition) for addition in step_grid.measure_steps(settings, 60).additions]


def main() -> None:
    """Measure each model with each kind of prompts and print the table."""
    parts, rows = Parts("step_additions_vllm"), list[list[Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, model, _ in saved_networks(folder):
            for kind in KINDS:
                source = written(folder, kind, PROMPTS)
                for one in parts.once(f"{name} {kind}", partial(tuned, model, source)):
                    stays = "stays" if one["stays"] else one["why_not"].split(":")[0]
                    rows.append([name, kind, one["name"], one["speed"], one["same"], stays])
    parts.done()
    note = (
        f"{PROMPTS} prompts as in `benchmarks.step_sizes`, random weights, float32, greedy, at {DEFAULT.answers} "
        f"answers and {DEFAULT.tokens} tokens a step; one measurement of each, and a second without it where "
        "it is faster."
    )
    columns = ["model", "prompts", "with it", "x records/s", "same answers", "tune says"]
    report("step_additions_vllm", "What else `headrace tune` tries with vLLM", columns, rows, [note])


if __name__ == "__main__":
    main()
