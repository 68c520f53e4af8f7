"""The lock of an output dies with its process, whatever that has forked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.errors import OutputLockedError
from headrace.jobs.state.lock import exclusive


def test_there_is_one_holder_and_the_error_names_it(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / "lock", tmp_path),
        pytest.raises(OutputLockedError, match=f"process {os.getpid()} .*; go away$"),
    ):
        exclusive(tmp_path / "lock", tmp_path, "go away").__enter__()
    with exclusive(tmp_path / "lock", tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    heard, told = os.pipe()
    with exclusive(tmp_path / "lock", tmp_path):
        child = os.fork()
        if not child:
            os.write(told, b"1")
            signal.pause()
            os._exit(0)
        assert os.read(heard, 1) == b"1"
    os.close(heard)
    os.close(told)
    try:
        with exclusive(tmp_path / "lock", tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
