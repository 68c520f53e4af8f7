"""What the README and the page about batchers show is run, so that it cannot rot."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.acceptance.command import headrace

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BATCHING = (ROOT / "docs" / "batching.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README + BATCHING, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"id": f"doc-{n}", "text": "water under the mill " * (n + 1)}) for n in range(5)]
    (tmp_path / "docs.jsonl").write_text("\n".join([*rows, "no JSON"]), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number: int, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[number], f"block {number}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    shouted = "['ONE', 'TWO', 'THREE']"
    expected = ["5 embedded, 1 failed", shouted, f"{shouted}\n1 batch", "0\n2\n4\n[0, 2, 4]"]
    assert expected[number] in printed


def test_the_command_runs(documents: Path) -> None:
    [command] = re.findall(r"^headrace (run .*)$", README, flags=re.MULTILINE)
    status, said = headrace(*command.split(), folder=documents)
    assert status == 3, said  # finished, one bad line
    assert (documents / "vectors.parquet").exists()
    assert len((documents / "vectors.errors.jsonl").read_text(encoding="utf-8").splitlines()) == 1


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(re.findall(r"\]\(([\w./-]+)\)", README))


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 6_000


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+)\|", page, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named - {"all"} == set(project["optional-dependencies"]) - {"all"}
    assert project["dependencies"] == []
