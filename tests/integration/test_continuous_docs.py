"""What docs/continuous.md shows and the solver example are run, so that they cannot rot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "continuous.md").read_text(encoding="utf-8")


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    environment = {"PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_the_step_function_prints_what_the_page_says() -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    [printed] = re.findall(r"^prints\n\n```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert run("-c", code) == printed


def test_the_solver_solves_and_keeps_its_slots_full() -> None:
    solved, residual = run(str(ROOT / "examples" / "solver.py")).splitlines()
    steps, full = map(int, re.findall(r"(\d+)(?: steps|%)", solved))
    assert steps < 330  # batches of 16 that wait for their slowest take 391
    assert full > 80
    assert float(residual.split()[-1]) < 1e-6


def test_the_arithmetic_model_answers_what_it_has_never_seen_as_the_page_says() -> None:
    [shown] = re.findall(r"and counts:\n\n```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    printed = run(str(ROOT / "examples" / "sums.py"), "40")
    assert re.sub(r"\d+ of \d+", "all", printed) == re.sub(r"\d+ of \d+", "all", shown).replace(
        "16\n", "16 --limit 40\n"
    )
    assert "words: 20 of 20 right" in printed


def test_the_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
