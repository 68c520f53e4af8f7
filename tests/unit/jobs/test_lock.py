from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import OutputLockedError
from headrace.jobs.state.lock import exclusive, locked_folder


def test_a_second_holder_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        exclusive(lock, tmp_path / "out.jsonl"),
        pytest.raises(OutputLockedError, match=rf"out\.jsonl is being written by process {os.getpid()} on .*; wait"),
        exclusive(lock, tmp_path / "out.jsonl"),
    ):
        raise AssertionError("both hold it")
    with exclusive(lock, tmp_path / "out.jsonl"):  # given up at the end
        assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_a_holder_that_has_not_written_its_name_yet_is_another_process(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with exclusive(lock, tmp_path / "out"):
        lock.write_text("")
        with pytest.raises(OutputLockedError, match="written by another process"), exclusive(lock, tmp_path / "out"):
            raise AssertionError("both hold it")


@pytest.mark.parametrize("begins", [False, True])
def test_a_folder_that_was_made_for_a_lock_goes_with_it_unless_a_job_has_begun(tmp_path: Path, begins: bool) -> None:
    folder = tmp_path / "out" / "work"
    state = folder / "job.json"
    with locked_folder(folder, "out/", state.exists):
        assert (folder / "lock").exists()
        if begins:
            state.touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["job.json", "lock", "out", "work"] if begins else [])


def test_the_working_folder_of_a_process_that_was_killed_before_its_job_began_goes_too(tmp_path: Path) -> None:
    folder = tmp_path / "out.jsonl.parts"
    folder.mkdir()
    (folder / "lock").touch()
    with locked_folder(folder, "out.jsonl", lambda: False):
        pass
    assert not folder.exists()


def test_a_lock_file_that_is_removed_while_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "out" / "lock"
    flock, removed = fcntl.flock, []

    def flocked(file: Any, operation: int) -> None:
        if not removed:
            removed.append(lock.unlink())
            lock.parent.rmdir()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flocked)
    with exclusive(lock, tmp_path), pytest.raises(OutputLockedError), exclusive(lock, tmp_path):
        raise AssertionError("both hold it")
    assert removed
