"""Engines that take too long, fail at one record only, or are gone: what becomes of the others."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.gpu_doubles import OnGpu
from tests.integration.jobs.harness import Runner, read_errors, read_rows, texts, write_rows
from tests.settings import job_settings

import headrace
from headrace.app.jobs import job as jobs
from headrace.concurrency.short_turns import short_turns
from headrace.device.memory import AvailableMemory, MemoryWatch
from headrace.engines.capabilities import memory_of
from headrace.engines.choosing.process import ProcessEngine
from headrace.errors import (
    BrokenOffError,
    ConfigError,
    EngineDeadError,
    EngineError,
    TransientError,
    WorkerDiedError,
)
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine, FakeStepEngine, FakeStreamEngine

ROWS = 60
DOUBLES = "tests.integration.jobs.gpu_doubles"


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    limits = Limits(part_records=50, retry_wait_s=0.0, max_attempts=3)
    return Runner(write_rows(tmp_path / "in.jsonl", texts(ROWS)), tmp_path / "out.jsonl", limits=limits)


def test_a_failure_that_never_passes_is_its_own_records(runner: Runner) -> None:
    runner.engine = FakeEngine(refuses=lambda text: TransientError("away") if text.startswith("text 7 ") else None)
    assert runner.run() == JobEnd("finished", ROWS, 1)
    [letter] = read_errors(runner.sink)
    assert (letter["position"], letter["reason"], letter["attempts"]) == (7, "TransientError", 3)


def test_a_request_that_takes_too_long_is_cancelled_and_is_a_dead_letter(runner: Runner) -> None:
    class Slow(FakeStreamEngine):
        async def infer(self, payload: str) -> list[float]:
            if payload.startswith("text 7 "):
                await asyncio.Event().wait()
            return await super().infer(payload)

    made: Any = Slow()
    runner.engine = made
    assert runner.run(engine_timeout_s=0.5) == JobEnd("finished", ROWS, 1)
    [letter] = read_errors(runner.sink)
    assert (letter["position"], letter["reason"], letter["attempts"]) == (7, "ProcessTimeoutError", 1)
    assert "0.5 s" in letter["message"] and "engine_timeout_s" in letter["message"]


def test_a_step_that_takes_too_long_ends_the_job_and_costs_no_record(runner: Runner) -> None:
    made: Any = FakeStepEngine(before_step=lambda: time.sleep(3) if len(made.steps) > 5 else None)
    runner.engine = made
    with pytest.raises(BrokenOffError, match=r"not finished a step after 0.5 s \(engine_timeout_s\)"):
        runner.run(engine_timeout_s=0.5)
    assert not list(runner.sink.parent.rglob("*.errors.jsonl")) or not any(
        path.read_text() for path in runner.sink.parent.rglob("*.errors.jsonl")
    )


def test_a_limit_that_is_no_number_of_seconds_is_refused(runner: Runner) -> None:
    for limit in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"engine_timeout_s is .*; it must be a finite number > 0"):
            runner.run(engine_timeout_s=limit)


def test_an_engine_that_cannot_prepare_any_more_ends_the_job(runner: Runner) -> None:
    class Gone(FakeEngine):
        def prepare(self, inputs: Any) -> Any:
            raise EngineDeadError("out of order")

    runner.engine = Gone()
    with pytest.raises(BrokenOffError, match="the engine cannot continue: out of order"):
        runner.run()


def test_an_engine_in_a_process_gives_what_it_gives_here(runner: Runner) -> None:
    made: Any = ProcessEngine("embed", engine="headrace.testing:FakeEngine", options={"max_model_len": 20})
    runner.engine = made
    assert runner.run() == JobEnd("finished", ROWS, 0)
    made.close()
    here = FakeEngine(max_model_len=20)
    assert made.describe() == here.describe()
    assert made.profile == here.profile
    rows = [" ".join(row["text"].split()[:20]) if len(row["text"].split()) > 20 else row["text"] for row in texts(ROWS)]
    assert [vector for _, vector in read_rows(runner.sink)] == [here.vector(text) for text in rows]


def on_gpu(folder: Path, kind: str) -> Any:
    folder.mkdir()
    return ProcessEngine("embed", str(folder), engine=f"{DOUBLES}:{kind}")


def test_an_engine_in_a_process_prepares_while_two_batches_run(tmp_path: Path) -> None:
    made = on_gpu(tmp_path / "pids", "Together")
    assert made.profile.overlaps
    with ThreadPoolExecutor(3) as threads:
        first, second = (threads.submit(made.forward, ["a"]) for _ in range(2))
        prepared = threads.submit(made.prepare, ["meet"])
        assert (first.result(), second.result(), len(prepared.result())) == ([1.0], [1.0], 1)
    made.close()


def test_the_memory_and_the_passes_of_an_engine_in_a_process_are_watched(tmp_path: Path) -> None:
    made = on_gpu(tmp_path / "pids", "OnGpu")
    watch = MemoryWatch(*memory_of(made))
    assert (watch.limit, made.forward_meter().device) == (AvailableMemory(8 * 10**9, "a GPU"), "cuda:1")
    for size in (100, 200, 400):
        made.forward(["a"] * size)
        watch.ran(size, 10.0 * size)
    assert watch.highest == 2 * 10**9
    assert watch.bound == pytest.approx((0.8 * 8e9 - 1e9) / 1e6 * 10, rel=0.01)
    assert made.forward_meter().read().passes == 3
    assert isinstance(made.forward(["text 17 "])[0], WorkerDiedError)
    made.forward(["a"])
    assert made.forward_meter().read().passes == 4, "also those of an earlier process"
    made.close()


@pytest.mark.parametrize("in_process", [False, True])
def test_a_lost_device_costs_the_record_that_did_it_and_the_job_goes_on(tmp_path: Path, in_process: bool) -> None:
    """Without `engine_process` nothing runs in a child process before that."""
    source, sink, pids = write_rows(tmp_path / "in.jsonl", texts(ROWS)), tmp_path / "out.jsonl", tmp_path / "pids"
    pids.mkdir()
    settings = job_settings(
        source, sink, task="embed", engine=f"{DOUBLES}:OnGpu", model=str(pids), engine_process=in_process
    )
    end, _ = jobs.execute(settings, StopRequest(), progress=False)
    assert end == JobEnd("finished", ROWS, 1)
    [letter] = read_errors(sink)
    assert (letter["position"], letter["reason"]) == (17, "WorkerDiedError")
    assert "device-side assert" in letter["message"] or "cuda:1 failed" in letter["message"]
    assert len(list(pids.iterdir())) <= 6, "one process more for each step towards the record"
    assert (pids / f"{os.getpid()}.pid").exists() is not in_process


def test_turns_stay_short_until_the_last_user_leaves() -> None:
    before = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_threads_take_short_turns_while_a_gpu_computes(kind: str, tmp_path: Path) -> None:
    turns: list[float] = []

    class Noting(OnGpu):
        def forward(self, batch: Sequence[Any]) -> list[Any]:
            turns.append(sys.getswitchinterval())
            return FakeEngine.forward(self, list(batch))

        def hardware(self) -> dict[str, object]:
            return {"device": "a GPU" if kind == "gpu" else "cpu"}

    before = sys.getswitchinterval()
    rows = [{"id": str(number), "text": "a text"} for number in range(20)]
    done = headrace.run(rows, sink=lambda outputs: None, engine=Noting(str(tmp_path)), task="embed", progress=False)
    assert done.ok == 20
    assert sys.getswitchinterval() == before
    assert set(turns) == {0.0005 if kind == "gpu" else before}


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("headrace.testing:FakeStepEngine", ConfigError, "takes requests one by one and cannot run in a child process"),
        ("headrace.testing:FakeStreamEngine", ConfigError, "takes requests one by one"),
        ("tests.acceptance.engines:broken", EngineError, "cannot be loaded: KeyError: 'weights'"),
        ("nowhere:at_all", ConfigError, "cannot import nowhere"),
        ("tests.acceptance.crashing:crashing_load", EngineError, "the process ended with status 5 before it was ready"),
    ],
)
def test_what_cannot_run_there_says_why(name: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ProcessEngine("embed", engine=name).forward(["x"])
