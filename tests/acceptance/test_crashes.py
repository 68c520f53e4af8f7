"""User code that crashes or hangs: one record is lost and not the job, and whoever wants to leave may."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from tests.acceptance.command import FAKE, end, headrace, start
from tests.processes import descendants, wait_until_gone
from tests.waiting import until

MINE = "tests.acceptance.crashing"
ROWS = 240
DEADLY = [3, 50, 97, 214]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"id": n, "text": f"text {n} " + "word " * (n % 50)} for n in range(ROWS))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shorten(folder: Path) -> None:
    """Four rows, the last with number 7: what holds a batch up is looked for in halves of it, each until the limit."""
    rows = (folder / "in.jsonl").read_text().splitlines(keepends=True)
    (folder / "in.jsonl").write_text("".join(rows[4:8]))


def ended(folder: Path, name: str = "out") -> tuple[list[int], list[int]]:
    """Positions in the output and among the dead letters."""
    rows = [json.loads(line)["id"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    errors = folder / f"{name}.errors.jsonl"
    return rows, [json.loads(line)["position"] for line in errors.read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        ("--task", "embed", "--engine", f"{MINE}:Crashing", "--engine-process", "--batch-size", "64"),
        (*FAKE, "--map", f"{MINE}:crashing_map", "--worker-kind", "process"),
        (*FAKE, "--finish", f"{MINE}:crashing_finish", "--worker-kind", "process"),
    ],
    ids=["engine", "map", "finish"],
)
def test_a_record_that_ends_its_process_is_a_dead_letter(folder: Path, flags: tuple[str, ...]) -> None:
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *flags, folder=folder)
    assert status == 3, said
    rows, letters = ended(folder)
    assert letters == DEADLY
    assert rows == [n for n in range(ROWS) if n not in DEADLY]


@pytest.mark.parametrize("where", [(), ("--engine-process",)], ids=["thread", "process"])
def test_a_record_that_holds_its_engine_up_is_a_dead_letter(folder: Path, where: tuple[str, ...]) -> None:
    shorten(folder)
    flags = ("--task", "custom", "--engine", f"{MINE}:hanging", "--engine-timeout", "1", *where)
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *flags, folder=folder)
    assert status == 3, said
    assert ended(folder) == ([4, 5, 6], [3])
    letter = json.loads((folder / "out.errors.jsonl").read_text())
    assert letter["reason"] == "ProcessTimeoutError"
    assert ("was killed" if where else "its thread cannot be ended") in letter["message"].replace("the engine's", "its")


@pytest.mark.parametrize(
    ("flags", "reason", "words"),
    [
        (
            ("--task", "embed", "--engine", f"{MINE}:HangingPrepare"),
            "ProcessTimeoutError",
            "prepare had no result after 1 s (--engine-ti",
        ),
        (
            ("--task", "embed", "--engine", f"{MINE}:HangingPrepare", "--engine-process"),
            "ProcessTimeoutError",
            "was killed",
        ),
        (("--map", f"{MINE}:hanging_map", "--worker-kind", "process", *FAKE), "WorkerDiedError", "(--engine-timeout)"),
        (("--finish", f"{MINE}:hanging_finish", "--worker-kind", "process", *FAKE), "WorkerDiedError", "too long"),
    ],
    ids=["prepare", "prepare in a process", "map", "finish"],
)
def test_a_record_that_holds_user_code_up_is_a_dead_letter(
    folder: Path, flags: tuple[str, ...], reason: str, words: str
) -> None:
    shorten(folder)
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-timeout", "1", *flags, folder=folder)
    assert status == 3, said
    assert ended(folder) == ([4, 5, 6], [3])
    letter = json.loads((folder / "out.errors.jsonl").read_text())
    assert letter["reason"] == reason
    assert words in letter["message"]


def test_a_prepare_that_never_answers_ends_the_job(folder: Path) -> None:
    job = (
        "run",
        "-i",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--task",
        "embed",
        "--engine",
        f"{MINE}:StuckPrepare",
        "--engine-timeout",
        "0.1",
    )
    status, said = headrace(*job, folder=folder)
    assert status == 75, said
    assert "prepare had no result after 0.1 s (--engine-timeout) for 8 records in a row: the engine hangs" in said


def test_the_run_after_a_crash_says_where_the_last_one_ended(folder: Path) -> None:
    job = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--batch-size", "4")
    status, _ = headrace(*job, "--task", "embed", "--engine", f"{MINE}:Crashing", folder=folder)
    assert status in (3, -9, -11)
    _, said = headrace(*job, "--task", "embed", "--engine", f"{MINE}:Crashing", folder=folder)
    first = said.splitlines()[0]
    assert re.match(
        r"headrace: the last run was killed or crashed while the engine had [1-4] records \(positions ", first
    )
    assert "--engine-process" in first
    status, said = headrace(*job, "--task", "embed", "--engine", f"{MINE}:Crashing", "--engine-process", folder=folder)
    assert status == 3, said
    assert ended(folder)[1] == DEADLY
    assert not (folder / "out.jsonl.parts" / "in-flight").exists()
    _, said = headrace(*job, "--task", "embed", "--engine", f"{MINE}:Crashing", folder=folder)
    assert "crashed" not in said


def test_a_job_that_makes_no_progress_says_so(folder: Path) -> None:
    job = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--task", "custom", "--engine-timeout", "0.1")
    seen = [headrace(*job, "--engine", f"{MINE}:stuck", folder=folder) for _ in range(4)]
    assert [status for status, _ in seen] == [75, 75, 75, 1]
    assert "8 records in a row had no result after 0.1 s (--engine-timeout): the engine hangs" in seen[0][1]
    assert "no progress: 4 runs in a row have ended with 0 records done" in seen[-1][1]
    # The mended engine does every record: none of them was to blame.
    status, said = headrace(*job, "--engine", f"{MINE}:lengths", "--ignore-changes", folder=folder)
    assert status == 0, said


def test_an_engine_of_another_kind_is_refused_a_process(folder: Path) -> None:
    flags = ("--task", "generate", "--engine", "vllm", "--engine-process")
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *flags, folder=folder)
    assert status == 2
    assert "engine vllm takes requests one by one and cannot run in a child process" in said


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (("--task", "custom", "--engine", f"{MINE}:stuck"), 130),
        (("--task", "custom", "--engine", f"{MINE}:stuck", "--engine-process"), 130),
        (("--task", "custom", "--engine", f"{MINE}:locked"), -signal.SIGINT),  # a shell says 130 to both
        ((*FAKE, "--map", f"{MINE}:stuck_map", "--worker-kind", "process"), 130),
        ((*FAKE, "--finish", f"{MINE}:stuck_finish", "--worker-kind", "process"), 130),
    ],
    ids=lambda flags: " ".join(flags[-3:]).replace(MINE, "") if isinstance(flags, tuple) else "",
)
def test_a_second_signal_ends_at_once_whatever_hangs(folder: Path, flags: tuple[str, ...], status: int) -> None:
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *flags, folder=folder)
    until((folder / "hangs").exists)
    job.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    children = descendants(job.pid)
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == status
    assert "Traceback" not in job.communicate()[1]
    wait_until_gone(children)


@pytest.mark.parametrize(
    "flags",
    [
        ("--task", "custom", "--engine", f"{MINE}:stuck_load"),
        ("--task", "custom", "--engine", f"{MINE}:stuck_load", "--engine-process"),
        (*FAKE, "--map", f"{MINE}:stuck_map", "--worker-kind", "thread"),
    ],
    ids=["load", "load-in-process", "map"],
)
def test_one_signal_ends_a_job_that_has_not_begun(folder: Path, flags: tuple[str, ...]) -> None:
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *flags, folder=folder)
    until((folder / "hangs").exists)
    children = descendants(job.pid)
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    assert "interrupted before the job began" in job.communicate()[1]
    wait_until_gone(children)


def test_no_child_outlives_a_killed_parent(folder: Path) -> None:
    flags = ("--task", "custom", "--engine", f"{MINE}:stuck", "--engine-process")
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *flags, folder=folder)
    until((folder / "hangs").exists)
    children = descendants(job.pid)
    assert children
    job.kill()
    job.communicate()
    wait_until_gone(children)


def test_a_plain_end_leaves_no_process(folder: Path) -> None:
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, "--engine-process", folder=folder)
    seen: set[psutil.Process] = set()
    while job.poll() is None:
        seen.update(descendants(job.pid))
        time.sleep(0.02)
    assert end(job)[0] == 0
    assert seen
    wait_until_gone(seen)
