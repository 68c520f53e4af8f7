"""What docs/formats.md shows is run, so that it cannot rot."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.acceptance.command import PROGRAM, ROOT

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
COMMANDS = [
    (command, said)
    for command, said in re.findall(r"^\$ (.*headrace run .*)\n(headrace: .*)$", PAGE, flags=re.MULTILINE)
    if "s3://" not in command and "--task image" not in command
]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """The files that the page speaks of."""
    questions = [{"question": f"A mill has {n} sacks. How many?", "answer": f"{n}"} for n in range(100)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    notes = "".join(f'{n},Wheel {n},"The wheel turns\nat {n} rounds."\n' for n in range(1, 6))
    (tmp_path / "notes.csv").write_text("id,title,body\n" + notes)
    request = {"method": "POST", "url": "/v1/embeddings"}
    bodies = [{"input": "one"}, {"input": "two"}, {"input": ["three", "four"]}, {"input": "five"}]
    rows = [{"custom_id": f"request-{n}", "body": body} | request for n, body in enumerate(bodies, 1)]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_commands_say_what_is_shown(inputs: Path, command: str, said: str) -> None:
    program = f"{shlex.join(PROGRAM)} run --engine headrace.testing:FakeEngine"
    ended = subprocess.run(
        command.replace("headrace run", program).replace("--max-tokens 16", ""),  # which only a generator has
        shell=True,
        cwd=inputs,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr.splitlines()[-1] == said


def test_all_local_examples_are_among_them() -> None:
    assert len(COMMANDS) == 3


def test_the_python_block_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    [block, printed] = re.findall(r"^```python\n(.*?)^```$.*?^```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)[0]
    exec(compile(block, "docs/formats.md", "exec"), {})
    assert capsys.readouterr().out == printed
