"""A worker's process, an actor and a whole node are lost in the middle of a long job: every record comes once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORDS = 100_000
IN_FLIGHT = 3 * 1024
"""Most records that one worker has."""


@pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it")
def test_whatever_is_lost_every_record_of_a_long_job_comes_once(rows: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    rows(RECORDS)
    (tmp_path / "journals").mkdir()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(Path(__file__).with_name("lose_workers.py")), str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"state"')))
    assert 3 <= said.pop("lost") <= 4, "a process, an actor, and what the node held"
    assert said == {"state": "finished", "records": RECORDS, "ok": RECORDS}
    ids = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ids == [f"r{n}" for n in range(RECORDS)]
    journals = (tmp_path / "journals").glob("*.txt")
    done = Counter(line for file in journals for line in file.read_text().splitlines())
    assert len(done) == RECORDS
    assert done.total() - RECORDS <= 4 * IN_FLIGHT
