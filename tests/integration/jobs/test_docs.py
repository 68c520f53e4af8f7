"""What docs/jobs.md says is tried, so that it cannot rot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from tests.acceptance.command import FAKE, ROOT, headrace

from headrace.cli import outcome as ending
from headrace.cli.app import VERBS, app

PAGE = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
BEFORE = 'row["text"].strip()'


def said_after(command: str) -> str:
    """The last line of a command's messages, where the page shows it for the last time."""
    shown = PAGE[PAGE.rindex(f"$ {command}\n") :].partition("```")[0].partition("\n$ ")[0]
    return [line for line in shown.splitlines() if line.startswith("headrace: ")][-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [json.dumps({"name": f"n{n}", "text": f"text {n}"}) for n in range(1500)]
    rows[100], rows[700], rows[1100] = rows[100][:20], '{"name": "nothing"}', '{"name": "null", "text": null}'
    (tmp_path / "docs.jsonl").write_text("\n".join(rows))
    [mended] = re.findall(r"^```python\n(def prepare.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mended.py").write_text(mended)
    (tmp_path / "mine.py").write_text(f"def prepare(row):\n    return row | {{'text': {BEFORE}}}\n")
    return tmp_path


def test_a_run_and_a_retry_say_what_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = "run -i docs.jsonl -o vectors.parquet --id-column name --map mine:prepare"
    status, said = headrace(*run.split(), *FAKE, folder=folder)
    assert (status, said.splitlines()[-1]) == (3, said_after(f"headrace {run}"))
    (folder / "mended.py").rename(folder / "mine.py")
    status, said = headrace("retry", "vectors.parquet", folder=folder)
    assert (status, said.splitlines()[-1]) == (3, said_after("headrace retry vectors.parquet"))


def test_every_flag_and_status_there_is_is_one() -> None:
    group = typer.main.get_command(app)
    commands = [group.get_command(None, name) for name in VERBS]  # type: ignore[attr-defined]
    known = {
        name
        for command in commands
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    text = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    others = {
        "--kills",
        "--steps",
        "--columns",
        "--input",
        "--system-prompt",
    }  # of others
    assert set(re.findall(r"`(--[a-z-]+)", text)) - others <= known
    told, ends = (
        {number for numbers in re.findall(form, where, flags=re.MULTILINE) for number in numbers.split(", ")}
        for form, where in ((r"^\| (\d[\d, ]*) \|", text), (r"^(\d[\d, ]*) - ", ending.STATUSES))
    )
    assert told == ends
