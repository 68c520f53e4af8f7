"""What docs/python.md shows is run, so that it cannot rot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.acceptance.command import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
LOADED, BACKGROUND = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


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


@pytest.mark.usefixtures("folder")
def test_a_job_in_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, object] = {"__name__": "python.md"}
    exec(compile(BACKGROUND, "python.md", "exec"), shown)
    assert getattr(shown["report"], "ok", None) == 20
    assert "records are finished" in capsys.readouterr().out
