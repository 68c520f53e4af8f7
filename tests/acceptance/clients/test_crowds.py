"""A handful of callers with ordinary batches, with the clients that people have at their defaults: nobody loses one.

The engine takes a fixed time for each word, so that no test depends on the machine's speed. What a server does when
the work is more than it allows is tested in virtual time (`tests/unit/serving/test_admission.py`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.acceptance.clients.test_clients import CLIENTS, PROGRAMS, node
from tests.acceptance.serving.process import server

STEADY = (
    "--task",
    "embed",
    "--engine",
    "tests.acceptance.engines:Steady",
    "--batch-tokens",
    "1024",
    "--served-model-name",
    "m",
)

pytestmark = pytest.mark.skipif(
    not (CLIENTS / "bin" / "python").exists(), reason="the clients are not installed: run scripts/install-clients"
)


def became(program: str, url: str, callers: int, texts: int, words: int) -> list[str]:
    """What became of each caller of a program."""
    path = PROGRAMS / program
    command = [str(CLIENTS / "bin" / "python"), str(path)]
    if path.suffix == ".mjs":  # Node looks for packages beside the program
        command = ["node", shutil.copy(path, CLIENTS / "node")]
    numbers = map(str, (callers, texts, words))
    done = subprocess.run([*command, url, *numbers], capture_output=True, text=True, check=False, cwd=CLIENTS)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "program", ["crowd_openai.py", "crowd_langchain.py", pytest.param("crowd_openai.mjs", marks=node)]
)
@pytest.mark.parametrize(("callers", "texts", "words"), [(8, 100, 300), (4, 1_000, 30), (40, 500, 6)])
def test_nobody_loses_a_request_on_a_fresh_server_nor_on_a_warm_one(
    tmp_path: Path, program: str, callers: int, texts: int, words: int
) -> None:
    with server(*STEADY, folder=tmp_path) as (_, url):
        for _ in range(2):
            assert became(program, url, callers, texts, words) == ["answered"] * callers


def test_the_default_chunk_of_langchain_is_accepted_in_any_alphabet(tmp_path: Path) -> None:
    with server(*STEADY, "--max-model-len", "100", folder=tmp_path) as (_, url):
        assert became("crowd_langchain.py", url, 1, 1_000, 800) == ["answered"]


def test_single_texts_are_answered_beside_the_many_of_others(tmp_path: Path) -> None:
    """The texts of the others take half a minute."""
    with (
        server(*STEADY, folder=tmp_path) as (_, url),
        ThreadPoolExecutor() as pool,
        httpx.Client(timeout=60) as client,
    ):

        def waiting() -> float:
            lines = client.get(f"{url}/metrics").text.splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("headrace_waiting_records "))

        others = pool.submit(became, "crowd_openai.py", url, 40, 500, 60)
        while waiting() < 15_000 and not others.done():
            time.sleep(0.05)
        for number in range(5):
            answer = client.post(f"{url}/v1/embeddings", json={"input": f"text {number}"})
            assert answer.status_code == 200, answer.text
        assert waiting() > 0, "they were answered before the texts of the others"
        assert others.result() == ["answered"] * 40
