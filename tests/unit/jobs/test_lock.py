from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.errors import OutputLockedError
from headrace.jobs.state.lock import exclusive


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
