"""`headrace run --config FILE` with settings: flags and variables go before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.acceptance.command import headrace

SETTINGS = {
    "task": "embed",
    "engine": "headrace.testing:FakeEngine",
    "source": "in.jsonl",
    "output-file": "out.jsonl",
    "keep_columns": ["n", "text"],
    "overwrite": True,
    "limit": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"text": f"text {n}", "n": n} for n in range(5))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_a_file_gives_what_flags_do_not(folder: Path) -> None:
    status, said = headrace("run", "--config", "job.json", "--limit", "3", folder=folder)
    assert status == 0, said
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [list(row) for row in found] == [["id", "n", "text", "embedding"]] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kep_columns": "a"}, "job.json: kep_columns is no setting of a job; did you mean keep_columns?"),
        ({"limit": "many"}, "job.json: limit is 'many'"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_name(change: dict[str, str], message: str, folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(SETTINGS | change))
    status, said = headrace("run", "--config", "job.json", folder=folder)
    assert status == 2
    assert message in said
    assert "Traceback" not in said
