"""A job that an earlier version has begun: its folder was written when settings were one flat list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.acceptance.command import headrace

BEGUN = Path(__file__).parent / "begun_before"
COMMAND = ("-i", "in.jsonl", "-o", "out.jsonl", "--task", "custom", "--engine", "upper:make", "--batch-size", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(BEGUN, tmp_path, dirs_exist_ok=True)
    state = tmp_path / "out.jsonl.parts" / "job.json"
    kept = json.loads(state.read_text())
    kept["settings"]["source"] = str(tmp_path / "in.jsonl")
    state.write_text(json.dumps(kept))
    return tmp_path


def test_it_continues_where_it_was(folder: Path) -> None:
    status, said = headrace("run", *COMMAND, "--suffix", "!", folder=folder)
    assert status == 3, said
    assert "wrote out.jsonl: 11 of 12 records, 1 failed" in said
    seen = (folder / "seen.txt").read_text().split()
    assert sorted(seen) == sorted(f"text{number}" for number in range(5, 13))  # the first four were done
    outputs = [json.loads(line)["output"] for line in (folder / "out.jsonl").read_text().splitlines()]
    assert outputs == [f"TEXT{number}!" for number in range(1, 13) if number != 3]


def test_once_finished_it_can_be_inspected_and_retried(folder: Path) -> None:
    headrace("run", *COMMAND, "--suffix", "!", folder=folder)
    status, said = headrace("inspect", "out.jsonl", folder=folder)
    assert status == 0
    assert "custom upper:make of" in said
    code = folder / "upper.py"
    code.write_text(code.read_text().replace('ValueError("empty")', '"MENDED"'))
    status, said = headrace("retry", "out.jsonl", "--batch-size", "1", folder=folder)
    assert status == 0, said
    assert json.loads((folder / "out.jsonl").read_text().splitlines()[2]) == {"id": 3, "output": "MENDED"}


def test_other_parameters_are_refused_in_one_line(folder: Path) -> None:
    status, said = headrace("run", *COMMAND, "--text-column", "id", folder=folder)
    assert status == 2
    assert "--text-column was 'text', now 'id'" in said.splitlines()[-1]
    assert not (folder / "seen.txt").exists()
