"""A job on a Ray cluster: the same output, whoever dies."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import headrace as headrace_command
from tests.acceptance.command import start, traced
from tests.settings import job_settings
from tests.waiting import until

import headrace
from headrace.app.jobs import job as app_job
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings, Limits
from headrace.observe.reporting.report import Report

ENGINES = "tests.integration.cluster.engines"
ROOT = Path(__file__).resolve().parents[3]
Rows = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("cluster")


def on_ray(
    source: Path, sink: Path, *, replicas: int = 2, stop: StopRequest | None = None, **settings: Any
) -> tuple[JobEnd, Report]:
    from headrace.cluster.base import ClusterResources
    from headrace.cluster.ray.workers import execute

    settings.setdefault("task", "custom")
    given = job_settings(source, sink, **settings)
    return execute(given, ClusterResources(replicas=replicas, cpus=0.5), stop or StopRequest(), progress=False)


def here(source: Path, sink: Path, stop: StopRequest | None = None, **settings: Any) -> tuple[JobEnd, Report]:
    settings.setdefault("task", "custom")
    return app_job.execute(job_settings(source, sink, **settings), stop or StopRequest(), progress=False)


def wait_until_no_actor_is_left() -> None:
    import ray

    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], 600)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_more_workers_than_the_cluster_has_room_for_are_refused(rows: Rows, tmp_path: Path) -> None:
    from headrace.cluster.base import ClusterResources
    from headrace.cluster.ray.workers import execute

    settings = JobSettings(
        source=rows(10), sink=tmp_path / "out.jsonl", config=EngineConfig(task="custom", engine=f"{ENGINES}:lengths")
    )
    with pytest.raises(ConfigError, match="5 replicas with 1 CPU each need 5, and the cluster has 4"):
        execute(settings, ClusterResources(replicas=5), StopRequest(), progress=False)
    with pytest.raises(ConfigError, match="1 replicas with 1 GPU each need 1, and the cluster has 0"):
        execute(settings, ClusterResources(gpus=1), StopRequest(), progress=False)


def test_workers_of_another_version_are_refused(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cluster.remote_job.headrace.__version__", "0.0.7")
    with pytest.raises(ConfigError, match=r"has Headrace [\d.]+, this job 0.0.7; install the same version"):
        on_ray(rows(10), tmp_path / "out.jsonl", task="embed", engine=f"{ENGINES}:lengths", replicas=1)


def test_the_clocks_are_compared_when_work_begins_not_when_the_model_was_loaded() -> None:
    from headrace.cluster.base import ClusterResources
    from headrace.cluster.ray.workers import RayWorkers
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
    command = ("run", "-i", source, "-o", "out.jsonl", "--task", "custom", "--engine", f"{ENGINES}:lengths")
    where = ("--on", f"ray:{cluster}", "--replicas", "2", "--cpus-per-replica", "0.5")
    status, said = headrace_command(*command, *where, folder=tmp_path)
    assert status == 0, said
    assert len(lines(tmp_path / "out.jsonl")) == 500
    assert re.search(r"worker [12] +[\d,]+ records, \d+ batches, busy", said)
    assert "wrote" in said


def test_what_failed_here_is_retried_on_a_cluster(cluster: str, rows: Rows, tmp_path: Path) -> None:
    source, sink = rows(300, row7="bad", row8="bad too"), tmp_path / "out.jsonl"
    options: dict[str, Any] = {
        "task": "embed",
        "engine": f"{ENGINES}:moody",
        "model": str(tmp_path),
        "limits": Limits(max_error_rate=1),
    }
    assert here(source, sink, **options)[0] == JobEnd("finished", 300, 2)
    (tmp_path / "fine").touch()
    where = ("--on", f"ray:{cluster}", "--cpus-per-replica", "0.5")
    status, said = headrace_command("retry", sink, *where, folder=tmp_path)
    assert status == 0, said
    assert re.search(r"worker 1 +2 records", said)
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(300)]
    assert lines(sink)[7]["embedding"] == 3
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_a_job_that_is_killed_leaves_no_worker_and_goes_on(cluster: str, rows: Rows, tmp_path: Path) -> None:
    source, sink, journals = rows(6_000), tmp_path / "out.jsonl", tmp_path / "journals"
    journals.mkdir()
    command = ("run", "-i", source, "-o", sink, "--task", "custom", "--engine", f"{ENGINES}:journal")
    where = ("--model", journals, "--on", f"ray:{cluster}", "--cpus-per-replica", "0.5")
    parts = tmp_path / "out.jsonl.parts"
    with traced(start(*command, *where, folder=tmp_path)) as driver:
        until(lambda: len(list(parts.glob("*"))) >= 4, 600, of=driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    workers = [int(file.stem) for file in journals.glob("*.txt")]
    assert workers
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 600)
    wait_until_no_actor_is_left()
    assert on_ray(source, sink, task="custom", engine=f"{ENGINES}:journal", model=str(journals))[0] == JobEnd(
        "finished", 6_000, 0
    )
    assert [line["id"] for line in lines(sink)] == [f"r{n}" for n in range(6_000)]
