"""A job on a cluster that its machine does not belong to, by Ray's client server, and when that goes."""

from __future__ import annotations

import json
import os
import signal
import sys
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
RECORDS = 20_000
Rows = Callable[..., Path]
JOURNAL = "tests.integration.cluster.engines:journal"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A cluster on `head`, and a `desk` that has no part in it."""
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("disks"), "head", "desk") as ready:
        ready.ray_node("head", "--ray-client-server-port=10001", cpus=4)
        yield ready


class Job:
    """`headrace run` on the desk, with two workers; journals make a thousand records a second of each."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        address: str,
        engine: str = JOURNAL,
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        self.folder = folder
        self.journals = folder / "journals"
        self.journals.mkdir(exist_ok=True)
        command = ["-c", "from headrace.cli.main import main; main()", "run", "--on", address]
        command += ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--task", "custom", "--batch-size"]
        command += ["4", "--engine", engine, "--model", str(self.journals), "--replicas", "2"]
        self.process = hosts.begin("desk", [python, *command], **environment)

    def wait_for(self, records: int) -> None:
        """Until workers have done so many."""
        until(
            lambda: sum(file.read_bytes().count(b"\n") for file in self.journals.glob("*.txt")) >= records,
            600,
            of=self.process,
        )

    def end(self) -> tuple[int, str]:
        """Its exit status and what it said."""
        said, _ = self.process.communicate()
        return self.process.returncode, said

    def ids(self) -> list[str]:
        """In the output."""
        return [json.loads(line)["id"] for line in (self.folder / "out.jsonl").read_text().splitlines()]


def go_on_here(folder: Path) -> JobEnd:
    settings = JobSettings(
        source=folder / "in.jsonl",
        sink=folder / "out.jsonl",
        config=EngineConfig(task="custom", engine=JOURNAL, model=str(folder / "journals"), batch_size=4),
    )
    return app_job.execute(settings, StopRequest(), progress=False)[0]


def test_a_job_runs_from_outside_the_cluster(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    rows(RECORDS)
    status, said = (job := Job(hosts, tmp_path, f"ray://{hosts.address('head')}:10001")).end()
    assert status == 0, said
    assert job.ids() == [f"r{n}" for n in range(RECORDS)]
    assert "worker 2" in said


def test_a_killed_worker_costs_nothing_there_either(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    rows(4000)
    engine = "tests.integration.cluster.engines:dies_once"
    job = Job(hosts, tmp_path, f"ray://{hosts.address('head')}:10001", engine)
    status, said = job.end()
    assert status == 0, said
    assert "died 1 ×" in said
    assert job.ids() == [f"r{n}" for n in range(4000)]


@pytest.mark.parametrize(
    ("address", "token", "message"),
    [
        ("ray://10.213.7.1:10001", "0" * 32, "the address of Ray's client server"),
        ("ray:10.213.7.1:6379", "0" * 32, "Failed to connect"),
        ("ray:10.213.7.1:10001", None, "use host:port on a machine of the cluster"),
    ],
    ids=["another token by the client server", "another token", "the client server's port"],
)
def test_what_does_not_let_it_in_is_said(
    address: str, token: str | None, message: str, hosts: Hosts, rows: Rows, tmp_path: Path
) -> None:
    rows(10)
    status, said = Job(hosts, tmp_path, address, **({"RAY_AUTH_TOKEN": token} if token else {})).end()
    assert status == 2, said
    assert f"cannot use the Ray cluster at {address.removeprefix('ray:') if 'ray:1' in address else address}" in said
    assert message in said
    assert not (tmp_path / "out.jsonl.parts").exists()


@pytest.mark.skipif(
    "HEADRACE_OTHER_RAY" not in os.environ, reason="HEADRACE_OTHER_RAY names no Python with another Ray"
)
def test_another_version_of_ray_or_python_is_refused(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    rows(10)
    python = os.environ["HEADRACE_OTHER_RAY"]
    status, said = Job(hosts, tmp_path, f"ray://{hosts.address('head')}:10001", python=python).end()
    assert status == 2, said
    assert "Version mismatch" in said or "both sides need the same version of Ray" in said
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_a_job_that_is_killed_leaves_no_worker_there(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    rows(RECORDS)
    job = Job(hosts, tmp_path, f"ray://{hosts.address('head')}:10001")
    job.wait_for(RECORDS // 5)
    assert hosts.processes("head", "ray::WorkerActor")
    for process in hosts.processes("desk", "headrace.cli"):
        os.kill(process, signal.SIGKILL)
    job.end()
    # Half a minute: the server waits for the client to come back.
    until(lambda: not hosts.processes("head", "ray::WorkerActor"), 600)
    assert go_on_here(tmp_path) == JobEnd("finished", RECORDS, 0)
    assert job.ids() == [f"r{n}" for n in range(RECORDS)]


def test_a_job_whose_server_ends_says_so_and_goes_on_elsewhere(hosts: Hosts, rows: Rows, tmp_path: Path) -> None:
    """The last one here: nobody starts the server again."""
    rows(RECORDS)
    job = Job(hosts, tmp_path, f"ray://{hosts.address('head')}:10001")
    job.wait_for(RECORDS // 5)
    for process in hosts.processes("head", "ray.util.client.server"):
        os.kill(process, signal.SIGKILL)
    status, said = job.end()
    assert status == 75, said
    last = said.rstrip().splitlines()[-1]
    assert "Ray cluster is lost" in last and "run again to continue" in last
    assert go_on_here(tmp_path) == JobEnd("finished", RECORDS, 0)
    assert job.ids() == [f"r{n}" for n in range(RECORDS)]
