from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.jobs.harness import Runner, texts, write_rows

ROWS = 700


@pytest.fixture(params=["out.parquet", "out.jsonl"])
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Runner:
    """700 good rows, into each format."""
    return Runner(write_rows(tmp_path / "in.jsonl", texts(ROWS)), tmp_path / request.param)
