"""A job that is stopped, broken or killed at any point continues, and ends as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_rows, texts, write_rows

from headrace.errors import ConfigError, JobError, OutputLockedError, ResumeMismatchError
from headrace.events import BatchDone, Event, JobDone, JobStarted, PartCommitted
from headrace.io.storage import parts
from headrace.io.storage.parts import PartFolder
from headrace.jobs.pipeline import write
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.jobs.state.job_state import JobState, Pass
from headrace.jobs.state.output import JobOutput, StartMode
from headrace.testing import FakeEngine


@pytest.fixture
def whole(runner: Runner) -> bytes:
    """The output of a run that nothing disturbs."""
    undisturbed = Runner(runner.source, runner.sink.with_stem("whole"))
    undisturbed.run()
    return undisturbed.sink.read_bytes()


def stop_after(batches: int, stop: StopRequest) -> Any:
    """A listener that asks to stop when so many batches have come back."""
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        seen += isinstance(event, BatchDone)
        if seen == batches:
            stop.request()

    return listen


def test_a_stopped_job_keeps_what_it_finished_and_does_not_repeat_it(runner: Runner, whole: bytes) -> None:
    done = 0
    for batches in (1, 2, 3):
        stop = StopRequest()
        runner.on_event = stop_after(batches, stop)
        end = runner.run(stop)
        assert end.state == runner.emitted(JobDone)[0].state == "interrupted"
        assert runner.emitted(JobStarted)[0].records_done == done < end.records < 700
        assert runner.computed == end.records, "what was computed is committed, and nothing twice"
        done = end.records
        assert not runner.sink.exists()
    runner.on_event = lambda event: None
    assert runner.run() == JobEnd("finished", 700, 0)
    assert runner.computed == 700
    assert runner.sink.read_bytes() == whole


def test_stopping_before_the_first_record_or_after_the_last_is_harmless(runner: Runner, whole: bytes) -> None:
    stop = StopRequest()
    stop.request()
    assert runner.run(stop) == JobEnd("interrupted", 0, 0)
    assert runner.computed == 0
    late = StopRequest()
    runner.on_event = lambda event: late.request() if isinstance(event, PartCommitted) and event.end == 700 else None
    runner.run(late)
    runner.on_event = lambda event: None
    assert runner.run().records == 700
    assert runner.computed == 700
    assert runner.sink.read_bytes() == whole


def test_a_finished_job_does_nothing(runner: Runner) -> None:
    runner.run()
    before = runner.sink.stat()
    assert runner.run() == JobEnd("already_finished", 700, 0)
    assert runner.computed == 700
    assert (runner.sink.stat().st_mtime_ns, runner.sink.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_rows_are_committed_while_the_job_runs(tmp_path: Path) -> None:
    """Long before a part is full, so that a kill costs seconds."""
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(400)), tmp_path / "out.jsonl")
    runner.engine = FakeEngine(seconds_per_batch=0.05)
    runner.limits = Limits(part_records=100_000, commit_interval_s=0.05)
    runner.run()
    first = next(number for number, event in enumerate(runner.events) if isinstance(event, PartCommitted))
    assert any(isinstance(event, BatchDone) for event in runner.events[first:])


def test_a_longer_run_makes_longer_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow engine makes a file every two seconds for days."""
    monkeypatch.setattr(write, "SHARE_AT_RISK", 1.0)
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(800)), tmp_path / "out.jsonl")
    runner.engine = FakeEngine(seconds_per_batch=0.02)
    runner.limits = Limits(commit_interval_s=0.02)
    started = time.monotonic()
    runner.run()
    parts = sum(isinstance(event, PartCommitted) for event in runner.events)
    assert parts <= 3 * math.log2((time.monotonic() - started) / 0.02)


def test_what_a_kill_can_cost() -> None:
    assert [write.least_wait_s(age) for age in (0.0, 200.0, 1_000.0, 1e6)] == [0.0, 2.0, 10.0, 60.0]


class Killed(BaseException):
    """Stands in for `kill -9`: nothing of the program catches it."""


