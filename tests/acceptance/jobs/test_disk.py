"""A disk that is full, and places that cannot be written: one line, nothing lost, nothing done twice."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.acceptance.command import FAKE, PROGRAM, ROOT, headrace, lines_of

LIMIT = 60_000
"""Bytes of a file, beyond which a write fails: what a full disk looks like to a program."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"id": n, "text": f"text {n} " + "word " * (n % 50)} for n in range(3_000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_disk_that_fills_up_in_the_middle_of_a_part(folder: Path, name: str) -> None:
    command = ("run", "-i", "in.jsonl", "-o", name, *FAKE)
    full = subprocess.run(
        [*PROGRAM, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 75, full.stderr
    assert "Traceback" not in full.stderr
    assert "cannot write" in full.stderr.splitlines()[-1]
    assert "run again to continue" in full.stderr.splitlines()[-1]
    assert not (folder / name).exists()
    assert not list((folder / f"{name}.parts").glob("*.tmp"))

    assert headrace(*command, folder=folder)[0] == 0
    assert headrace("run", "-i", "in.jsonl", "-o", f"whole-{name}", *FAKE, folder=folder)[0] == 0
    assert (folder / name).read_bytes() == (folder / f"whole-{name}").read_bytes()


def test_a_place_that_cannot_be_written_is_one_clear_line(folder: Path) -> None:
    for place in ("/proc/out.jsonl", "/sys/out.parquet"):
        status, said = headrace("run", "-i", "in.jsonl", "-o", place, *FAKE, folder=folder)
        assert status == 2, said
        assert f"cannot write {place}" in said
        assert len(lines_of(said)) == 1


def test_a_folder_without_permission_is_told_before_a_model_is_loaded(folder: Path) -> None:
    """Of root those powers are taken that let it write anywhere."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if drop and shutil.which("setpriv") is None:
        pytest.skip("root may write anywhere")
    (folder / "fixed").mkdir(mode=0o555)
    for place in ("fixed/out.jsonl", "fixed/"):
        for more in ((), ("--dry-run",)):
            command = (
                "run",
                "-i",
                "in.jsonl",
                "-o",
                place,
                "--task",
                "embed",
                "--engine",
                "tests.acceptance.engines:broken",
                *more,
            )
            ended = subprocess.run(
                [*drop, *PROGRAM, *command],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 2
            assert "fixed is read-only for this user; choose another output" in ended.stderr
    assert list((folder / "fixed").iterdir()) == []


def test_a_finished_job_is_finished_on_a_disk_that_takes_nothing(folder: Path) -> None:
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if drop and shutil.which("setpriv") is None:
        pytest.skip("root may write anywhere")
    fixed = folder / "fixed"
    fixed.mkdir()
    for place in ("fixed/out.jsonl", "fixed/parts/"):
        assert headrace("run", "-i", "in.jsonl", "-o", place, *FAKE, folder=folder)[0] == 0
    there = sorted(fixed.rglob("*"))
    for path in (fixed, *there):
        path.chmod(0o555)
    for place in ("fixed/out.jsonl", "fixed/parts/"):
        for more, status, words in (
            ((), 0, "already finished"),
            (("--ignore-changes",), 0, "already finished"),
            (("--overwrite",), 2, "is read-only for this user"),
        ):
            ended = subprocess.run(
                [*drop, *PROGRAM, "run", "-i", "in.jsonl", "-o", place, *FAKE, *more],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
                capture_output=True,
                text=True,
                check=False,
            )
            assert (ended.returncode, words in ended.stdout + ended.stderr) == (status, True), ended.stderr
    assert sorted(fixed.rglob("*")) == there
