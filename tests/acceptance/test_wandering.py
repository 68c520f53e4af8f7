"""User code may change the current folder, or close its streams: the job goes on where it began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.acceptance.command import headrace

MINE = "tests.acceptance.wandering"
ROWS = 40
ENGINE = ("--task", "custom", "--engine", f"{MINE}:engine", "--max-error-rate", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    rows = ({"id": n, "text": f"text #{n}"} for n in range(ROWS))
    (tmp_path / "here" / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "here"


def run(folder: Path, *command: str | Path, status: int = 0, **environment: str) -> str:
    ended, said = headrace(*command, folder=folder, INPUT=str(folder / "in.jsonl"), **environment)
    assert ended == status, said
    return said


def ids(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("to", ["/", "import", "gone"])
def test_relative_paths_are_those_of_the_start(folder: Path, to: str) -> None:
    pytest.importorskip("vl_convert", reason="needs headrace[report]")
    (folder / "bad").touch()
    job = ("run", "-i", "in.jsonl", "-o", "out.jsonl", *ENGINE, "--report", "page.html", "--trace", "trace.json")
    said = run(folder, *job, status=3, WANDERS=to)
    there = f"{folder}/"
    assert f"wrote {there}out.jsonl: 39 of 40 records, 1 failed, see {there}out.errors.jsonl" in said
    assert f"wrote {there}page.html" in said
    assert (folder / "page.html").stat().st_size
    assert json.loads((folder / "trace.json").read_text())
    assert "39 ok, 1 failed" in run(folder, "inspect", "out.jsonl")
    (folder / "bad").unlink()
    run(folder, "retry", "out.jsonl", WANDERS=to)
    assert ids(folder / "out.jsonl") == list(range(ROWS))


def test_a_glob_a_folder_and_steps_are_those_of_the_start(folder: Path) -> None:
    (folder / "[x]").mkdir()
    (folder / "[x]" / "more").mkdir()
    (folder / "in.jsonl").rename(folder / "[x]" / "more" / "a.jsonl")
    there = folder / "[x]"
    steps = [{"name": name, "engine": f"{MINE}:engine"} for name in ("one", "two")]
    (there / "steps.json").write_text(json.dumps({"steps": steps}))
    run(there, "run", "-i", "more/*.jsonl", "-o", "out/", "--config", "steps.json")
    assert [n for part in sorted((there / "out").glob("part-*")) for n in ids(part)] == list(range(ROWS))
    run(there, "run", "-i", "more", "-o", "two.jsonl", *ENGINE)
    assert ids(there / "two.jsonl") == list(range(ROWS))


def test_a_map_in_threads_changes_nothing_either(folder: Path) -> None:
    flags = ("--map", f"{MINE}:mapped", "--worker-kind", "thread", "--engine", "headrace.testing:FakeEngine")
    run(folder, "run", "-i", "in.jsonl", "-o", "out.jsonl", *flags)
    assert ids(folder / "out.jsonl") == list(range(ROWS))


def test_a_current_folder_that_is_deleted_matters_to_relative_paths_only(folder: Path, tmp_path: Path) -> None:
    before = "import os, pathlib; os.chdir(os.environ['GONE']); pathlib.Path(os.environ['GONE']).rmdir(); "

    def started(*command: str | Path) -> tuple[int, str]:
        (tmp_path / "gone").mkdir()
        return headrace(
            *command, folder=folder, before=before, GONE=str(tmp_path / "gone"), INPUT=str(folder / "in.jsonl")
        )

    flags = ("--engine", "headrace.testing:FakeEngine")
    status, said = started("run", "-i", folder / "in.jsonl", "-o", folder / "out.jsonl", *flags)
    assert status == 0, said
    status, said = started("run", "-i", folder / "in.jsonl", "-o", "out.jsonl", *flags)
    assert (status, "the current folder has been deleted; name it with its whole path" in said) == (2, True), said
    status, said = started("inspect", folder / "out.jsonl")
    assert status == 0, said


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["closing", "dropping"])
def test_user_code_that_closes_a_stream_does_not_end_the_job(folder: Path, how: str, stream: str) -> None:
    job = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--task", "custom", "--engine", f"{MINE}:{how}")
    said = run(folder, *job, CLOSES=stream)
    assert ids(folder / "out.jsonl") == list(range(ROWS))
    if stream == "stdout":
        assert "wrote out.jsonl: 40 of 40 records" in said
