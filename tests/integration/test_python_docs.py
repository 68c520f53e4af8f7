"""What docs/python.md shows is run, so that it cannot rot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.acceptance.command import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
LOADED, MODULE, PLAIN, BACKGROUND = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files the page speaks of."""
    rows = [{"text": f"Return the running event loop {number}."} for number in range(20)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_loaded_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(LOADED, "python.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [str(number) for number in range(20)]
    assert (folder / "vectors.parquet").exists()


def test_a_torch_model(folder: Path) -> None:
    exec(compile(f"{MODULE}\n{PLAIN}", "python.md", "exec"), shown := {"__name__": "python.md"})
    digits = pq.read_table(folder / "digits.parquet")
    assert digits["id"].to_pylist() == [f"digit {number}" for number in range(1000)]
    assert [sum(row) for row in digits["output"].to_pylist()] == pytest.approx([1] * 1000, abs=0.02)
    assert len(pq.read_table(folder / "scores.parquet")) == 1000
    assert np.stack(shown["scores"]).shape == (10, 10)


@pytest.mark.usefixtures("folder")
def test_a_job_in_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, object] = {"__name__": "python.md"}
    exec(compile(BACKGROUND, "python.md", "exec"), shown)
    assert getattr(shown["report"], "ok", None) == 20
    assert "records are finished" in capsys.readouterr().out
