"""At the terminal: no traceback for whatever a user does, and one line that says what is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import FAKE, PROGRAM, ROOT, end, headrace, start

SLOW = """
import time
from headrace.testing import FakeEngine

print("LOADING", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "text": "x"}\n')
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


RUN = ("run", "-i", "in.jsonl", "-o", "out.jsonl")


@pytest.mark.parametrize("wait", [0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3])
def test_ctrl_c_at_any_early_moment_is_one_line(folder: Path, wait: float) -> None:
    process = start(*RUN, "--task", "embed", "--engine", "slow:FakeEngine", folder=folder, imported="nothing")
    time.sleep(wait)  # Python's own start, before a line of ours, takes some hundredths of a second
    process.send_signal(signal.SIGINT)
    status, output = end(process)
    lines = [line for line in output.splitlines() if line and line != "LOADING" and "loading" not in line]
    assert status == 130, output
    assert len(lines) == 1, output
    assert lines[0].startswith("headrace: interrupted")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_an_engine_is_imported_ends_at_once(folder: Path, number: signal.Signals, status: int) -> None:
    process = start(*RUN, "--task", "embed", "--engine", "slow:FakeEngine", folder=folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "LOADING\n"
    process.send_signal(number)
    found, output = end(process)
    assert found == status
    assert "headrace: interrupted before the job began" in output
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",)])
def test_output_to_a_full_disk_is_one_line(folder: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = shell(arguments, folder, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "headrace: cannot write to standard output: No space left on device\n"


def test_output_that_nobody_reads_is_no_error(folder: Path) -> None:
    assert headrace(*RUN, *FAKE, folder=folder)[0] == 0
    for arguments in (("inspect", "out.jsonl"), ("--help",)):
        with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
            reader.wait()
            done = shell(arguments, folder, stdout=reader.stdin)
        assert (done.returncode, done.stderr) == (0, "")


def shell(arguments: tuple[str, ...], folder: Path, stdout: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [*PROGRAM, *arguments],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )


GARBAGE = ["null", "[]", "7", '""', "{}", '{"fingerprint": null, "finished": null}', "\xff", "[" * 5000]
GARBAGE += [
    json.dumps({"fingerprint": {}, "finished": finished, "settings": settings})
    for finished in (None, 7, {}, {"records": None, "failed": 0, "bytes": 0}, {"records": 1, "failed": 0, "bytes": 0})
    for settings in (None, 7, {}, {"source": None, "selection": None}, {"source": 7, "selection": 7, "bad": 7})
]


@pytest.mark.parametrize("verb", ["inspect", "retry", "merge", "run"])
def test_damaged_state_is_one_line(folder: Path, verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from headrace.cli.app import app

    (folder / "out.jsonl.parts").mkdir()
    arguments = {
        "inspect": ["inspect", str(folder / "out.jsonl")],
        "retry": ["retry", str(folder / "out.jsonl")],
        "merge": ["merge", str(folder / "out.jsonl"), "-o", str(folder / "merged.jsonl"), "--overwrite"],
        "run": ["run", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *FAKE],
    }[verb]
    for content in GARBAGE:
        (folder / "out.jsonl.parts" / "job.json").write_text(content, encoding="latin-1")
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert "unexpected" not in done.output + capfd.readouterr().err, (content, done.output)
