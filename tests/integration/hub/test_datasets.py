"""Datasets of the hub as inputs and outputs, by unchanged clients of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.acceptance.command import ROOT

pytest.importorskip("datasets")


def test_datasets_are_read_at_one_commit_and_pushed_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    program = [sys.executable, "-m", "tests.integration.hub.dataset_jobs", str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
