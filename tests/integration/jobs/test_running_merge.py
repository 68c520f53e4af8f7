"""A large output file is written while its job runs, and is what a merge at the end would have written."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.jobs.harness import Runner

from headrace.errors import JobError
from headrace.events import PartCommitted
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.state import running_merge
from headrace.testing import FakeEngine

RECORDS = 600
LONG = 40_000
"""Bytes of a record, which take twice as many characters: the merge begins after a third of the records."""


class Slow(FakeEngine):
    """It still has batches to compute when most parts are committed."""

    default_batch_size = 10


def long_text(row: int) -> str:
    return random.Random(row).randbytes(LONG).hex()


def runner(tmp_path: Path, suffix: str, extra: Callable[[int], Any] = str) -> Runner:
    source = tmp_path / "in.jsonl"
    rows = ({"id": row, "text": f"text {row}", "long": long_text(row), "extra": extra(row)} for row in range(RECORDS))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Runner(source, tmp_path / f"out{suffix}")


def run(job: Runner, stop: StopRequest | None = None) -> str:
    return job.run(stop, keep_columns=("long", "extra")).state


def at_each_part(job: Runner, look: Callable[[int], object]) -> None:
    """Call a function with the number of the parts so far."""

    def listen(event: object) -> None:
        if isinstance(event, PartCommitted):
            look(len(job.emitted(PartCommitted)))

    job.on_event = listen


def wait_until(shown: Callable[[], object]) -> None:
    ends = time.monotonic() + 60
    while not shown():
        assert time.monotonic() < ends
        time.sleep(0.01)


def unfinished(job: Runner) -> Sequence[Path]:
    return list(job.sink.with_name(f"{job.sink.name}.parts").glob(f".{job.sink.name}*"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_file_grows_with_the_job_and_is_that_of_a_merge_at_its_end(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = runner(tmp_path, suffix)
    at_each_part(job, lambda parts: wait_until(lambda: unfinished(job)) if parts == 8 else None)
    assert run(job) == "finished"
    early = job.sink.read_bytes()

    monkeypatch.setattr(running_merge, "BEGIN_BYTES", 1 << 60)
    job.sink.unlink()
    job, grown = runner(tmp_path, suffix), list[Path]()
    at_each_part(job, lambda _: grown.extend(unfinished(job)))
    assert run(job) == "finished"
    assert not grown
    assert job.sink.read_bytes() == early


def test_columns_that_change_their_type_late_are_merged_at_the_end(tmp_path: Path) -> None:
    job = runner(tmp_path, ".parquet", lambda row: row if row < RECORDS - 60 else f"row {row}")
    assert run(job) == "finished"
    table = pq.read_table(job.sink)
    assert table["id"].to_pylist() == list(range(RECORDS))
    assert table["extra"].to_pylist() == [*map(str, range(RECORDS - 60)), *(f"row {row}" for row in range(540, 600))]
    assert not unfinished(job)


def test_a_stopped_job_leaves_no_file_that_grows_and_goes_on(tmp_path: Path) -> None:
    job, stop = runner(tmp_path, ".jsonl"), StopRequest()
    job.engine = Slow(seconds_per_batch=0.05)
    at_each_part(job, lambda parts: stop.request() if parts == 6 else None)
    assert run(job, stop) == "interrupted"
    assert not unfinished(job)
    assert not job.sink.exists()
    job.on_event = lambda event: None
    assert run(job) == "finished"
    rows = [json.loads(line) for line in job.sink.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(RECORDS))
    assert all(row["long"] == long_text(row["id"]) for row in rows)


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    job = runner(tmp_path, ".jsonl")
    at_each_part(job, lambda parts: job.sink.write_text("mine") if parts == 8 else None)
    with pytest.raises(JobError, match="has appeared"):
        run(job)
    assert job.sink.read_text() == "mine"
    assert not unfinished(job)
    job.sink.unlink()
    job.on_event = lambda event: None
    assert run(job) == "finished"
    assert len(job.sink.read_text().splitlines()) == RECORDS
