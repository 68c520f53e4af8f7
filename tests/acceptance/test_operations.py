"""A job that is killed, or refused the disk, before a file operation; `scripts/torture` tries each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.acceptance.operations import CASES, ENDED, Job, kills, make_input


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("retry", 11),
        ("overwrite-folder", 32),
        *(
            pytest.param(*more, marks=pytest.mark.thorough)
            for more in [("folder", 23), ("steps", 61), ("link", 17), ("overwrite-folder", 16)]
        ),
    ],
)
def test_a_kill_before_a_file_operation_costs_no_record(tmp_path: Path, name: str, every: int) -> None:
    """And `inspect` says what is true, also in the middle of the end of a retry."""
    make_input(tmp_path)
    assert len(list(kills(CASES[name], tmp_path, every - 2, every))) > 1


@pytest.mark.parametrize(
    ("name", "number", "refusal"),
    [
        pytest.param(name, number, refusal, marks=() if row == column else pytest.mark.thorough)
        for row, (name, number) in enumerate([("jsonl", 30), ("retry", 40), ("link", 12)])
        for column, refusal in enumerate(["ENOSPC", "EROFS", "EDQUOT"])
    ],
)
def test_a_disk_that_takes_no_more_from_some_moment_on(tmp_path: Path, name: str, number: int, refusal: str) -> None:
    make_input(tmp_path)
    job = Job(CASES[name], tmp_path, "job")
    status, said = job.strike(number, refusal)
    assert status not in (*ENDED, 1, -9), said
    assert "cannot" in said
    assert {"ENOSPC": "No space left", "EROFS": "Read-only file system", "EDQUOT": "quota exceeded"}[refusal] in said
    job.inspected()
    job.go_on()
    job.check()


@pytest.mark.parametrize("name", ["jsonl", "retry"])
def test_a_disk_that_is_full_for_the_dead_letters_alone(tmp_path: Path, name: str) -> None:
    """As where the errors file is a link to another disk."""
    make_input(tmp_path)
    job = Job(CASES[name], tmp_path, "job")
    status, said = job.strike(1, "ENOSPC", "out.errors.jsonl")
    assert status == 75, said
    assert "No space left on device" in said
    assert "errors.jsonl" in said
    assert len(job.go_on()) == 0, "nothing is computed again"
    job.check()
