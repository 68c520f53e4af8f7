"""Servers and workers with a model by its name."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.acceptance.command import python
from tests.acceptance.serving.process import server
from tests.integration.hub.standin import Hub

ON_RAY = """
import os, sys, ray, headrace
from headrace.cluster.ray.workers import execute
from headrace.cluster.base import ClusterResources
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings
ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="ERROR")
settings = JobSettings("x.jsonl", "y.jsonl", EngineConfig("embed", "acme/encoder"))
end, report = execute(settings, ClusterResources(replicas=1, cpus=0.5), StopRequest(), progress=False)
print(end.state, end.failed, report.model)
"""


def test_a_server_is_named_as_the_user_typed_it_and_says_its_commit(hub: Hub, encoder: Path, work: Path) -> None:
    commit = hub.repository("acme/encoder").commit_folder(encoder, "v1")
    with server("--task", "embed", "--model", "acme/encoder@v1", folder=work) as (_, url):
        [model] = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        assert (model["id"], model["commit"]) == ("acme/encoder", commit)
        for name in ("acme/encoder", "acme/encoder@v1"):
            answer = httpx.post(f"{url}/v1/embeddings", json={"model": name, "input": "a text"}, timeout=60).json()
            assert (answer["model"], len(answer["data"][0]["embedding"])) == ("acme/encoder", 32)
            assert httpx.get(f"{url}/v1/models/{name}", timeout=60).json()["id"] == "acme/encoder"
        refused = httpx.post(f"{url}/v1/embeddings", json={"model": "encoder", "input": "a text"}, timeout=60)
        assert refused.status_code == 404
        assert "this server serves 'acme/encoder'" in refused.json()["error"]["message"]


def test_workers_load_the_commit_that_the_driver_has_resolved(hub: Hub, encoder: Path, work: Path) -> None:
    """The branch moves between the two."""
    repository = hub.repository("acme/encoder")
    commit = repository.commit_folder(encoder)
    code = """
import asyncio, pickle, sys, headrace
from headrace.cluster.worker import WorkerActor, WorkerInfo, WorkerSpec
spec = pickle.loads(bytes.fromhex(sys.argv[1]))
found = asyncio.run(WorkerActor(spec).load())
print(found.engine["dimension"] if isinstance(found, WorkerInfo) else found.text)
"""
    driver = """
import pickle, headrace
from headrace.cluster.worker import WorkerSpec
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import resolve
print(pickle.dumps(WorkerSpec(resolve(EngineConfig("embed", "acme/encoder")), headrace.__version__)).hex())
"""
    spec = printed(driver, work)
    repository.commit({"config.json": b"{}", "model.safetensors": b"another"})
    (work / "acme" / "encoder").mkdir(parents=True)  # a folder on the worker's machine is another model
    assert printed(code, work, spec) == "32"
    assert not [asked for asked in hub.requests if "/resolve/" in asked and commit not in asked]


@pytest.mark.thorough  # the test above has the commit in a worker, and tests/integration/cluster has Ray
def test_a_job_on_ray(hub: Hub, encoder: Path, work: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    commit = hub.repository("acme/encoder").commit_folder(encoder)
    assert printed(ON_RAY, work, imported="nothing").splitlines()[-1] == f"finished 0 acme/encoder at commit {commit}"
    assert len((work / "y.jsonl").read_text().splitlines()) == 2


def printed(code: str, folder: Path, *given: str, imported: str = "models") -> str:
    """What a program prints."""
    options = {"folder": folder, "imported": imported, "RAY_USAGE_STATS_ENABLED": "0"}
    with python(code, ("program", *given), **options) as program:
        output, errors = program.communicate()
    assert program.returncode == 0, errors
    return output.strip()
