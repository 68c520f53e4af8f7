"""How a command ends: whatever goes wrong is one line with a status, and never a traceback."""

from __future__ import annotations

import pytest

from headrace.cli.outcome import guarded


def test_a_bug_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise KeyError("weights")

    assert guarded(broken) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"unexpected KeyError at {__file__}:12: 'weights'; what is committed is kept" in line
