"""A job on workers, Ray's or processes of this machine: the same output, whoever dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet
import pytest
from tests.acceptance.command import headrace, start, traced
from tests.settings import job_settings
from tests.waiting import until

from headrace.app.jobs import job as jobs
from headrace.errors import ConfigError, EngineError, UnknownOptionError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.observe.reporting.report import Report

ENGINES = "tests.integration.cluster.engines"
ROOT = Path(__file__).resolve().parents[3]
Rows = Callable[..., Path]


class Workers(Protocol):
    """A kind of workers."""

    def run(
        self, source: Path, sink: Path, *, replicas: int = 2, stop: StopRequest | None = None, **settings: Any
    ) -> tuple[JobEnd, Report]:
        """Run a job on so many of them."""

    def wait_until_none_is_left(self) -> None:
        """The test's time limit ends this if one stays."""


class OnRay:
    def run(
        self, source: Path, sink: Path, *, replicas: int = 2, stop: StopRequest | None = None, **settings: Any
    ) -> tuple[JobEnd, Report]:
        from headrace.cluster.base import ClusterResources
        from headrace.cluster.ray.workers import execute

        given = job_settings(source, sink, **{"task": "custom", **settings})
        return execute(given, ClusterResources(replicas=replicas, cpus=0.5), stop or StopRequest(), progress=False)

    def wait_until_none_is_left(self) -> None:
        import ray

        until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], 600)


class InProcesses:
    def run(
        self, source: Path, sink: Path, *, replicas: int = 2, stop: StopRequest | None = None, **settings: Any
    ) -> tuple[JobEnd, Report]:
        from headrace.cluster.local_workers import execute

        given = job_settings(source, sink, **{"task": "custom", **settings})
        if (os.cpu_count() or 1) < replicas:
            pytest.skip("needs a core for each worker")
        return execute(given, replicas, stop or StopRequest(), progress=False)

    def wait_until_none_is_left(self) -> None:
        until(lambda: not worker_processes(), 600)


