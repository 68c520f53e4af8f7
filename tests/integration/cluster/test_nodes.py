"""A whole node dies in the middle of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(240)
@pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it")
def test_a_lost_node_costs_no_record(rows: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    rows(20_000)
    (tmp_path / "journals").mkdir()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(Path(__file__).with_name("lose_a_node.py")), str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"state"')))
    assert said == {"state": "finished", "records": 20_000, "lost": 1}
    rows_out = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows_out == [f"r{n}" for n in range(20_000)]
