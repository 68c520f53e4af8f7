"""The network parts in the middle of a job: the workers on the far side are done without, and nothing comes twice."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.cluster.hosts import Hosts, why_not
from tests.waiting import until

from headrace.app.jobs import job as app_job
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import JobSettings

pytestmark = [
    pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it"),
]
RECORDS = 24_000
PATIENT = {"RAY_health_check_failure_threshold": "10000"}
"""Of the head: Ray alone notices that a host is gone after about 65 s, and so it never does."""
PIECES = 3 * 1024
"""Most records that a worker has."""
Rows = Callable[..., Path]


class Job:
    """`headrace run` on a host, its two workers on `near` and `far`: each takes a second for 1,000 records."""

    def __init__(self, hosts: Hosts, host: str, address: str, folder: Path) -> None:
        self.folder = folder
        self.journals = folder / "journals"
        self.journals.mkdir()
        command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "run", "--on", f"ray:{address}"]
        command += ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--task", "custom", "--batch-size"]
        command += ["4", "--engine", "tests.integration.cluster.engines:journal", "--model", str(self.journals)]
        self.process = hosts.begin(host, [*command, "--replicas", "2", "--cpus-per-replica", "2"])

    def done(self) -> Counter[str]:
        """How often each text was computed."""
        return Counter(line for file in self.journals.glob("*.txt") for line in file.read_text().splitlines())

    def wait_for(self, records: int) -> None:
        """Until workers have done so many."""
        until(lambda: self.done().total() >= records, 600, of=self.process)

    def check(self) -> str:
        """That it ends well, every record once; returns what it said."""
        said, _ = self.process.communicate()
        assert self.process.returncode == 0, said
        ids = [json.loads(line)["id"] for line in (self.folder / "out.jsonl").read_text().splitlines()]
        assert ids == [f"r{n}" for n in range(RECORDS)]
        again = [text for text, times in self.done().items() if times > 1]
        assert len(again) <= PIECES
        return said


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(tmp_path / "disks", "head", "near", "far", "desk") as ready:
        yield ready


@pytest.mark.parametrize("healed_after_s", [None, 10, 40], ids=["for good", "for 10 s", "for 40 s"])
def test_a_job_goes_on_without_a_host_that_is_cut_off(
    healed_after_s: float | None, hosts: Hosts, rows: Rows, tmp_path: Path
) -> None:
    rows(RECORDS)
    address = hosts.ray_node("head", **PATIENT)
    for name in ("near", "far"):
        hosts.ray_node(name, head="head", cpus=2)
    job = Job(hosts, "head", address, tmp_path)
    job.wait_for(RECORDS // 6)
    assert hosts.processes("far", "ray::WorkerActor"), "nothing is lost by pulling this cable"
    hosts.unplug("far")
    heal = threading.Timer(healed_after_s or 0, hosts.plug_in, ("far",))
    if healed_after_s is not None:
        heal.start()
    said = job.check()
    if healed_after_s == 10:
        assert "died" not in said, "a short interruption costs nobody its life"
        return
    assert "died 1 ×" in said
    if healed_after_s is not None:
        heal.join()
        until(lambda: not hosts.processes("far", "ray::WorkerActor"), 600)
        before = (tmp_path / "out.jsonl").read_bytes()
        time.sleep(2)
        assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_worker_that_only_the_job_cannot_reach_is_done_without(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    rows(RECORDS)
    address = hosts.ray_node("head")
    hosts.ray_node("desk", head="head")
    for name in ("near", "far"):
        hosts.ray_node(name, head="head", cpus=2)
    job = Job(hosts, "desk", address, tmp_path)
    job.wait_for(RECORDS // 6)
    hosts.part("desk", "far")
    cut = time.monotonic()
    assert "died 1 ×" in job.check()
    assert time.monotonic() - cut < 300  # Ray alone waits for about seven minutes
    until(lambda: not hosts.processes("far", "ray::WorkerActor"), 600)


def test_a_job_that_loses_its_cluster_ends_and_goes_on_later(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    rows(RECORDS)
    address = hosts.ray_node("head")
    for name, cpus in (("near", 4), ("desk", 0)):
        hosts.ray_node(name, head="head", cpus=cpus)
    job = Job(hosts, "desk", address, tmp_path)
    job.wait_for(RECORDS // 6)
    hosts.unplug("desk")
    said, _ = job.process.communicate()  # the test's time limit ends this
    assert job.process.returncode == 75, said
    assert "no worker is left, and there is no room for another" in said
    settings = JobSettings(
        source=tmp_path / "in.jsonl",
        sink=tmp_path / "out.jsonl",
        config=EngineConfig(
            task="custom", engine="tests.integration.cluster.engines:journal", model=str(job.journals), batch_size=4
        ),
    )
    assert app_job.execute(settings, StopRequest(), progress=False)[0] == JobEnd("finished", RECORDS, 0)
    ids = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ids == [f"r{n}" for n in range(RECORDS)]
