"""How a command ends: whatever goes wrong is one line with a status, and never a traceback."""

from __future__ import annotations

import re
import socket
from pathlib import Path

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
    assert f"unexpected KeyError at {as_named(__file__)}:19: 'weights'; what a job has committed is kept" in line


def test_a_system_without_threads_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise RuntimeError("can't start new thread")

    assert guarded(broken) == 75
    [line] = capsys.readouterr().err.splitlines()
    assert "raise its limit (ulimit -u); what a job has committed is kept; run it again" in line


def test_a_busy_port_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert (ended.exit_code, ended.output.count("\n")) == (2, 1)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in ended.output


@pytest.mark.parametrize(
    ("flags", "way_out"),
    [
        (["--port", "0", "--grpc-port", "{busy}"], "port {busy}: Address already in use; choose another --grpc-port"),
        (["--port", "0", "--host", "203.0.113.7"], "Cannot assign requested address; choose another --host"),
        (["--port", "{free}", "--grpc-port", "{free}"], "--port and --grpc-port are both {free}"),
    ],
)
def test_what_cannot_be_listened_on_is_told_with_its_own_flag(flags: list[str], way_out: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))  # and nobody else is given the port meanwhile
        numbers = {"busy": other.getsockname()[1], "free": place.getsockname()[1]}
        command = ["serve", "--task", "embed", "--engine", "headrace.testing:FakeEngine"]
        ended = CliRunner().invoke(app, [*command, *(flag.format(**numbers) for flag in flags)])
    assert ended.exit_code == 2
    assert way_out.format(**numbers) in ended.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{long}"],
        ["{long}"],
        ["run", "--limit", "{long}", "-i", "in.jsonl", "-o", "out.jsonl"],
        ["run", "--engine", "{long}:f", "-i", "in.jsonl", "-o", "out.jsonl"],
        ["run", "--engine", "math:sqrt", "--{long}", "4", "-i", "in.jsonl", "-o", "out.jsonl"],
        ["run", "-i", "{long}.jsonl", "-o", "out.jsonl"],
        ["run", "-i", "in.jsonl", "-o", "{long}.jsonl"],
        ["run", "--model", "{long}", "-i", "in.jsonl", "-o", "out.jsonl"],
    ],
)
def test_a_long_value_is_shortened_wherever_it_was_given(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a"}\n')
    ended = CliRunner().invoke(app, [one.format(long="x" * 100_000) for one in arguments])
    assert ended.exit_code == 2
    assert len(ended.output) < 2000
    assert re.search(r"\(100,0\d\d\s", ended.output), "its length is told"


def test_paths_are_told_without_the_current_folder_and_addresses_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"wrote {tmp_path}/a.jsonl, not s3://bucket/a.jsonl"
    monkeypatch.chdir(tmp_path)
    assert as_named(said) == "wrote a.jsonl, not s3://bucket/a.jsonl"
    monkeypatch.chdir("/")  # as in many containers
    assert as_named(said) == said
