"""A job that is asked to stop finishes what lies between its finished records, if its grace is long enough."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.jobs.harness import Runner, read_rows

from headrace.events import BatchDone, BatchFormed, PartCommitted
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine

RECORDS = 6_000


class Stop(StopRequest):
    """As the command line has it."""

    grace_s = 10.0


def runner(tmp_path: Path, seconds_per_batch: float, records: int = RECORDS) -> Runner:
    numbers = random.Random(1)
    source = tmp_path / "in.jsonl"
    texts = (" ".join(["w"] * (int(numbers.expovariate(1 / 40)) + 1)) for _ in range(records))
    source.write_text("".join(f'{{"id": {number}, "text": "{text}"}}\n' for number, text in enumerate(texts)))
    engine = FakeEngine(seconds_per_batch=seconds_per_batch)
    return Runner(source, tmp_path / "out.jsonl", engine, Limits(part_records=1_000, commit_interval_s=30))


def stop_after(batches: int, job: Runner, stop: StopRequest) -> None:
    def listen(_: object) -> None:
        if len(job.emitted(BatchDone)) == batches:
            job.on_event = lambda event: None
            stop.request()

    job.on_event = listen


def test_a_stop_leaves_no_gaps_between_its_parts(tmp_path: Path) -> None:
    records = 2 * RECORDS  # more than are read ahead before the stop
    job, stop = runner(tmp_path, 0.005, records), Stop()
    stop_after(10, job, stop)
    end = job.run(stop)
    parts = sorted((part.start, part.end) for part in job.emitted(PartCommitted))
    assert end.state == "interrupted"
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    small = [end - start < 1_000 for start, end in parts]
    assert not any(map(all, pairwise(small))), "of two neighbours one is full, in whatever order their blocks ended"
    done = job.computed
    assert job.run().state == "finished"
    assert job.computed == records > done
    assert [identity for identity, _ in read_rows(job.sink)] == list(range(records))


@pytest.mark.parametrize("batches", range(54, 66, 2))
def test_a_stop_near_the_end_never_counts_rows_that_were_not_run(tmp_path: Path, batches: int) -> None:
    job, stop = runner(tmp_path, 0.005), Stop()
    stop_after(batches, job, stop)
    end = job.run(stop)
    assert end.state == "interrupted" or end.records == RECORDS
    assert job.run().records == RECORDS
    assert [identity for identity, _ in read_rows(job.sink)] == list(range(RECORDS))


def test_a_slow_engine_is_not_waited_for(tmp_path: Path) -> None:
    """What waits would take longer than the grace, so that none of it is begun."""
    job, stop = runner(tmp_path, 1.5), Stop()
    stop_after(1, job, stop)
    assert job.run(stop).state == "interrupted"
    assert len(job.engine.batch_sizes) <= 2
    assert sum(part.end - part.start for part in job.emitted(PartCommitted)) == job.computed


@pytest.mark.parametrize("size", [2, 64])
def test_a_job_whose_last_records_are_in_time_is_finished(tmp_path: Path, size: int) -> None:
    """Also where nobody has seen yet that the input has ended: its records wait for room."""
    job, stop = runner(tmp_path, 0.01, records=30), Stop()
    job.engine.default_batch_size = size
    seen: list[object] = []

    def listen(event: object) -> None:
        if isinstance(event, BatchFormed) and not seen:
            seen.append(event)
            stop.request()

    job.on_event = listen
    assert job.run(stop) == JobEnd("finished", 30, 0)
    assert seen
    assert [identity for identity, _ in read_rows(job.sink)] == list(range(30))