def worker_processes() -> list[str]:
    """The children of this process that are local workers."""
    listed = subprocess.run(
        ["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if "headrace.processes.link" in line]


@pytest.fixture(params=["ray", "processes"])
def workers(request: pytest.FixtureRequest) -> Workers:
    if request.param == "processes":
        return InProcesses()
    request.getfixturevalue("cluster")
    return OnRay()


MORE_ON_RAY = pytest.mark.parametrize(
    "workers", ["processes", pytest.param("ray", marks=pytest.mark.thorough)], indirect=True
)
"""What a job does with its workers, which is the same code for both kinds."""


def here(source: Path, sink: Path, stop: StopRequest | None = None, **settings: Any) -> tuple[JobEnd, Report]:
    settings.setdefault("task", "custom")
    return jobs.execute(job_settings(source, sink, **settings), stop or StopRequest(), progress=False)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_output_is_that_of_a_local_job_byte_for_byte(workers: Workers, rows: Rows, tmp_path: Path) -> None:
    source = rows(3000, row7=None, row8=5, row2500="")
    local, remote = tmp_path / "local.jsonl", tmp_path / "remote.jsonl"
    options: dict[str, Any] = {"task": "embed", "engine": "headrace.testing:FakeEngine"}
    end, report = here(source, local, **options)
    remote_end, remote_report = workers.run(source, remote, **options)
    assert remote_end == end
    assert remote.read_bytes() == local.read_bytes()
    assert remote.with_suffix(".errors.jsonl").read_bytes() == local.with_suffix(".errors.jsonl").read_bytes()
    assert (remote_report.ok, remote_report.failures) == (report.ok, report.failures)
    assert remote_report.tokens == report.tokens
    assert sum(lane.records for lane in remote_report.lanes) >= report.ok
    # One that is lost on a crowded machine may have done nothing, and its records are done by the other.
    assert all(lane.lost or (lane.batches and 0 < lane.busy <= 1) for lane in remote_report.lanes)


@pytest.mark.parametrize("first", ["here", "on workers"])
def test_a_job_goes_on_elsewhere_and_computes_nothing_twice(
    workers: Workers, first: str, rows: Rows, tmp_path: Path
) -> None:
    source, sink, journals = rows(4000), tmp_path / "out.jsonl", tmp_path / "journals"
    journals.mkdir()
    options = {
        "task": "embed",
        "engine": f"{ENGINES}:journal",
        "model": str(journals),
        "limits": Limits(part_records=256),
    }
    stop = StopRequest()
    begin, go_on = (here, workers.run) if first == "here" else (workers.run, here)
    threading.Thread(target=_stop_at_first_part, args=(stop, sink), daemon=True).start()
    assert begin(source, sink, stop=stop, **options)[0].state == "interrupted"
    done_before = _journal(journals).total()
    assert 0 < done_before < 4000
    assert go_on(source, sink, **options)[0] == JobEnd("finished", 4000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(4000)]
    assert set(_journal(journals).values()) == {1}


def test_workers_share_the_work_and_each_has_a_lane_in_the_report(workers: Workers, rows: Rows, tmp_path: Path) -> None:
    source, journals = rows(12_000), tmp_path / "journals"
    journals.mkdir()
    _, report = workers.run(
        source, tmp_path / "out.jsonl", task="embed", engine=f"{ENGINES}:journal", model=str(journals)
    )
    done = {file.stem: len(file.read_text().splitlines()) for file in journals.glob("*.txt")}
    assert sorted(done.values()) == sorted(lane.records for lane in report.lanes)
    assert [lane.worker for lane in report.lanes] == ["1", "2"]
    assert min(done.values()) > 1_000


@MORE_ON_RAY
@pytest.mark.parametrize("rounded", [1.001, 1.5])
def test_workers_choose_dtype_and_budget_as_a_job_does(
    workers: Workers, rows: Rows, tmp_path: Path, rounded: float
) -> None:
    source, sink = rows(12_000), tmp_path / "out.jsonl"
    options = {"engine": f"{ENGINES}:Halves", "engine_options": {"quantize": "int8", "rounded": rounded}}
    _, report = workers.run(source, sink, **options)
    assert [lane.worker for lane in report.lanes] == ["1", "2"]
    chosen = "int8" if rounded == 1.001 else "float32"
    assert {line["output"] for line in lines(sink)} == {rounded if chosen == "int8" else 1.0}, "in one dtype"
    assert report.precision is not None and report.precision.dtype == chosen
    assert report.memory is not None, "the batches of workers are followed"


def _stop_at_first_part(stop: StopRequest, sink: Path) -> None:
    parts = sink.with_name(f"{sink.name}.parts")
    until(lambda: any(parts.glob("part-*")) or any(parts.glob("*.jsonl")), 600)
    stop.request()


def _journal(folder: Path) -> Counter[str]:
    return Counter(line for file in folder.glob("*.txt") for line in file.read_text().splitlines())


def test_a_killed_worker_costs_nothing(workers: Workers, rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(4000), tmp_path / "out.jsonl"
    end, report = workers.run(source, sink, task="embed", engine=f"{ENGINES}:dies_once", model=str(tmp_path))
    assert (tmp_path / "died").exists()
    assert end == JobEnd("finished", 4000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(4000)]
    assert sum(lane.lost for lane in report.lanes) == 1


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_does_not_answer_is_done_without_and_ended(workers: Workers, rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(2000), tmp_path / "out.jsonl"
    end, report = workers.run(source, sink, task="embed", engine=f"{ENGINES}:freezes_once", model=str(tmp_path))
    assert (tmp_path / "froze").exists()
    assert end == JobEnd("finished", 2000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(2000)]
    assert sum(lane.lost for lane in report.lanes) == 1
    workers.wait_until_none_is_left()


@MORE_ON_RAY
@pytest.mark.usefixtures("impatient")
def test_workers_that_stand_still_while_they_load_end_the_job(
    workers: Workers, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cluster.heartbeat.MISSED_LOADING", 4)  # none of them is to answer
    with pytest.raises(EngineError, match="no worker answers any more"):
        workers.run(rows(10), tmp_path / "out.jsonl", task="embed", engine=f"{ENGINES}:frozen", model="x", replicas=1)
    workers.wait_until_none_is_left()


@MORE_ON_RAY
@pytest.mark.usefixtures("impatient")
def test_a_worker_whose_batches_take_long_is_not_taken_for_dead(workers: Workers, rows: Rows, tmp_path: Path) -> None:
    end, report = workers.run(rows(20), tmp_path / "out.jsonl", task="embed", engine=f"{ENGINES}:dawdles", replicas=1)
    assert end == JobEnd("finished", 20, 0)
    assert report.lanes[0].lost == 0


@MORE_ON_RAY
def test_a_record_that_kills_workers_becomes_a_dead_letter_and_few_of_them_die(
    workers: Workers, rows: Rows, tmp_path: Path
) -> None:
    source, sink = rows(1000, row300="poison"), tmp_path / "out.jsonl"
    end, report = workers.run(source, sink, task="embed", engine=f"{ENGINES}:deadly")
    assert end == JobEnd("finished", 1000, 1)
    [letter] = lines(tmp_path / "out.errors.jsonl")
    assert (letter["position"], letter["reason"]) == (300, "WorkerDiedError")
    assert re.search(r"\d workers died with this record; the last: .+(died|SIGKILL)", letter["message"])
    assert 2 <= sum(lane.lost for lane in report.lanes) <= 4


def test_what_cannot_travel_fails_alone_and_keeps_its_name(workers: Workers, rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(200, row10="exception", row20="result"), tmp_path / "out.jsonl"
    end, _ = workers.run(source, sink, task="embed", engine=f"{ENGINES}:odd", replicas=1)
    assert end == JobEnd("finished", 200, 2)
    letters = lines(tmp_path / "out.errors.jsonl")
    assert [(letter["position"], letter["reason"]) for letter in letters] == [(10, "OddError"), (20, "BadResultError")]
    assert letters[0]["message"] == "ab"


def test_a_record_that_cannot_be_sent_fails_alone(workers: Workers, tmp_path: Path) -> None:
    sink = tmp_path / "out.jsonl"
    rows_here = [{"text": "fine"}, {"text": threading.Lock()}, {"text": "fine too"}]
    end, _ = workers.run(rows_here, sink, task="custom", engine=f"{ENGINES}:lengths", limits=Limits(max_error_rate=1))  # type: ignore[arg-type]
    assert end == JobEnd("finished", 3, 1)
    [letter] = lines(tmp_path / "out.errors.jsonl")
    assert "cannot be sent to a worker" in letter["message"]


def test_options_that_cannot_be_sent_are_refused_before_anything_is_written(
    workers: Workers, rows: Rows, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"options cannot be sent to a worker: .*lock"):
        workers.run(
            rows(10),
            tmp_path / "out.jsonl",
            task="embed",
            engine=f"{ENGINES}:lengths",
            engine_options={"key": threading.Lock()},
        )
    assert not (tmp_path / "out.jsonl.parts").exists()


@MORE_ON_RAY
def test_a_model_that_cannot_be_loaded_is_told_of_before_anything_is_written(
    workers: Workers, rows: Rows, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="OSError: no weights in /nowhere"):
        workers.run(rows(10), tmp_path / "out.jsonl", engine=f"{ENGINES}:broken", model="/nowhere")
    with pytest.raises(UnknownOptionError, match="wings"):
        workers.run(
            rows(10), tmp_path / "out.jsonl", task="embed", engine=f"{ENGINES}:lengths", engine_options={"wings": 2}
        )
    assert not (tmp_path / "out.jsonl.parts").exists()
    workers.wait_until_none_is_left()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each worker")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_a_signal_to_the_job_leaves_no_process_and_the_job_goes_on(
    number: signal.Signals, rows: Rows, tmp_path: Path
) -> None:
    source, sink, journals = rows(15_000), tmp_path / "out.jsonl", tmp_path / "journals"
    journals.mkdir()
    engine = ("--task", "custom", "--engine", f"{ENGINES}:journal", "--model", str(journals))
    command = ("run", "-i", source, "-o", sink, *engine, "--data-parallel-size", "2")
    with traced(start(*command, folder=tmp_path)) as job:
        until(lambda: len(list((tmp_path / "out.jsonl.parts").glob("*"))) >= 4, 600, of=job)
        job.send_signal(number)
        said = job.communicate()[1]
    assert job.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in said
    processes = [int(file.stem) for file in journals.glob("*.txt")]
    assert processes
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes), 600)
    status, said = headrace(*command, folder=tmp_path)
    assert status == 0, said
    assert re.search(r"worker [12] +[\d,]+ records", said)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(15_000)]
    if number != signal.SIGKILL:  # a killed job repeats what was not committed
        assert set(_journal(journals).values()) == {1}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each worker")
def test_workers_hold_a_real_model_and_the_output_is_that_of_one_process(rows: Rows, tmp_path: Path) -> None:
    source = rows(300)
    for sink, flags in (("one.parquet", ()), ("two.parquet", ("--data-parallel-size", "2"))):
        status, said = headrace("run", "-i", source, "-o", sink, "--dtype", "float32", *flags, folder=tmp_path)
        assert status == 0, said
    one, two = (pyarrow.parquet.read_table(tmp_path / name) for name in ("one.parquet", "two.parquet"))
    assert one.column("id") == two.column("id")
    ours, theirs = (np.array(table.column("embedding").to_pylist()) for table in (one, two))
    assert np.abs(ours - theirs).max() < 1e-5
