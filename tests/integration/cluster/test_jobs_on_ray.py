"""A job on a Ray cluster: the same output, whoever dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.settings import job_settings

import headrace
from headrace.app import job as app_job
from headrace.engines.config import EngineConfig
from headrace.errors import ConfigError, EngineError, UnknownOptionError
from headrace.jobs.pipeline.job import JobEnd, Limits, StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.report import Report

ENGINES = "tests.integration.cluster.engines"
ROOT = Path(__file__).resolve().parents[3]
Rows = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("cluster")


def on_ray(
    source: Path, sink: Path, *, replicas: int = 2, stop: StopRequest | None = None, **settings: Any
) -> tuple[JobEnd, Report]:
    from headrace.cluster.ray_job import execute
    from headrace.cluster.ray_workers import ClusterResources

    settings.setdefault("task", "custom")
    given = job_settings(source, sink, **settings)
    return execute(given, ClusterResources(replicas=replicas, cpus=0.5), stop or StopRequest(), progress=False)


def here(source: Path, sink: Path, stop: StopRequest | None = None, **settings: Any) -> tuple[JobEnd, Report]:
    settings.setdefault("task", "custom")
    return app_job.execute(job_settings(source, sink, **settings), stop or StopRequest(), progress=False)


def wait_until_no_actor_is_left() -> None:
    import ray

    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        time.sleep(0.05)  # the test's time limit ends this if one stays


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_output_is_that_of_a_local_job_byte_for_byte(rows: Rows, tmp_path: Path) -> None:
    source = rows(3000, row7=None, row8=5, row2500="")
    local, remote = tmp_path / "local.jsonl", tmp_path / "remote.jsonl"
    options: dict[str, Any] = {"task": "embed", "engine": "headrace.testing:FakeEngine"}
    end, report = here(source, local, **options)
    remote_end, remote_report = on_ray(source, remote, **options)
    assert remote_end == end
    assert remote.read_bytes() == local.read_bytes()
    assert remote.with_suffix(".errors.jsonl").read_bytes() == local.with_suffix(".errors.jsonl").read_bytes()
    assert (remote_report.ok, remote_report.failures) == (report.ok, report.failures)
    assert remote_report.tokens == report.tokens
    assert sum(lane.records for lane in remote_report.lanes) >= report.ok
    assert all(lane.batches and 0 < lane.busy <= 1 for lane in remote_report.lanes)


@pytest.mark.parametrize("first", ["here", "on ray"])
def test_a_job_goes_on_elsewhere_and_computes_nothing_twice(first: str, rows: Rows, tmp_path: Path) -> None:
    source, sink, journals = rows(4000), tmp_path / "out.jsonl", tmp_path / "journals"
    journals.mkdir()
    options = {"engine": f"{ENGINES}:journal", "model": str(journals), "limits": Limits(part_records=256)}
    stop = StopRequest()
    begin, go_on = (here, on_ray) if first == "here" else (on_ray, here)
    threading.Thread(target=_stop_at_first_part, args=(stop, sink), daemon=True).start()
    assert begin(source, sink, stop=stop, **options)[0].state == "interrupted"
    done_before = _journal(journals).total()
    assert 0 < done_before < 4000
    assert go_on(source, sink, **options)[0] == JobEnd("finished", 4000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(4000)]
    assert set(_journal(journals).values()) == {1}


def test_workers_share_the_work_and_each_has_a_lane_in_the_report(rows: Rows, tmp_path: Path) -> None:
    source, journals = rows(12_000), tmp_path / "journals"
    journals.mkdir()
    _, report = on_ray(source, tmp_path / "out.jsonl", engine=f"{ENGINES}:journal", model=str(journals))
    done = {file.stem: len(file.read_text().splitlines()) for file in journals.glob("*.txt")}
    assert sorted(done.values()) == sorted(lane.records for lane in report.lanes)
    assert [lane.worker for lane in report.lanes] == ["1", "2"]
    assert min(done.values()) > 1_000


def _stop_at_first_part(stop: StopRequest, sink: Path) -> None:
    parts = sink.with_name(f"{sink.name}.parts")
    while not any(parts.glob("part-*")) and not any(parts.glob("*.jsonl")):
        time.sleep(0.005)
    stop.request()


def _journal(folder: Path) -> Counter[str]:
    return Counter(line for file in folder.glob("*.txt") for line in file.read_text().splitlines())


def test_a_killed_worker_costs_nothing(rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(4000), tmp_path / "out.jsonl"
    end, report = on_ray(source, sink, engine=f"{ENGINES}:dies_once", model=str(tmp_path))
    assert (tmp_path / "died").exists()
    assert end == JobEnd("finished", 4000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(4000)]
    assert sum(lane.lost for lane in report.lanes) == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six seconds without an answer, rather than half a minute; on busy cores a good worker may take some of them."""
    monkeypatch.setattr("headrace.cluster.ray_workers._PULSE_S", 0.5)
    monkeypatch.setattr("headrace.cluster.ray_workers._MISSED", 12)
    monkeypatch.setattr("headrace.cluster.ray_workers._MISSED_LOADING", 12)


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_does_not_answer_is_done_without_and_ended(rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(2000), tmp_path / "out.jsonl"
    end, report = on_ray(source, sink, engine=f"{ENGINES}:freezes_once", model=str(tmp_path))
    assert (tmp_path / "froze").exists()
    assert end == JobEnd("finished", 2000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(2000)]
    assert sum(lane.lost for lane in report.lanes) == 1
    wait_until_no_actor_is_left()


@pytest.mark.usefixtures("impatient")
def test_a_job_whose_workers_stand_still_while_they_load_does_not_wait_for_ever(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no worker answers any more"):
        on_ray(rows(10), tmp_path / "out.jsonl", engine=f"{ENGINES}:frozen", model="x", replicas=1)
    wait_until_no_actor_is_left()


@pytest.mark.usefixtures("impatient")
def test_a_worker_whose_batches_take_long_is_not_taken_for_dead(rows: Rows, tmp_path: Path) -> None:
    end, report = on_ray(rows(20), tmp_path / "out.jsonl", engine=f"{ENGINES}:dawdles", replicas=1)
    assert end == JobEnd("finished", 20, 0)
    assert report.lanes[0].lost == 0


def test_a_record_that_kills_workers_becomes_a_dead_letter_and_few_of_them_die(rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(1000, row300="poison"), tmp_path / "out.jsonl"
    end, report = on_ray(source, sink, engine=f"{ENGINES}:deadly")
    assert end == JobEnd("finished", 1000, 1)
    [letter] = lines(tmp_path / "out.errors.jsonl")
    assert (letter["position"], letter["reason"]) == (300, "WorkerDiedError")
    assert re.search(r"\d workers died with this record, the last one: .*process \d+ died", letter["message"])
    assert 2 <= sum(lane.lost for lane in report.lanes) <= 4


def test_what_cannot_travel_fails_alone_and_keeps_its_name(rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(200, row10="exception", row20="result"), tmp_path / "out.jsonl"
    end, _ = on_ray(source, sink, engine=f"{ENGINES}:odd", replicas=1)
    assert end == JobEnd("finished", 200, 2)
    letters = lines(tmp_path / "out.errors.jsonl")
    assert [(letter["position"], letter["reason"]) for letter in letters] == [(10, "OddError"), (20, "BadResultError")]
    assert letters[0]["message"] == "ab"


def test_a_record_that_cannot_be_sent_fails_alone(tmp_path: Path) -> None:
    sink = tmp_path / "out.jsonl"
    rows_here = [{"text": "fine"}, {"text": threading.Lock()}, {"text": "fine too"}]
    end, _ = on_ray(rows_here, sink, engine=f"{ENGINES}:lengths", limits=Limits(max_error_rate=1))  # type: ignore[arg-type]
    assert end == JobEnd("finished", 3, 1)
    [letter] = lines(tmp_path / "out.errors.jsonl")
    assert "cannot be sent to a worker" in letter["message"]


def test_options_that_cannot_be_sent_are_refused_before_anything_is_written(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"options cannot be sent to a worker: .*lock"):
        on_ray(rows(10), tmp_path / "out.jsonl", engine=f"{ENGINES}:lengths", engine_options={"key": threading.Lock()})
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_a_model_that_cannot_be_loaded_is_told_of_before_anything_is_written(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="OSError: no weights in /nowhere"):
        on_ray(rows(10), tmp_path / "out.jsonl", engine=f"{ENGINES}:broken", model="/nowhere")
    with pytest.raises(UnknownOptionError, match="wings"):
        on_ray(rows(10), tmp_path / "out.jsonl", engine=f"{ENGINES}:lengths", engine_options={"wings": 2})
    assert not (tmp_path / "out.jsonl.parts").exists()
    wait_until_no_actor_is_left()


def test_more_workers_than_the_cluster_has_room_for_are_refused(rows: Rows, tmp_path: Path) -> None:
    from headrace.cluster.ray_job import execute
    from headrace.cluster.ray_workers import ClusterResources

    settings = JobSettings(
        source=rows(10), sink=tmp_path / "out.jsonl", config=EngineConfig(task="custom", engine=f"{ENGINES}:lengths")
    )
    with pytest.raises(ConfigError, match="5 replicas with 1 CPU each need 5, and the cluster has 4"):
        execute(settings, ClusterResources(replicas=5), StopRequest(), progress=False)
    with pytest.raises(ConfigError, match="1 replicas with 1 GPU each need 1, and the cluster has 0"):
        execute(settings, ClusterResources(gpus=1), StopRequest(), progress=False)


def test_workers_of_another_version_are_refused(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cluster.ray_job.headrace.__version__", "0.0.7")
    with pytest.raises(ConfigError, match=r"has Headrace [\d.]+, this job 0.0.7; install the same version"):
        on_ray(rows(10), tmp_path / "out.jsonl", engine=f"{ENGINES}:lengths", replicas=1)


def test_the_clocks_are_compared_when_work_begins_not_when_the_model_was_loaded() -> None:
    from headrace.cluster.ray_workers import ClusterResources, RayWorkers
    from headrace.cluster.worker import WorkerSpec

    workers = RayWorkers(
        WorkerSpec(EngineConfig("custom", engine=f"{ENGINES}:lengths"), headrace.__version__),
        ClusterResources(cpus=0.5),
    )
    time.sleep(3)
    assert abs(asyncio.run(workers.initial[0].load())) < 2  # on one machine there is one clock
    workers.close()


def test_the_command_line_runs_on_a_cluster_by_its_address(cluster: str, rows: Rows, tmp_path: Path) -> None:
    source = rows(500)
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "run", "-i", str(source)]
    command += ["-o", str(tmp_path / "out.jsonl"), "--task", "custom", "--engine", f"{ENGINES}:lengths"]
    command += ["--on", f"ray:{cluster}", "--replicas", "2", "--cpus-per-replica", "0.5"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(lines(tmp_path / "out.jsonl")) == 500
    assert re.search(r"worker 1 +\d+ records, \d+ batches, busy", ended.stderr)
    assert "wrote" in ended.stderr


def test_what_failed_here_is_retried_on_a_cluster(cluster: str, rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(300, row7="bad", row8="bad too"), tmp_path / "out.jsonl"
    options: dict[str, Any] = {"engine": f"{ENGINES}:moody", "model": str(tmp_path), "limits": Limits(max_error_rate=1)}
    assert here(source, sink, **options)[0] == JobEnd("finished", 300, 2)
    (tmp_path / "fine").touch()
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "retry", str(sink)]
    command += ["--on", f"ray:{cluster}", "--cpus-per-replica", "0.5"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"worker 1 +2 records", ended.stderr)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(300)]
    assert lines(sink)[7]["output"] == 3
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_a_job_that_is_killed_leaves_no_worker_and_goes_on(cluster: str, rows: Rows, tmp_path: Path) -> None:
    source, sink, journals = rows(6_000), tmp_path / "out.jsonl", tmp_path / "journals"
    journals.mkdir()
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "run", "-i", str(source)]
    command += ["-o", str(sink), "--task", "custom", "--engine", f"{ENGINES}:journal", "--model", str(journals)]
    command += ["--on", f"ray:{cluster}", "--cpus-per-replica", "0.5"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    driver = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    parts = tmp_path / "out.jsonl.parts"
    while len(list(parts.glob("*"))) < 4:
        time.sleep(0.01)
        assert driver.poll() is None
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    workers = [int(file.stem) for file in journals.glob("*.txt")]
    assert workers
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.05)  # the test's time limit ends this if they stay
    wait_until_no_actor_is_left()
    assert on_ray(source, sink, engine=f"{ENGINES}:journal", model=str(journals))[0] == JobEnd("finished", 6_000, 0)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(6_000)]
