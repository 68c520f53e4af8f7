"""A stage that cannot go on ends the job with one clear error, keeps what is finished, and hangs nobody."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_rows, texts, write_rows

from headrace.errors import EngineDeadError, JobError
from headrace.events import JobDone, StageDone
from headrace.io.base import Chunk
from headrace.io.jsonl import JsonlSource
from headrace.io.parts import Interval, PartFolder
from headrace.jobs.job import JobEnd, Limits
from headrace.testing import FakeEngine

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """Enough rows for several chunks."""
    return Runner(write_rows(tmp_path / "in.jsonl", texts(3000)), tmp_path / "out.jsonl")


def finish_after(runner: Runner, most: int) -> None:
    """The failed run kept something; the next one does the rest and no more."""
    assert runner.emitted(JobDone)[0].state == "failed"
    assert not runner.sink.exists()
    kept = sum(end - start for start, end in runner.job().output.parts.committed())
    assert 0 < kept <= most
    runner.engine = FakeEngine()
    assert runner.run() == JobEnd("finished", 3000, 0)
    assert runner.computed == 3000 - kept
    assert [identity for identity, _ in read_rows(runner.sink)] == [row["id"] for row in texts(3000)]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), JobError("the input is gone")])
def test_a_source_that_breaks(runner: Runner, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    chunks = JsonlSource.chunks

    def breaking(self: JsonlSource, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        for number, chunk in enumerate(chunks(self, next_todo)):
            if number == 2:
                raise error
            yield chunk

    job = runner.job()
    monkeypatch.setattr(JsonlSource, "chunks", breaking)
    from headrace.jobs.run import run

    with pytest.raises(JobError, match=r"Input/output error|the input is gone"):
        run(job)
    monkeypatch.undo()
    assert runner.computed == 1024, "what was read before is finished"
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


def test_a_disk_that_is_full_at_the_merge(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, parts: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headrace.io.jsonl.JsonlWriter.merge", full)
    with pytest.raises(JobError, match=r"cannot write .*out\.jsonl: .*No space left"):
        runner.run()
    monkeypatch.undo()
    finish_after(runner, most=3000)


def test_an_output_that_cannot_be_written_in_the_format(runner: Runner) -> None:
    class Odd(FakeEngine):
        def forward(self, batch: list[str]) -> Any:
            return [{1, 2} for _ in batch]

    runner.engine = Odd()
    with pytest.raises(JobError, match=r"type set cannot be written"):
        runner.run()


def test_an_engine_that_dies(runner: Runner) -> None:
    class Mortal(FakeEngine):
        def forward(self, batch: list[str]) -> list[list[float]]:
            if len(self.batch_sizes) >= 3:
                raise EngineDeadError("the device fell off the bus")
            return super().forward(batch)

    runner.engine = Mortal()
    with pytest.raises(JobError, match=r"the engine cannot go on: the device fell off the bus; .*run again"):
        runner.run()
    assert not runner.emitted(type(None))
    finish_after(runner, most=runner.computed)


def test_an_engine_whose_prepare_breaks(runner: Runner) -> None:
    class Broken(FakeEngine):
        def prepare(self, inputs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise AssertionError("prepare must not block the event loop")
            raise MemoryError

    runner.engine = Broken()
    with pytest.raises(MemoryError):
        runner.run()


def test_reading_stays_a_bounded_way_ahead_of_the_engine(tmp_path: Path) -> None:
    """While the engine is stuck in its first batch, what is read is bounded by settings."""
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(30_000)), tmp_path / "out.jsonl")
    stuck, go = threading.Event(), threading.Event()
    loaded = 0

    class Slow(FakeEngine):
        def forward(self, batch: list[str]) -> list[list[float]]:
            stuck.set()
            go.wait(10)
            return super().forward(batch)

    last_load = threading.Event()

    def watch(event: Any) -> None:
        nonlocal loaded
        if isinstance(event, StageDone) and event.stage == "load":
            loaded += event.records
            last_load.set()

    runner.engine, runner.on_event = Slow(), watch
    runner.limits = Limits(part_records=500)

    def release() -> None:
        stuck.wait(10)
        while last_load.wait(0.3):  # until nothing more is read
            last_load.clear()
        seen.append(loaded)
        go.set()

    seen: list[int] = []
    thread = threading.Thread(target=release)
    thread.start()
    assert runner.run().records == 30_000
    thread.join()
    assert seen[0] < 8_000