class Reaper:
    """Kills at the n-th moment: each rename and each removal is one before it and one after it.

    Writes of the report's thread do not count: they decide nothing, and a kill there would stop that thread alone.
    """

    def __init__(self, moment: int, patch: pytest.MonkeyPatch) -> None:
        self.left = moment
        patch.setattr(Path, "replace", self.watch(Path.replace))
        patch.setattr(Path, "unlink", self.watch(Path.unlink))

    def watch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *args: Any, **options: Any) -> Any:
            if threading.current_thread().name == "headrace-recorder":
                return real(path, *args, **options)
            if self.left <= 0 and path.name.endswith(".tmp"):
                return None  # the dead do not clean up
            self.strike()
            result = real(path, *args, **options)
            self.strike()
            return result

        return call

    def strike(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def test_killed_at_any_write(tmp_path: Path) -> None:
    """Parts, dead letters, merge, mark, clearing, overwriting: after each the job continues to the same files."""
    source = write_rows(tmp_path / "in.jsonl", [*texts(90), b"broken", *texts(100)[90:]])
    limits = Limits(part_records=20)
    undisturbed = Runner(source, tmp_path / "whole.jsonl", limits=limits)
    undisturbed.run()
    runner = Runner(source, tmp_path / "out.jsonl", limits=limits)
    moment = 0
    for moment in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            reaper = Reaper(moment, patch)
            try:
                runner.run(overwrite=True)
            except Killed:
                pass
        if reaper.left > 0:
            break
        runner.run()
        assert runner.sink.read_bytes() == undisturbed.sink.read_bytes()
        assert (
            runner.sink.with_suffix(".errors.jsonl").read_bytes()
            == undisturbed.sink.with_suffix(".errors.jsonl").read_bytes()
        )
        assert runner.run() == JobEnd("already_finished", 101, 1)
        left = {path.name for path in Path(f"{runner.sink}.parts").iterdir()}
        assert left == {"job.json", "lock"}
    assert moment > 30


def test_a_resume_with_something_else_is_refused_and_says_what(runner: Runner) -> None:
    stop = StopRequest()
    runner.on_event = stop_after(2, stop)
    runner.run(stop)
    runner.on_event = lambda event: None
    committed = sorted(path.name for path in Path(f"{runner.sink}.parts").glob("part-*"))

    with pytest.raises(ResumeMismatchError, match=r"id_column was 'id', now 'text'\. Restore that"):
        runner.run(id_column="text")
    runner.engine = FakeEngine("other", max_model_len=5)
    with pytest.raises(
        ResumeMismatchError,
        match=r"max_model_len was not set, now 5; "
        r"model was 'fake', now 'other'\.",
    ):
        runner.run()
    runner.engine = FakeEngine()
    with runner.source.open("a") as file:
        file.write('{"id": "new", "text": "row"}\n')
    with pytest.raises(
        ResumeMismatchError, match=r"the content of the input has changed; the input's size in bytes was \d+, now \d+\."
    ):
        runner.run()

    assert sorted(path.name for path in Path(f"{runner.sink}.parts").glob("part-*")) == committed
    assert runner.run(overwrite=True) == JobEnd("finished", 701, 0)
    assert runner.computed == 701


def test_a_finished_job_is_not_taken_for_another(runner: Runner) -> None:
    runner.run()
    runner.engine = FakeEngine("other")
    with pytest.raises(ResumeMismatchError, match="model was 'fake', now 'other'"):
        runner.run()
    assert runner.run(overwrite=True).state == "finished"
    assert read_rows(runner.sink)[0][1] == runner.engine.vector(texts(1)[0]["text"])


def test_a_file_no_job_wrote_is_not_replaced(runner: Runner) -> None:
    for path in (runner.sink, runner.sink.with_suffix(".errors.jsonl")):
        path.write_text("mine")
        with pytest.raises(ConfigError, match="exists and was not written by a job here"):
            runner.run()
        assert path.read_text() == "mine"
        assert not Path(f"{runner.sink}.parts").exists()
        path.unlink()
    runner.sink.write_text("mine")
    assert runner.run(overwrite=True).state == "finished"
    assert len(read_rows(runner.sink)) == 700


def test_an_output_that_was_changed_is_not_called_finished(runner: Runner, whole: bytes) -> None:
    runner.run()
    runner.sink.write_text("mine")
    with pytest.raises(ConfigError, match="not the file the finished job wrote"):
        runner.run()
    runner.sink.unlink()
    assert runner.run() == JobEnd("finished", 700, 0)
    assert runner.sink.read_bytes() == whole


def test_a_second_writer_is_refused_by_name(runner: Runner) -> None:
    with runner.job().output.locked(), pytest.raises(OutputLockedError, match=f"process {os.getpid()} on "):
        runner.run()
    assert runner.run().state == "finished"


def test_parts_that_contradict_each_other_are_refused(runner: Runner) -> None:
    stop = StopRequest()
    stop.request()
    runner.run(stop)
    folder: PartFolder = runner.job().output.parts
    folder.commit(parts.Interval(0, 10), b"", b"")
    folder.commit(parts.Interval(5, 15), b"", b"")
    with pytest.raises(JobError, match="two parts hold position 5"):
        runner.run()


def test_a_gap_is_never_merged(runner: Runner) -> None:
    output: JobOutput = runner.job().output
    with output.locked():
        todo = output.begin(StartMode(JobState({})))
        assert isinstance(todo, Pass)
        output.parts.commit(parts.Interval(0, 10), b"", b"")
        output.parts.commit(parts.Interval(11, 15), b"", b"")
        with pytest.raises(JobError, match="a gap at record 10"):
            todo.finish()
    assert not runner.sink.exists()


@pytest.mark.parametrize("damage", [lambda _: "{", lambda text: json.dumps(json.loads(text) | {"before": 5})])
def test_a_damaged_job_file_is_named(runner: Runner, damage: Callable[[str], str]) -> None:
    stop = StopRequest()
    stop.request()
    runner.run(stop)
    state = Path(f"{runner.sink}.parts", "job.json")
    state.write_text(damage(state.read_text()))
    with pytest.raises(JobError, match=r"job\.json is damaged"):
        runner.run()
    assert runner.run(overwrite=True).state == "finished"
