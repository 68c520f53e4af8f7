"""A stage that cannot go on ends the job with one clear error, keeps what is finished, and hangs nobody."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, texts, write_rows

from headrace.errors import BrokenOffError, EngineDeadError, JobError, TooManyErrorsError
from headrace.events import BatchDone, Event, JobDone, PartCommitted, StageDone
from headrace.io.base import Chunk
from headrace.io.formats import json_tables
from headrace.io.storage.parts import Interval, PartFolder
from headrace.io.storage.rows import FileSource
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """Enough rows for several chunks."""
    return Runner(write_rows(tmp_path / "in.jsonl", texts(2000)), tmp_path / "out.jsonl")


def finish_after(runner: Runner, most: int) -> None:
    """The failed run kept something; the next one does the rest and no more."""
    assert runner.emitted(JobDone)[0].state == "failed"
    assert not runner.sink.exists()
    kept = sum(end - start for start, end in runner.job().output.parts.committed())
    assert 0 < kept <= most
    runner.engine = FakeEngine()
    assert runner.run() == JobEnd("finished", 2000, 0)
    assert runner.computed == 2000 - kept
    assert [identity for identity, _ in read_rows(runner.sink)] == [row["id"] for row in texts(2000)]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), JobError("the input is gone")])
def test_a_source_that_breaks(runner: Runner, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    chunks = FileSource.chunks

    def breaking(self: FileSource, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        for number, chunk in enumerate(chunks(self, next_todo)):
            if number == 2:
                raise error
            yield chunk

    job = runner.job()
    monkeypatch.setattr(json_tables, "TABLE_ROWS", 512)
    monkeypatch.setattr(FileSource, "chunks", breaking)
    from headrace.jobs.run import run

    with pytest.raises(JobError, match=r"Input/output error|the input is gone"):
        run(job)
    monkeypatch.undo()
    assert runner.computed == 1000, "what was read before, two chunks of 500, is finished"
    finish_after(runner, most=1024)


def test_a_full_disk(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = PartFolder.commit
    room = 3

    def filling(self: PartFolder, interval: Interval, rows: bytes, failures: bytes) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(self, interval, rows, failures)

    monkeypatch.setattr(PartFolder, "commit", filling)
    with pytest.raises(JobError, match=r"cannot write to .*out\.jsonl\.parts: No space left on device; .*run again"):
        runner.run()
    monkeypatch.undo()
    finish_after(runner, most=3 * 2 * runner.limits.part_records)


def test_a_part_that_is_removed_while_the_job_runs(runner: Runner) -> None:
    def removing(event: Event) -> None:
        if isinstance(event, PartCommitted) and event.start == 0:
            runner.sink.with_name("out.jsonl.parts").joinpath(f"part-{0:012}-{event.end:012}.jsonl").unlink()

    runner.on_event = removing
    with pytest.raises(BrokenOffError, match=r"out\.jsonl\.parts has a gap at record 0: run again to fill it"):
        runner.run()
    runner.on_event = lambda event: None
    finish_after(runner, most=1999)


def test_a_disk_that_is_full_at_the_merge(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, parts: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headrace.io.formats.jsonl.JsonlWriter.merge", full)
    with pytest.raises(JobError, match=r"cannot write .*out\.jsonl: .*No space left"):
        runner.run()
    monkeypatch.undo()
    finish_after(runner, most=2000)


def test_an_output_that_cannot_be_written_in_the_format(runner: Runner) -> None:
    class Odd(FakeEngine):
        def forward(self, batch: list[str]) -> Any:
            return [{1, 2} for _ in batch]

    runner.engine = Odd()
    with pytest.raises(JobError, match=r"type set, which no format can hold"):
        runner.run()


def test_one_output_that_cannot_be_written_costs_its_record(runner: Runner) -> None:
    class Odd(FakeEngine):
        def vector(self, text: str) -> Any:
            return {1, 2} if text.startswith("text 7 ") else super().vector(text)

    write_rows(runner.source, [{"id": n, "text": None if n == 5 else f"text {n} x"} for n in range(700)])
    runner.engine = Odd()
    assert runner.run() == JobEnd("finished", 700, 2)
    assert [identity for identity, _ in read_rows(runner.sink)] == [n for n in range(700) if n not in (5, 7)]
    letters = read_errors(runner.sink)
    assert [(letter["position"], letter["reason"]) for letter in letters] == [(5, "RecordError"), (7, "RecordError")]


def test_an_engine_that_dies(runner: Runner) -> None:
    class Mortal(FakeEngine):
        def forward(self, batch: list[str]) -> list[list[float]]:
            if len(self.batch_sizes) >= 3:
                raise EngineDeadError("the device fell off the bus")
            return super().forward(batch)

    runner.engine = Mortal()
    with pytest.raises(JobError, match=r"the engine cannot continue: the device fell off the bus; .*run again"):
        runner.run()
    finish_after(runner, most=runner.computed)


def test_an_engine_whose_prepare_breaks(runner: Runner) -> None:
    class Broken(FakeEngine):
        def prepare(self, inputs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise AssertionError("prepare must not block the event loop")
            raise MemoryError

    runner.engine = Broken()
    with pytest.raises(TooManyErrorsError, match=r"in this run: \d+ MemoryError"):
        runner.run()


class Narrow(FakeEngine):
    """A small budget, and so a small window: what may be in flight is far less than the input."""

    default_batch_cost = 512


class Gate:
    """A place where the job is stuck until nothing is read any more; `loaded` is how far reading had come by then."""

    def __init__(self) -> None:
        self.loaded = self._so_far = 0
        self._stuck, self._go, self._read = threading.Event(), threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> Gate:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.join()

    def hear(self, event: Any) -> None:
        if isinstance(event, StageDone) and event.stage == "load":
            self._so_far += event.records
            self._read.set()

    def wait(self) -> None:
        self._stuck.set()
        self._go.wait(60)

    def _watch(self) -> None:
        self._stuck.wait(60)
        while self._read.wait(0.3):
            self._read.clear()
        self.loaded = self._so_far
        self._go.set()


def test_reading_stays_a_bounded_way_ahead_of_a_stuck_engine(tmp_path: Path) -> None:
    class Stuck(Narrow):
        def forward(self, batch: list[str]) -> list[list[float]]:
            gate.wait()
            return super().forward(batch)

    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(8_000)), tmp_path / "out.jsonl")
    with Gate() as gate:
        runner.engine, runner.on_event, runner.limits = Stuck(), gate.hear, Limits(part_records=200)
        assert runner.run().records == 8_000
    assert 0 < gate.loaded < 4_000


def test_reading_stays_a_bounded_way_ahead_of_a_stuck_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = PartFolder.commit

    def stuck(self: PartFolder, interval: Interval, rows: bytes, failures: bytes) -> None:
        gate.wait()
        commit(self, interval, rows, failures)

    monkeypatch.setattr(PartFolder, "commit", stuck)
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(8_000)), tmp_path / "out.jsonl")
    with Gate() as gate:
        runner.engine, runner.on_event, runner.limits = Narrow(), gate.hear, Limits(part_records=200)
        assert runner.run().records == 8_000
    assert 0 < gate.loaded < 5_000


def test_a_stopped_job_reads_no_more(tmp_path: Path) -> None:
    stop = StopRequest()
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(8_000)), tmp_path / "out.jsonl")
    runner.engine = Narrow()
    runner.on_event = lambda event: stop.request() if isinstance(event, BatchDone) else None
    assert runner.run(stop).state == "interrupted"
    assert sum(event.records for event in runner.emitted(StageDone) if event.stage == "load") < 4_000
