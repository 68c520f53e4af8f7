"""`headrace top` as its users run it: on jobs that run, have ended, were killed or have not begun, and on servers."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.acceptance.command import FAKE, PROGRAM, ROOT, headrace, start, traced
from tests.acceptance.serving.process import server
from tests.waiting import until

from headrace.observe.live.frame import parse_frame

SLOW = ("--engine", "tests.acceptance.jobs.engines:slow", "--task", "embed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"id": n, "text": f"text {n}"} for n in range(3_000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shown(folder: Path) -> str:
    status, said = headrace("top", "--once", "out.jsonl", folder=folder)
    assert status == 0, said
    return said


def test_a_job_that_runs_is_killed_runs_again_and_ends(folder: Path) -> None:
    with traced(start("top", "out.jsonl", folder=folder)) as watcher:
        with traced(start("run", "-i", "in.jsonl", "-o", "out.jsonl", *SLOW, folder=folder)) as job:
            until((folder / "out.jsonl.parts" / "live.json").exists)
            while "records/s" not in (running := shown(folder)):  # the first frames come before the first records
                assert job.poll() is None
            assert "running, by process" in running
            assert "being prepared" in running or "for the device" in running
            job.kill()
            job.wait()
        killed, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    assert "stopped" in killed.splitlines()[-20:][0] or "stopped" in killed
    assert "stopped" in shown(folder)
    status, _ = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *SLOW, "--limit", "400", "--overwrite",
                         folder=folder)  # fmt: skip
    assert status == 0
    finished = shown(folder)
    assert finished.startswith("out.jsonl  finished")
    assert "400 records" in finished
    assert "100%" in finished


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing.jsonl", "no job has written nothing.jsonl"),
        ("nowhere/out.jsonl", "no job has written nowhere/out.jsonl"),
        ("http://127.0.0.1:1", "cannot reach http://127.0.0.1:1"),
        ("http://", "cannot reach http://"),
        ("damaged.jsonl", "live.json: it is not a live state of headrace"),
        ("early.jsonl", "the job ended at once, or an earlier version ran it"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(folder: Path, name: str, why: str) -> None:
    for output in ("damaged", "early"):
        status, said = headrace("run", "-i", "in.jsonl", "-o", f"{output}.jsonl", *FAKE, "--limit", "9", folder=folder)
        assert status == 0, said
    (folder / "damaged.jsonl.parts" / "live.json").write_text("[]")
    (folder / "early.jsonl.parts" / "live.json").unlink()
    status, said = headrace("top", "--once", name, folder=folder)
    assert status == 2
    assert why in said
    assert len(said.splitlines()) == 1


def test_ctrl_c_leaves_the_terminal_as_it_was(folder: Path) -> None:
    """On a terminal, as on none: a job that has not begun, and a server."""
    process = start("top", "later.jsonl", folder=folder)
    with traced(process):
        assert "waiting for it to start" in process.stderr.readline()  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with server(*FAKE, folder=folder) as (_, url):
        screen = drawn_on_terminal(url, folder)
    assert screen.count(b"\x1b[?1049h") == screen.count(b"\x1b[?1049l") == 1  # the other screen, and back
    assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h") >= 1  # the cursor
    assert b"no requests" in screen.split(b"\x1b[?1049l")[1]  # the last frame stays


def drawn_on_terminal(url: str, folder: Path) -> bytes:
    ours, theirs = pty.openpty()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [*PROGRAM, "top", url], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    )
    os.close(theirs)
    screen, asked = b"", False
    try:
        while block := os.read(ours, 1 << 16):
            screen += block
            if screen.count(b"no requests") >= 2 and not asked:
                asked = True
                process.send_signal(signal.SIGINT)
    except OSError:  # the terminal has no other end any more
        pass
    finally:
        os.close(ours)
        process.kill()
    assert process.wait() == 0
    return screen


def test_a_server_with_keys_needs_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "keys").write_text("secret-1\n")
    with server(*FAKE, "--api-key-file", "keys", folder=folder) as (_, url):
        status, said = headrace("top", "--once", url, folder=folder)
        assert status == 2
        assert "HEADRACE_API_KEY" in said
        monkeypatch.setenv("HEADRACE_API_KEY", "secret-1")
        status, said = headrace("top", "--once", url, folder=folder)
        assert status == 0, said
        assert "ready" in said


def test_a_job_shows_its_dashboard(folder: Path) -> None:
    arguments = ("run", "-i", "in.jsonl", "-o", "out.jsonl", *SLOW, "--port", "0")
    with traced(start(*arguments, folder=folder)) as job:
        assert job.stderr is not None
        url = next(line.split()[-1] for line in job.stderr if "dashboard at" in line)
        assert "script-src" in httpx.get(url, timeout=60).headers["content-security-policy"]
        stranger = httpx.get(url, headers={"Host": "attacker.example"}, timeout=60)
        assert stranger.status_code == 400  # no page of another server
        with httpx.stream("GET", f"{url}/events", timeout=60) as answer:
            frames = (parse_frame(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            running = next(frame for frame in frames if frame.counts.get("records"))
        assert running.state.startswith("running, by process")
        port = url.split(":")[2].split("/")[0]
        status, said = headrace("run", "-i", "in.jsonl", "-o", "b.jsonl", *SLOW, "--port", port, folder=folder)
        assert status == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in said
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130
