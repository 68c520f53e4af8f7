"""`headrace run --endpoint`: a job over a running server, killed, refused now and then, and whole in the end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
from tests.acceptance.command import FAKE, end, headrace, start, traced
from tests.acceptance.serving.process import server
from tests.waiting import until

COUNT = 1_500
# Fewer records at a time than the job has under way: the others are refused, and told when to come back.
SERVE = ("--task", "embed", "--engine", "tests.acceptance.engines:slow", "--max-requests", "48")
OVER = ("--task", "embed", "--concurrency", "64", "--attempts", "50")


@pytest.mark.timeout(600)  # a minute and more where the cores are busy: mostly four starts of Python
def test_a_job_over_an_endpoint_survives_kills_and_refusals(tmp_path: Path) -> None:
    rows = ({"id": n, "text": f"text {n}"} for n in range(COUNT))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server(*SERVE, folder=tmp_path) as (_, url):
        command = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--endpoint", url, *OVER)
        with traced(start(*command, folder=tmp_path)) as job:
            until(lambda: list(tmp_path.glob("out.jsonl.parts/part-*.jsonl")), of=job)
        assert not (tmp_path / "out.jsonl").exists()

        places = [part.stem.split("-")[1:] for part in tmp_path.glob("out.jsonl.parts/part-*.jsonl")]
        committed = sum(int(last) - int(first) for first, last in places)
        before = _settled(url)
        status, said = end(start(*command, folder=tmp_path))
        assert status == 0, said
        assert _counted(url, 'status="200"') - before == COUNT - committed  # what is there is not asked for again
        refused = _counted(url, 'status="429"')
        assert 0 < refused < COUNT / 2  # each came back no sooner than it was told
    assert headrace("run", "-i", "in.jsonl", "-o", "here.jsonl", *FAKE, folder=tmp_path)[0] == 0
    assert _rows(tmp_path / "out.jsonl") == _rows(tmp_path / "here.jsonl")
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_an_endpoint_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "a"}\n')
    status, said = headrace(
        *("run", "-i", "in.jsonl", "-o", "out.jsonl", "--endpoint", "http://127.0.0.1:1", "--task", "embed"),
        *("--attempts", "1"),
        folder=tmp_path,
    )
    assert status != 0
    assert "http://127.0.0.1:1 cannot be reached" in said


def _counted(url: str, label: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    route = 'headrace_requests_total{route="/v1/embeddings"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(route) and label in line)


def _settled(url: str) -> float:
    """Requests answered, once those of a client that is gone are over."""
    count = -1.0
    while count != (count := _counted(url, 'status="200"')):
        time.sleep(0.5)
    return count


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
