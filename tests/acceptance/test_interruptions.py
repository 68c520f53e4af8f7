"""Signals, kills and rivals: nothing is lost, nothing is done twice, and everybody is told what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.acceptance.command import FAKE, PROGRAM, ROOT, end, headrace, start
from tests.waiting import until

SLOW = ("--engine", "tests.acceptance.engines:slow", "--task", "embed")
LOADING = ("--engine", "tests.acceptance.engines:loading", "--task", "embed")
BROKEN = ("--engine", "tests.acceptance.engines:broken", "--task", "embed")
STUCK = ("--engine", "tests.acceptance.engines:stuck", "--task", "embed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"id": n, "text": f"text {n} " + "word " * (n % 50)} for n in range(20_000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def wait_for(condition: Path, pattern: str) -> None:
    """Until a file is there."""
    until(lambda: any(condition.glob(pattern)))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_what_is_in_flight(folder: Path, number: int, status: int) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.parquet")
    job = start(*command, *SLOW, folder=folder)
    wait_for(folder, "out.parquet.parts/part-*")
    job.send_signal(number)
    ended, said = end(job)
    assert ended == status
    assert "stopping: finishing work in flight (Ctrl-C again ends it at once)" in said
    assert said.endswith("records are done and kept: run the same command again to continue\n")
    assert not (folder / "out.parquet").exists()

    assert headrace(*command, *FAKE, folder=folder)[0] == 0
    assert headrace("run", "-i", "in.jsonl", "-o", "whole.parquet", *FAKE, folder=folder)[0] == 0
    assert (folder / "out.parquet").read_bytes() == (folder / "whole.parquet").read_bytes()


def test_a_signal_while_modules_load_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import pathlib, time; pathlib.Path('loading').touch(); time.sleep(600)")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    job = subprocess.Popen(PROGRAM, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(tmp_path, "loading")
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=60) == (None, b"\nheadrace: interrupted\n")
    assert job.returncode == 130


def test_sigterm_ends_the_first_process_of_a_container_while_its_model_loads(tmp_path: Path) -> None:
    """There the system ignores a signal that the process does not handle."""
    server = start("serve", "--port", "0", *LOADING, folder=tmp_path, before="import os; os.getpid = lambda: 1; ")
    wait_for(tmp_path, "loading")
    server.send_signal(signal.SIGTERM)
    ended, said = end(server)
    assert (ended, said.splitlines()[-1]) == (143, "headrace: interrupted")


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *STUCK, folder=folder)
    wait_for(folder, "stuck")  # in the batch that never ends
    job.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    job.communicate()


def test_a_second_writer_is_refused_and_a_dead_one_is_not_waited_for(folder: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl")
    first = start(*command, *STUCK, folder=folder)
    wait_for(folder, "out.jsonl.parts/job.json")
    status, said = headrace(*command, *STUCK, folder=folder)
    assert status == 2
    assert f"is being written by process {first.pid} on " in said
    first.kill()
    first.communicate()
    assert headrace(*command, *FAKE, folder=folder)[0] == 0


@pytest.mark.parametrize("output", ["out.jsonl", "out/"])
def test_while_a_model_loads_the_job_can_be_seen_and_no_other_loads_one(folder: Path, output: str) -> None:
    command = ("run", "-i", "in.jsonl", "-o", output)
    first = start(*command, *LOADING, folder=folder)
    wait_for(folder, "loading")
    status, said = headrace(*command, *BROKEN, folder=folder)
    assert (status, f"headrace: {output} is being written by process" in said, "weights" in said) == (2, True, False)
    status, said = headrace("inspect", output, folder=folder)
    assert (status, said.startswith(f"state     loading the model, by process {first.pid} on ")) == (0, True)
    status, said = headrace("top", "--once", output, folder=folder)
    assert status == 0
    assert said.startswith(f"headrace: the job of {output} is loading the model, in process {first.pid} on ")
    first.send_signal(signal.SIGINT)
    assert end(first)[0] == 130
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "loading"]
    assert headrace(*command, *BROKEN, folder=folder)[0] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "loading"]
    assert headrace(*command, *FAKE, folder=folder)[0] == 0


@pytest.mark.parametrize("output", ["out.jsonl", "out/"])
def test_a_job_that_was_killed_while_its_model_loaded_is_told_from_none(folder: Path, output: str) -> None:
    command = ("run", "-i", "in.jsonl", "-o", output)
    job = start(*command, *LOADING, folder=folder)
    wait_for(folder, "loading")
    job.kill()
    job.communicate()
    status, said = headrace("inspect", output, folder=folder)
    assert status == 2
    assert f"no job has written {output}: its run was killed before it began" in said
    assert "the same command begins it" in said
    assert headrace(*command, *FAKE, folder=folder)[0] == 0


def test_the_second_step_of_a_job_is_shown_while_it_loads(folder: Path) -> None:
    steps = [{"name": name, "task": "embed", "engine": engine} for name, engine in (("a", FAKE[1]), ("b", LOADING[1]))]
    (folder / "steps.json").write_text(json.dumps({"steps": steps}))
    job = start("run", "--config", "steps.json", "-i", "in.jsonl", "--limit", "10", "-o", "out.jsonl", folder=folder)
    wait_for(folder, "loading")
    assert f"b: loading the model, by process {job.pid}" in headrace("inspect", "out.jsonl", folder=folder)[1]
    said = " ".join(headrace("top", "--once", "out.jsonl", folder=folder)[1].split())
    assert f"loading the model of the next step, by process {job.pid}" in said
    assert "step 1 of 2 is finished" in said
    job.kill()
    job.communicate()
    assert "stopped: step 1 of 2 is finished" in headrace("top", "--once", "out.jsonl", folder=folder)[1]


def test_a_job_that_continues_says_that_it_loads_too(folder: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl")
    assert headrace(*command, *FAKE, folder=folder)[0] == 0
    assert "state     finished" in headrace("inspect", "out.jsonl", folder=folder)[1]
    job = start(*command, "--overwrite", *LOADING, folder=folder)
    wait_for(folder, "loading")
    for verb in (("inspect",), ("top", "--once")):
        assert f"loading the model, by process {job.pid}" in headrace(*verb, "out.jsonl", folder=folder)[1]
    job.kill()
    job.communicate()
    assert "state     finished" in headrace("inspect", "out.jsonl", folder=folder)[1]


@pytest.mark.parametrize(
    ("outputs", "kills", "rows", "task"),
    [
        pytest.param(("jsonl-folder", "parquet"), 4, 8_000, "embed", marks=pytest.mark.thorough),
        (("s3-folder",), 1, 4_000, "embed"),
        (("jsonl",), 2, 8_000, "generate"),
    ],
)
def test_killed_at_random_moments(outputs: tuple[str, ...], kills: int, rows: int, task: str) -> None:
    """More kills: `scripts/torture --kills 200`."""
    if outputs[0].startswith("s3"):
        pytest.importorskip("moto.server")
    ended = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "torture",
            f"--kills={kills}",
            f"--rows={rows}",
            f"--task={task}",
            "--outputs",
            *outputs,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for output in outputs:
        told = rf"^{output}: \d+ kills over \d+ jobs, \d+ parts damaged: 0 lost, 0 doubled, same content\n"
        assert re.search(told, ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith(f"{kills} kills: 0 lost, 0 doubled, same content\n")
