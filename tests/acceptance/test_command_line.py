"""What the command says and how it ends, for good input and for every kind of bad one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import FAKE, PROGRAM, ROOT, end, headrace, lines_of, start, traced
from tests.acceptance.warm import Forked

import headrace as package


def write(folder: Path, *rows: Any) -> None:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


GOOD = [{"id": f"r{n}", "text": f"text number {n}"} for n in range(30)]


def test_a_job_reports_writes_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    write(tmp_path, *GOOD)
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE)
    status, said = headrace(*command, folder=tmp_path, imported="nothing")
    assert status == 0
    assert said.endswith("headrace: wrote out.jsonl: 30 of 30 records\n")
    for stage in ("load", "prepare", "starved", "inference", "finish", "write"):
        assert f"time: {stage}" in said
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        row["id"] for row in GOOD
    ]
    status, said = headrace(*command, folder=tmp_path)
    assert status == 0
    assert said.endswith("headrace: out.jsonl is already finished: 30 records; nothing to do\n")
    status, said = headrace(*command, "--max-model-len", "2", folder=tmp_path)
    assert status == 2
    assert "--max-model-len was not set, now 2" in said
    assert headrace(*command, "--max-model-len", "2", "--overwrite", folder=tmp_path)[0] == 0


def test_some_failed_records_show_in_status_summary_and_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        *GOOD,
        b"{broken",
        b'{"id": "u", "text": "\xff"}',
        {"id": "m"},
        {"id": "n", "text": None},
        {
            "id": "x",
            "text": 5,
        },
        {"id": "long", "text": "one two three four"},
    )
    command = ("run", "-i", "in.jsonl", "-o", "out.parquet", "--on-too-long", "error", "--max-model-len", "3", *FAKE)
    status, said = headrace(*command, folder=tmp_path)
    assert status == 3
    assert said.endswith("headrace: wrote out.parquet: 30 of 36 records, 6 failed, see out.errors.jsonl\n")
    letters = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [letter["position"] for letter in letters] == [30, 31, 32, 33, 34, 35]
    status, said = headrace(*command, folder=tmp_path)
    assert (status, "6 failed" in said) == (3, True)


def test_a_job_that_is_mostly_errors_ends_with_status_1(tmp_path: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE)
    write(tmp_path, {"id": 0, "text": "good"}, *[{"id": n, "text": None} for n in range(1, 200)])
    status, said = headrace(*command, folder=tmp_path)
    assert status == 1
    assert "more than --max-error-rate 0.5 allows" in said
    assert not (tmp_path / "out.jsonl").exists()
    assert headrace(*command, "--max-error-rate", "1", folder=tmp_path)[0] == 3


def test_an_empty_file_is_a_finished_job(tmp_path: Path) -> None:
    write(tmp_path)
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.parquet", *FAKE, folder=tmp_path)
    assert status == 0
    assert "0 of 0 records" in said
    assert "in.jsonl holds no records" in lines_of(said)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["-i", "none.jsonl"], "headrace: cannot read input file none.jsonl: No such file or directory"),
        (["-o", "none/out.jsonl"], "headrace: cannot write none/out.jsonl: there is no folder none; create it"),
        (["-o", "out.txt"], "end it in one of .csv, .jsonl, .parquet, .tsv"),
        (["--text-column", "body"], "has a column 'body'; they have id, text; name yours with --text-column"),
        (["--text-column", "txt"], "they have id, text; name yours with --text-column; did you mean text?"),
        (["--limit", "x"], "--limit is 'x'; it must be a whole number"),
        (["--limit", "0"], "--limit is 0; it must be >= 1"),
        (["--id-column", "key"], "has a column 'key'; they have id, text; name yours with --id-column"),
        (["--task", "dance"], "unknown task 'dance'; known: embed"),
        (["--engine", "nowhere:Engine"], "cannot import nowhere"),
        (["--engine", "headrace.testing:Nothing"], "no attribute 'Nothing'"),
        (["--max-error-rate", "2"], "--max-error-rate"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path: Path, change: list[str], message: str) -> None:
    write(tmp_path, *GOOD)
    engine = () if change[0] in ("--engine", "--task") else FAKE
    files = [word for pair in (("-i", "in.jsonl"), ("-o", "out.jsonl")) if pair[0] not in change for word in pair]
    status, said = headrace("run", *files, *engine, *change, folder=tmp_path)
    assert status == 2
    assert message in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    if said.startswith("headrace:"):
        assert len(lines_of(said)) == 1


def test_an_unknown_model_is_one_clear_line(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    write(tmp_path, *GOOD)
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "no/such", folder=tmp_path)
    assert (status, len(said.splitlines())) == (2, 1)
    assert "'no/such'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_engine_that_cannot_be_made_is_one_line_too(tmp_path: Path) -> None:
    write(tmp_path, *GOOD)
    engine = ("--task", "embed", "--engine", "tests.acceptance.engines:broken")
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *engine, folder=tmp_path)
    assert status == 2
    assert "KeyError" in said
    assert len(lines_of(said)) == 1


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-", "2>&1 | true"])
def test_a_job_does_not_end_for_want_of_somebody_to_tell(tmp_path: Path, stderr: str) -> None:
    write(tmp_path, *GOOD)
    command = shlex.join([*PROGRAM, "run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE])
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    shell = ["bash", "-o", "pipefail", "-c", f"{command} {stderr}"]
    ended = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert ended.returncode == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(GOOD)


def test_a_name_that_no_file_can_have_is_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path, *GOOD)
    for option in ("-i", "-o"):
        names = {"-i": "in.jsonl", "-o": "out.jsonl", option: f"{'n' * 300}.jsonl"}
        status, said = headrace("run", *(word for pair in names.items() for word in pair), *FAKE, folder=tmp_path)
        assert (status, "File name too long" in said, len(said.splitlines())) == (2, True, 1)


def test_version_and_help(tmp_path: Path) -> None:
    assert headrace("--version", folder=tmp_path, imported="nothing") == (0, f"headrace {package.__version__}\n")
    status, said = headrace("run", "--help-all", folder=tmp_path)
    assert status == 0
    for words in ("Exit status", "some records failed", "--max-error-rate", "--on-too-long"):
        assert words in said


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks on Linux alone")
def test_the_tests_own_forks_end_as_new_processes_do(tmp_path: Path) -> None:
    commands = ("--version",), ("run", "--no-such-flag"), ("inspect", "none.jsonl")
    forks = [start(*command, folder=tmp_path) for command in commands]
    assert {type(fork) for fork in forks} == {Forked}
    ended = [headrace(*command, folder=tmp_path, imported="nothing") for command in commands]
    assert [end(fork) for fork in forks] == ended
    assert [status for status, _ in ended] == [0, 2, 2]
    with traced(start("run", "-i", "in.jsonl", folder=tmp_path)) as killed:
        killed.kill()
        assert killed.wait() == -signal.SIGKILL


def test_without_typer_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('typer')")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == 'headrace: the command line needs typer: pip install "headrace[cli]"\n'
