"""A server with replicas on Ray Serve: from none to two and back, and no request is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from headrace.errors import ConfigError, EngineError
from headrace.hosting import ServerSettings

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(180),
    pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it"),
]
ROOT = Path(__file__).resolve().parents[3]
FAKE = "headrace.testing:FakeEngine"
QUESTION = {"input": ["a text", "another"]}


def running() -> int:
    from ray import serve

    states = serve.status().applications["headrace"].deployments["headrace"].replica_states
    return int({str(state): number for state, number in states.items()}.get("RUNNING", 0))


def wait_for(replicas: int) -> None:
    while running() != replicas:  # the test's time limit ends this
        time.sleep(0.1)


def test_replicas_come_and_go_with_the_requests(free_tcp_port: int) -> None:
    from headrace.cluster.ray_serve import Replicas, served
    from headrace.cluster.ray_workers import Place

    settings = ServerSettings(task="embed", engine=FAKE, engine_options={"seconds_per_batch": 0.2})
    scaling = Replicas(0, 2, target_ongoing_requests=2.0, scaledown_after_s=2.0, scaleup_after_s=0.5)
    with served(settings, scaling, Place(cpus=0.5), "127.0.0.1", free_tcp_port) as address:
        assert running() == 1
        wait_for(0)
        answer = httpx.post(f"{address}/v1/embeddings", json=QUESTION, timeout=60)  # waits for a replica
        assert [len(row["embedding"]) for row in answer.json()["data"]] == [8, 8]
        statuses: Counter[int] = Counter()
        enough = threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=60) as client:
                while not enough.is_set():
                    statuses[client.post(f"{address}/v1/embeddings", json=QUESTION).status_code] += 1

        askers = [threading.Thread(target=ask) for _ in range(10)]
        for asker in askers:
            asker.start()
        try:
            wait_for(2)
        finally:
            enough.set()
            for asker in askers:
                asker.join()
        assert set(statuses) == {200}
        wait_for(0)


def test_a_model_that_cannot_be_loaded_is_told_at_the_start(free_tcp_port: int) -> None:
    from headrace.cluster.ray_serve import Replicas, served
    from headrace.cluster.ray_workers import Place

    settings = ServerSettings(task="embed", engine="tests.integration.cluster.engines:broken", model="/nowhere")
    with (
        pytest.raises(EngineError, match=r"no replica could be started.*no weights in /nowhere"),
        served(settings, Replicas(), Place(cpus=0.5), "127.0.0.1", free_tcp_port),
    ):
        pass


def test_what_replicas_cannot_share_is_refused(tmp_path: Path) -> None:
    from headrace.cluster.ray_serve import Replicas, application
    from headrace.cluster.ray_workers import Place

    with pytest.raises(ConfigError, match="leave out --state-dir"):
        application(ServerSettings(state=tmp_path), Replicas(), Place())
    with pytest.raises(ConfigError, match="replicas are 3 to 2"):
        Replicas(3, 2)


def test_the_command_serves_until_it_is_told_to_stop(cluster: str, free_tcp_port: int) -> None:
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "serve", "--engine", FAKE]
    command += ["--on", f"ray:{cluster}", "--port", str(free_tcp_port), "--cpus-per-replica", "0.5"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if "serving at" in line:
            break
    assert server.poll() is None, said
    assert "0 to 2 replicas" in said[-1]
    server.send_signal(signal.SIGTERM)
    assert "stopping: finishing what is accepted" in server.communicate()[1]
    assert server.returncode == 0
