"""How a command ends: whatever goes wrong is one line with a status, and never a traceback."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.outcome import guarded
from headrace.io.storage.locations import as_named


def test_a_bug_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise KeyError("weights")

    assert guarded(broken) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"unexpected KeyError at {as_named(__file__)}:17: 'weights'; committed records are kept" in line


def test_a_busy_port_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert (ended.exit_code, ended.output.count("\n")) == (2, 1)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in ended.output
