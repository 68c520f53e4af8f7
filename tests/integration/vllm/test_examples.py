"""The question examples with vLLM behind them: on Ray Serve, and in Flyte's local mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REAL = os.environ.get("HEADRACE_GSM8K")


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.skipif(not REAL, reason="no such file"))])
@pytest.mark.parametrize(("example", "ways"), [("questions", 1), ("questions_flyte", 2)])
def test_the_examples_generate_with_vllm(example: str, ways: int, real: bool, tmp_path: Path) -> None:
    pytest.importorskip("ray" if example == "questions" else "flyte")
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_GSM8K"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "QUESTIONS_ENGINE": "vllm"}
    if real:
        environment["HEADRACE_GSM8K"] = str(Path(str(REAL)).resolve())
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    # The model can do sums; to a real question it says something.
    assert ended.stdout.count("400 answers" if real else "400 of 400 right") == ways, ended.stderr
