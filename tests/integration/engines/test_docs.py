"""What docs/engines.md shows is run, so that it cannot rot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import ROOT, headrace

from examples.digits import main as write_digits
from headrace.engines.choosing.registry import engine_names
from headrace.engines.tasks import known_tasks

PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
TEXTS = [
    "Return the running event loop.",
    "Parse the headers of an email message.",
    "Create a window with a button widget.",
    "Fail the test unless both are equal.",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files the page speaks of."""
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    write_digits(tmp_path / "digits")
    handler, function, whole = blocks("python")
    (tmp_path / "my_handler.py").write_text(handler)
    (tmp_path / "my_engine.py").write_text(function)
    (tmp_path / "my_words.py").write_text(whole)
    (tmp_path / "model-config.yaml").write_text(blocks("yaml")[0])
    return tmp_path


COMMANDS = [block for block in blocks("console") if "onnx" not in block and "\n$ head " in block]


@pytest.mark.parametrize("block", COMMANDS, ids=[block.split()[3] for block in COMMANDS])
def test_a_command_writes_what_the_page_shows(block: str, folder: Path) -> None:
    command, said, head, shown = block.strip().splitlines()
    status, output = headrace(*command.split()[2:], folder=folder)
    assert status == (3 if "failed" in said else 0)
    assert said in output
    with (folder / head.split()[-1]).open(encoding="utf-8") as file:
        assert_like(json.loads(file.readline()), json.loads(shown))


def assert_like(found: Any, shown: Any) -> None:
    """Equal, but for the last digits of numbers, which follow the machine."""
    if isinstance(shown, float):
        assert found == pytest.approx(shown, abs=1e-4)
    elif isinstance(shown, dict | list):
        pairs = shown.items() if isinstance(shown, dict) else enumerate(shown)
        assert len(found) == len(shown)
        for key, value in pairs:
            assert_like(found[key], value)
    else:
        assert found == shown


def test_the_table_has_every_task_and_engine() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]*) \|$", PAGE, flags=re.MULTILINE)
    told = {task: re.findall(r"`(\w+)`", engines) for task, engines in rows if task in known_tasks()}
    assert set(told) == set(known_tasks())
    assert {task: names for task, names in told.items() if task != "generate"} == {
        task: list(engine_names(task)) for task in known_tasks() if task != "generate"
    }
