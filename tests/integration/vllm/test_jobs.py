"""Bulk jobs through vLLM: the main path as a user runs it, with the engine killed and the job interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm.conftest import FLAGS
from tests.processes import command_line, descendants, wait_until_gone

from headrace.app.jobs import job as app_job
from headrace.batching.passthrough import PassthroughBatcher
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.observe.reporting.report import ReportBuilder

PROGRAM = (sys.executable, "-c", "import sys; sys.argv[0] = 'headrace'; from headrace.cli.main import main; main()")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_job(engine: Any, source: Path, sink: Path, column: str = "prompt") -> Any:
    """The main path with an engine that is there already."""
    settings = app_job.JobSettings(
        source=source, sink=sink, text_column=column, config=EngineConfig(task="generate", engine="vllm")
    )
    report = ReportBuilder()
    job = app_job.build(app_job.check(settings), engine, StopRequest(), report)
    assert isinstance(job.batcher, PassthroughBatcher)
    return main_path.run(job), report.build()


def test_every_record_ends_in_the_output_or_among_the_errors(engine: Any, tmp_path: Path) -> None:
    rows: list[Any] = [{"id": f"r{n}", "prompt": f"question {n}"} for n in range(60)]
    rows[7]["prompt"] = ""
    rows[11]["prompt"] = {"prompt": "short", "max_tokens": 3, "ignore_eos": True}
    rows[13]["prompt"] = {"prompt": "hot", "temperature": -3}
    rows[17]["prompt"] = [{"role": "user", "content": "hi"}]
    rows[19]["prompt"] = {"prompt": "a", "allowed_token_ids": [10**6]}
    end, report = run_job(engine, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert (end.state, end.records, end.failed) == ("finished", 60, 3)
    out = {row["id"]: row["generation"] for row in read(tmp_path / "out.jsonl")}
    assert list(out) == [row["id"] for n, row in enumerate(rows) if n not in (7, 13, 19)]
    assert out["r11"]["completion_tokens"] == 3
    assert [letter["id"] for letter in read(tmp_path / "out.errors.jsonl")] == ["r7", "r13", "r19"]
    assert report.ok == 57


ROWS = 1_200
"""So many that the job is at work for some seconds more when its first records are done."""


@pytest.fixture
def command(model: Path, tmp_path: Path) -> list[str]:
    """A job of several seconds, with the engine's flags by vLLM's names."""
    rows = [{"id": n, "prompt": f"question {n}"} for n in range(ROWS)]
    source = write(tmp_path / "in.jsonl", rows)
    return [
        *PROGRAM,
        *("run", "--task", "generate", "--engine", "vllm", "--model", str(model), "-i", str(source)),
        *("-o", str(tmp_path / "out.jsonl"), "--text-column", "prompt", "--max-tokens", "200", "--ignore-eos", *FLAGS),
    ]


def start(command: list[str]) -> subprocess.Popen[str]:
    """The command as leader of a process group, which a terminal's Ctrl-C reaches as a whole."""
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_progress(process: subprocess.Popen[str]) -> None:
    """Until records are done; the first part may come later, where the disk is busy."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if re.search(r"[1-9]\d* records \(", line):
            return
    raise AssertionError(f"the job ended before it was at work:\n{said}")


def check_finished(command: list[str], folder: Path) -> None:
    """The same command again goes on and ends; every record is there exactly once."""
    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=540, check=False)  # for what hangs
    assert again.returncode == 0, again.stderr
    assert [row["id"] for row in read(folder / "out.jsonl")] == list(range(ROWS))


@pytest.mark.timeout(900)
def test_a_killed_core_ends_the_job_with_all_that_was_finished_kept(command: list[str], tmp_path: Path) -> None:
    process = start(command)
    wait_for_progress(process)
    started = descendants(process.pid)
    (core,) = (child for child in started if "EngineCore" in command_line(child))
    core.kill()
    _, errors = process.communicate(timeout=60)
    wait_until_gone(started)
    assert process.returncode == 75, errors
    assert "headrace: the engine cannot continue: vLLM's core process is gone" in errors
    check_finished(command, tmp_path)


@pytest.mark.parametrize("is_long", [False, True])
def test_vllm_leaves_no_sockets_behind(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """Where the path of the temporary folder is too long for sockets, they are in /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        files = tmp_path / ("long" * 20) if is_long else Path(short)
        files.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(files))
        before = set(Path("/tmp").iterdir())
        ended = subprocess.run([*command, "--limit", "8"], stderr=subprocess.PIPE, text=True, timeout=240, check=False)
        assert ended.returncode == 0, ended.stderr
        assert not [path for path in files.rglob("*") if path.is_socket()]
        assert not [path for path in set(Path("/tmp").iterdir()) - before if "vllm" in path.name or path.is_socket()]


@pytest.mark.timeout(900)
def test_ctrl_c_finishes_what_is_in_flight_and_the_job_goes_on_later(command: list[str], tmp_path: Path) -> None:
    process = start(command)
    wait_for_progress(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again to continue" in errors
    assert "EngineDead" not in errors  # the core did not hear Ctrl-C
    check_finished(command, tmp_path)
