"""Failures that may pass: tried again, later each time, and dead letters only when that was no use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, texts, write_rows

from headrace.engines.base import Prepared
from headrace.errors import BrokenOffError, EngineDeadError, TooManyErrorsError, TransientError
from headrace.events import BatchFormed, BatchSplit, JobDone, RecordFailed
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine

QUICK = Limits(part_records=50, retry_wait_s=0.01)


class Store(FakeEngine):
    """Fetches what it is given from a store that fails: for some texts, or for some calls, so many times."""

    def __init__(self, *, texts_fail: dict[str, int] | None = None, calls_fail: Sequence[int] = ()) -> None:
        super().__init__()
        self._left = Counter(texts_fail)
        self._bad_calls = set(calls_fail)
        self.calls = 0

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[str] | Exception]:
        return [self._fetch(found) for found in zip(inputs, super().prepare(inputs), strict=True)]

    def _fetch(self, found: tuple[str, Prepared[str] | Exception]) -> Prepared[str] | Exception:
        text, prepared = found
        if self._left[text] > 0:
            self._left[text] -= 1
            return ConnectionError("the store is away")
        return prepared

    def forward(self, batch: list[str]) -> list[list[float]]:
        self.calls += 1
        if self.calls in self._bad_calls:
            raise TransientError("the link is down")
        return super().forward(batch)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(write_rows(tmp_path / "in.jsonl", texts(700)), tmp_path / "out.jsonl", limits=QUICK)


def expected(runner: Runner) -> list[tuple[Any, Any]]:
    return [(row["id"], runner.engine.vector(row["text"])) for row in texts(700)]


def test_records_whose_failure_passes_succeed_in_the_end(runner: Runner) -> None:
    runner.engine = Store(texts_fail={row["text"]: 2 for row in texts(700)[::7]})
    assert runner.run() == JobEnd("finished", 700, 0)
    assert read_rows(runner.sink) == expected(runner)
    assert runner.emitted(RecordFailed) == []


def test_a_batch_whose_failure_passes_is_not_split(runner: Runner) -> None:
    runner.engine = Store(calls_fail=[1, 3])
    assert runner.run() == JobEnd("finished", 700, 0)
    assert read_rows(runner.sink) == expected(runner)
    assert runner.emitted(BatchSplit) == []


def test_what_does_not_pass_is_a_dead_letter_with_its_attempts_and_its_row(runner: Runner) -> None:
    row = texts(700)[41]
    runner.engine = Store(texts_fail={row["text"]: 99})
    assert runner.run() == JobEnd("finished", 700, 1)
    (letter,) = read_errors(runner.sink)
    assert letter == {
        "position": 41,
        "id": "r41",
        "reason": "ConnectionError",
        "message": "the store is away",
        "attempts": 4,
        "record": row,
    }


def test_a_store_that_is_down_holds_up_the_reading_and_ends_the_job(tmp_path: Path) -> None:
    rows = texts(9000)
    runner = Runner(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    runner.limits = Limits(max_attempts=3, retry_wait_s=0.02)
    runner.engine = Store(texts_fail={row["text"]: 99 for row in rows})
    with pytest.raises(TooManyErrorsError, match="ConnectionError"):
        runner.run()


def test_a_stop_does_not_wait_for_retries(runner: Runner) -> None:
    stop = StopRequest()
    runner.limits = Limits(part_records=50, retry_wait_s=3600.0)
    bad = {row["text"]: 99 for row in texts(700)[::50]}
    runner.engine = Store(texts_fail=bad)
    runner.on_event = lambda event: stop.request() if getattr(event, "end", 0) >= 600 else None
    assert runner.run(stop).state == "interrupted"
    runner.on_event = lambda event: None
    runner.engine = Store()
    assert runner.run() == JobEnd("finished", 700, 0)
    assert read_rows(runner.sink) == expected(runner)


def test_so_many_errors_and_no_more(runner: Runner) -> None:
    write_rows(runner.source, [{"id": n, "text": "good" if n % 10 else None} for n in range(700)])
    runner.limits = Limits(part_records=50, max_errors=30)
    with pytest.raises(TooManyErrorsError, match=r"\d\d records failed, more than max_errors=30 allows"):
        runner.run()
    assert runner.emitted(JobDone)[0].state == "failed"
    runner.limits = Limits(part_records=50, max_errors=70)
    assert runner.run() == JobEnd("finished", 700, 70)


def test_a_dead_engine_ends_the_job_with_all_that_was_finished(runner: Runner) -> None:
    class Dying(FakeEngine):
        calls = 0

        def forward(self, batch: list[str]) -> list[list[float]]:
            self.calls += 1
            if self.calls == 3:
                raise EngineDeadError("it is gone")
            return super().forward(batch)

    runner.engine = Dying()
    with pytest.raises(BrokenOffError, match="it is gone; finished records are kept"):
        runner.run()
    done = sum(end - start for start, end in runner.job().output.parts.committed())
    assert done == runner.computed > 0
    runner.engine = FakeEngine()
    assert runner.run() == JobEnd("finished", 700, 0)
    assert runner.computed == 700 - done


class Slow(FakeEngine):
    """Its batches would wait for more records longer than a test may take."""

    default_batch_delay_s = 600.0


def test_the_last_batches_wait_for_no_more_records(runner: Runner) -> None:
    write_rows(runner.source, [{"id": n, "text": "as long as all others"} for n in range(100)])  # which fit one batch
    runner.engine = Slow()
    assert runner.run() == JobEnd("finished", 100, 0)
    assert [(event.size, event.reason) for event in runner.emitted(BatchFormed)] == [(100, "drain")]


def test_a_second_attempt_at_the_end_waits_for_no_more_records(runner: Runner) -> None:
    failed: set[str] = set()

    def once(text: str) -> Exception | None:
        if text != "text 9" or text in failed:
            return None
        failed.add(text)
        return TransientError("busy")

    write_rows(runner.source, [{"id": n, "text": f"text {n}"} for n in range(10)])
    runner.engine = Slow(refuses=once)
    runner.limits = Limits(part_records=50, retry_wait_s=0.0)
    assert runner.run() == JobEnd("finished", 10, 0)
    assert [(event.size, event.reason) for event in runner.emitted(BatchFormed)] == [(10, "drain"), (10, "drain")]
