"""What waits between reading and writing is bounded in bytes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, texts, write_rows

import headrace
from headrace.io.sources.unique_ids import SeenIds
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.memory_budget import Memory
from headrace.jobs.settings import Limits

INTEGERS, ROWS = 150_000, 40  # about 6 MB a row, and 240 MB together
OWN = 120_000_000
"""What reading, encoding and merging some rows takes beside, whatever their number."""
BUFFER = 40_000_000
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""So that what is counted is held, and not kept by the C library for later, which differs from run to run."""
JOB = """
import sys
import headrace
from pathlib import Path
from headrace.jobs.settings import Limits

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

import numpy, pyarrow.parquet
headrace.run([{"v": [1], "text": "warm"}], sink=sys.argv[2] + ".warm." + sys.argv[3], task="custom",
             engine="tests.integration.jobs.test_memory:count", keep_columns=["v"], progress=False)
before = peak()
headrace.run(sys.argv[1], sink=sys.argv[2], task="custom", engine="tests.integration.jobs.test_memory:count",
             keep_columns=["v"], progress=False, limits=Limits(buffer_memory=int(sys.argv[4])))
print(peak() - before)
"""


def count(batch: list[str]) -> list[int]:
    return [len(text) for text in batch]


def write_long(folder: Path, name: str) -> Path:
    path = folder / name
    rows = [{"text": f"row {n}", "v": list(range(n * 1000, n * 1000 + INTEGERS))} for n in range(ROWS)]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)
        return path
    return write_rows(path, rows)


@pytest.mark.parametrize(
    ("source", "sink"),
    [("in.jsonl", "out.parquet"), pytest.param("in.parquet", "out.jsonl", marks=pytest.mark.thorough)],
)
def test_long_rows_take_no_more_than_the_bound_beside_what_a_job_takes_in_any_case(
    tmp_path: Path, source: str, sink: str
) -> None:
    path = write_long(tmp_path, source)
    command = [sys.executable, "-c", JOB, str(path), str(tmp_path / sink), sink.rpartition(".")[2], str(BUFFER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | MALLOC)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < BUFFER + OWN  # with no bound it is 440 MB
    rows = pq.read_table(tmp_path / sink).to_pylist() if sink.endswith("parquet") else None
    if rows is None:
        rows = [json.loads(line) for line in (tmp_path / sink).read_text().splitlines()]
    assert [(row["output"], row["v"][0], len(row["v"])) for row in rows] == [
        (len(f"row {n}"), n * 1000, INTEGERS) for n in range(ROWS)
    ]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """The accounts of the jobs that run."""
    made: list[Memory] = []

    def make(limit: int) -> Memory:
        made.append(Memory(limit))
        return made[-1]

    monkeypatch.setattr(main_path, "Memory", make)
    return made


@pytest.mark.parametrize("given", [{}, {"dedupe": True}, {"prepare": dict, "id_column": "id"}])
@pytest.mark.parametrize("limit", [1, 200_000])
def test_a_job_comes_to_its_end_however_small_the_bound_and_nothing_stays_held(
    tmp_path: Path, kept: list[Memory], given: dict[str, Any], limit: int
) -> None:
    rows: list[Any] = texts(900)
    rows[17] = b"no json"
    rows[18]["text"] = None
    runner = Runner(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    runner.limits = Limits(part_records=50, buffer_memory=limit)
    end = runner.run(**given)
    assert (end.state, end.records, end.failed) == ("finished", 900, 2)
    assert [identity for identity, _ in read_rows(runner.sink)] == [f"r{n}" for n in range(900) if n not in (17, 18)]
    assert [letter["position"] for letter in read_errors(runner.sink)] == [17, 18]
    [memory] = kept
    assert (memory.records, memory.prepared) == (0, 0)
    assert memory.held == pytest.approx(0, abs=1)


def test_nothing_is_read_while_the_bound_is_exceeded(tmp_path: Path, kept: list[Memory]) -> None:
    rows = [{"id": n, "text": "word " * 40_000} for n in range(60)]  # 200 kB each
    runner = Runner(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    runner.limits = Limits(part_records=50, buffer_memory=2_000_000)
    most: list[float] = []
    runner.on_event = lambda event: most.extend(memory.held for memory in kept)
    assert runner.run().records == 60
    assert max(most) < 2_500_000


def test_the_digests_of_ids_do_not_outlive_a_job(tmp_path: Path) -> None:
    """They are 16 MB, and the objects of a job are in circles, which Python may leave for long."""
    path = write_rows(tmp_path / "in.jsonl", [{"id": f"{n * 7 % 10}", "text": "text"} for n in range(10)])
    gc.collect()
    gc.disable()
    try:
        headrace.run(str(path), sink=str(tmp_path / "out.jsonl"), task="custom", engine=count, progress=False)
        assert not [one for one in gc.get_objects() if isinstance(one, SeenIds)]
    finally:
        gc.enable()
