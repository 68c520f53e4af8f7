"""`headrace run --handler` with handlers that would keep a process: it ends all the same, with the right status."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from textwrap import dedent

import pytest
from tests.acceptance.command import end, headrace, start

BRIEF = "from headrace.cli import exit; exit._THREADS_S = exit._EXIT_FUNCTIONS_S = 0.5; "
"""What is left running is ended where it stands after half a second."""
RUN = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--handler", "my_handler.py")
# What it starts when it is asked to load its model, and what is said of it when it is ended where it stands.
LEFT = {
    "thread": ("threading.Thread(target=time.sleep, args=(600,)).start()", ""),
    "no-daemon": (
        "threading.Thread(target=time.sleep, args=(600,), name='of-the-handler', daemon=False).start()",
        "of-the-handler",
    ),
    "executor": ("ThreadPoolExecutor(1).submit(time.sleep, 600)", "of an executor"),
    "process": ("multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,)).start()", "process of"),
}
STARTS = """
    import multiprocessing, threading, time
    from concurrent.futures import ThreadPoolExecutor

    def handle(data, context):
        if data is None:
            LEFT
            return
        return [row["body"].decode() for row in data]
"""
# A thread of the handler's answers, and has died.
WAITS = """
    import queue, threading

    asked, answers = queue.Queue(), queue.Queue()

    def work():
        while True:
            answers.put(asked.get().decode() + 1)

    def handle(data, context):
        if data is None:
            threading.excepthook = lambda told: None
            threading.Thread(target=work, daemon=True).start()
            return
        for row in data:
            asked.put(row["body"])
        print("waiting", flush=True)
        return [answers.get() for row in data]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"id": n, "text": f"text {n}"} for n in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write(folder: Path, handler: str, config: str = "batchSize: 2\nmaxBatchDelay: 10\n") -> None:
    (folder / "my_handler.py").write_text(dedent(handler))
    (folder / "model-config.yaml").write_text(config)


@pytest.mark.parametrize("left", LEFT)
def test_what_a_handler_leaves_running_does_not_keep_the_process(folder: Path, left: str) -> None:
    statement, named = LEFT[left]
    write(folder, STARTS.replace("LEFT", statement))
    status, said = headrace(*RUN, folder=folder, before=BRIEF)
    assert status == 0, said
    assert "wrote out.jsonl: 4 of 4 records" in said
    assert named in said
    assert len((folder / "out.jsonl").read_text().splitlines()) == 4


def test_a_handler_that_never_answers_ends_the_job_after_its_response_timeout(folder: Path) -> None:
    write(folder, WAITS, "batchSize: 2\nresponseTimeout: 2\n")
    status, said = headrace(*RUN, folder=folder)
    assert status == 75, said
    assert "handler my_handler.py has not returned within 2 s" in said
    assert "responseTimeout" in said


def test_a_signal_does_not_wait_for_such_a_handler_for_longer(folder: Path) -> None:
    write(folder, WAITS, "batchSize: 2\nresponseTimeout: 3\n")
    job = start(*RUN, folder=folder)
    assert job.stdout is not None
    assert job.stdout.readline() == "waiting\n"
    job.send_signal(signal.SIGTERM)
    status, said = end(job)
    assert status in (75, 128 + signal.SIGTERM), said
