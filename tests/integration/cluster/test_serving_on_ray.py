"""A server with replicas on Ray Serve: from none to two and back, and no request is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, EngineError
from headrace.serving.auth import read_keys

pytestmark = [
    pytest.mark.usefixtures("cluster"),
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
    until(lambda: running() == replicas, 600)


def fake(name: str = "fake", seconds: float = 0.02, **further: Any) -> ServerSettings:
    return ServerSettings(
        EngineConfig(task="embed", engine=FAKE, engine_options={"seconds_per_batch": seconds}), name=name, **further
    )


def as_user(*command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@contextmanager
def under_load(address: str) -> Iterator[Counter[str]]:
    """Four askers in another process; how often each status came with each model's name is known afterwards."""
    load = as_user("-m", "tests.integration.cluster.askers", address, "4")
    assert load.stdout is not None
    assert load.stdout.readline() == "asking\n"
    seen: Counter[str] = Counter()
    try:
        yield seen
    finally:
        load.send_signal(signal.SIGTERM)
        seen.update(json.loads(load.communicate()[0]))


def ask(address: str, **options: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/embeddings", json=QUESTION, timeout=60, **options)


def page(address: str, path: str, **options: Any) -> httpx.Response:
    return httpx.get(f"{address}{path}", timeout=60, **options)


def model_at(address: str) -> str:
    return str(page(address, "/v1/models").json()["data"][0]["id"])


def test_an_update_under_load_fails_no_request(free_tcp_port: int) -> None:
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import deploy, served

    place = ClusterResources(cpus=0.5)
    with served(fake("first"), Replicas(2, 2), place, "127.0.0.1", free_tcp_port) as address:
        with under_load(address) as seen:
            second = deploy(fake("second"), Replicas(2, 2), place, "127.0.0.1", free_tcp_port)
            time.sleep(1)
            assert model_at(address) == "second"
        assert set(seen) == {"200 first", "200 second"}
        assert second.ours
    assert model_at(address) == "second"  # the first ended, and left the second alone
    broken = ServerSettings(
        EngineConfig(task="embed", engine="tests.integration.cluster.engines:broken", model="/nowhere")
    )
    with under_load(address) as seen:
        with pytest.raises(EngineError, match=r"was rolled back.*no weights in /nowhere"):
            deploy(broken, Replicas(1, 1), place, "127.0.0.1", free_tcp_port)
        time.sleep(1)
    assert set(seen) == {"200 second"}
    assert second.ours
    with served(fake("third"), Replicas(1, 1), place, "127.0.0.1", free_tcp_port):
        assert not second.ours
        assert model_at(address) == "third"


def test_another_command_takes_the_server_over(cluster: str, free_tcp_port: int) -> None:
    def command(name: str) -> subprocess.Popen[str]:
        flags = ["--served-model-name", name, "--on", f"ray:{cluster}", "--port", str(free_tcp_port)]
        # Of four CPUs: there is no room for the old one and the new one, so that requests wait.
        flags += ["--task", "embed", "--engine", FAKE]
        flags += ["--cpus-per-replica", "3", "--min-replicas", "1", "--max-replicas", "1"]
        return as_user("-c", "from headrace.cli.main import main; main()", "serve", *flags)

    def wait_until_it_serves(server: subprocess.Popen[str]) -> None:
        assert server.stderr is not None
        assert any("serving at" in line for line in server.stderr)

    first = command("first")
    wait_until_it_serves(first)
    with under_load(f"http://127.0.0.1:{free_tcp_port}") as seen:
        second = command("second")
        wait_until_it_serves(second)
        assert "another command has replaced this deployment" in first.communicate()[1]
        assert first.returncode == 0
        time.sleep(1)
    assert set(seen) == {"200 first", "200 second"}
    second.send_signal(signal.SIGTERM)
    assert "stopping" in second.communicate()[1]
    assert second.returncode == 0


def test_the_metrics_are_those_of_all_replicas(free_tcp_port: int) -> None:
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import served

    key = {"Authorization": "Bearer sesame"}
    settings = fake(keys=read_keys(None, "sesame"), allowed_hosts=("localhost",))
    with served(settings, Replicas(2, 2), ClusterResources(cpus=0.5), "127.0.0.1", free_tcp_port) as address:
        for _ in range(40):
            ask(address, headers=key).raise_for_status()
        assert page(address, "/metrics").status_code == 401
        for path in ("/metrics", "/v1/models"):
            refused = page(address, path, headers={**key, "Host": "evil.com"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "host_not_allowed")
        pages = [page(address, "/metrics", headers=key).text for _ in range(5)]
    for text in pages:
        lines = [line for line in text.splitlines() if line.startswith("headrace_requests_total")]
        answered = [line for line in lines if 'route="/v1/embeddings"' in line]
        assert len({line.partition('replica="')[2].partition('"')[0] for line in answered}) == 2
        assert sum(float(line.rpartition(" ")[2]) for line in answered) == 40
        assert "headrace_replicas 2.0" in text


def test_a_request_to_no_replica_is_refused_where_that_is_asked_for(free_tcp_port: int) -> None:
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import served

    scaling = Replicas(0, 1, scaledown_after_s=5.0, cold_retry_after_s=7.0)
    with served(fake(), scaling, ClusterResources(cpus=0.5), "127.0.0.1", free_tcp_port) as address:
        wait_for(0)
        for _ in range(3):
            assert "headrace_replicas 0.0" in page(address, "/metrics").text
            time.sleep(1)
        assert running() == 0  # nobody woke one by that
        refused = ask(address)
        assert refused.status_code == 503  # at once: a request that waits for a replica gets 200
        assert refused.headers["Retry-After"] == "7"
        assert refused.json()["error"]["code"] == "cold"
        wait_for(1)

        def heard_of() -> bool:  # by the proxy
            status = ask(address).status_code
            assert status in (200, 503)
            return status == 200

        until(heard_of, 600)


def test_replicas_come_with_what_waits_rather_than_with_the_number_of_requests(free_tcp_port: int) -> None:
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import served

    def ask_for(text: str, enough: Callable[[], bool]) -> None:
        with httpx.Client(timeout=60) as client:
            while not enough():
                client.post(f"{address}/v1/embeddings", json={"input": [text]}).raise_for_status()

    scaling = Replicas(1, 2, scaleup_after_s=0.5, target_queued_cost=500.0)
    with served(fake(seconds=0.3), scaling, ClusterResources(cpus=0.5), "127.0.0.1", free_tcp_port) as address:
        until = time.monotonic() + 8
        small = [threading.Thread(target=ask_for, args=("small", lambda: time.monotonic() > until)) for _ in range(12)]
        for asker in small:
            asker.start()
        for asker in small:
            asker.join()
        assert running() == 1  # by their number there would be two
        large = threading.Thread(target=ask_for, args=("word " * 3_000, lambda: running() == 2))
        large.start()
        wait_for(2)
        large.join()


def test_replicas_come_and_go_with_the_requests(free_tcp_port: int) -> None:
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import served

    settings = ServerSettings(EngineConfig(task="embed", engine=FAKE, engine_options={"seconds_per_batch": 0.2}))
    scaling = Replicas(0, 2, target_ongoing_requests=2.0, scaledown_after_s=8.0, scaleup_after_s=0.5)
    with served(settings, scaling, ClusterResources(cpus=0.5), "127.0.0.1", free_tcp_port) as address:
        wait_for(0)  # from one, with which it begins
        answer = ask(address)  # waits for a replica
        assert [len(row["embedding"]) for row in answer.json()["data"]] == [8, 8]
        statuses: Counter[int] = Counter()
        enough = threading.Event()

        def ask_on() -> None:
            with httpx.Client(timeout=60) as client:
                while not enough.is_set():
                    statuses[client.post(f"{address}/v1/embeddings", json=QUESTION).status_code] += 1

        askers = [threading.Thread(target=ask_on) for _ in range(10)]
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
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import served

    settings = ServerSettings(
        EngineConfig(task="embed", engine="tests.integration.cluster.engines:broken", model="/nowhere")
    )
    with (
        pytest.raises(EngineError, match=r"no replica could be started.*no weights in /nowhere"),
        served(settings, Replicas(), ClusterResources(cpus=0.5), "127.0.0.1", free_tcp_port),
    ):
        pass


def test_what_replicas_cannot_share_is_refused(tmp_path: Path) -> None:
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import application

    with pytest.raises(ConfigError, match="leave out state"):
        application(ServerSettings(state=tmp_path), Replicas(), ClusterResources())
    with pytest.raises(ConfigError, match="replicas are 3 to 2"):
        Replicas(3, 2)


def test_the_command_serves_with_the_flags_of_its_engine_until_it_is_stopped(cluster: str, free_tcp_port: int) -> None:
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "serve", "--task", "embed"]
    command += ["--engine", FAKE, "--dimension", "3"]
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
    vectors = [entry["embedding"] for entry in ask(f"http://127.0.0.1:{free_tcp_port}").json()["data"]]
    assert [len(vector) for vector in vectors] == [3, 3]
    server.send_signal(signal.SIGTERM)
    assert "stopping: finishing accepted requests" in server.communicate()[1]
    assert server.returncode == 0
