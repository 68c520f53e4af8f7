"""Too much, too late, and nobody there: what is not worth its work costs none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.admission.controller import Ceiling
from headrace.serving.auth import read_keys
from headrace.serving.limits import ServeLimits

ENGINES = "tests.integration.serving.engines"


def held(**limits: Any) -> ServerSettings:
    return ServerSettings(EngineConfig(task="embed", engine=f"{ENGINES}:Held"), limits=ServeLimits(**limits))


def embed(server: Running, text: str, **options: Any) -> httpx.Response:
    return server.post("/v1/embeddings", {"input": text}, **options)


def leave_in_the_middle(server: Running, path: str, body: dict[str, Any]) -> None:
    """Send a request and close the connection before the answer."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=body, timeout=httpx.Timeout(20, read=0.1))


def test_more_than_the_limit_is_refused_at_once_with_a_time_to_come_back() -> None:
    with running(held(max_requests=2)) as server, ThreadPoolExecutor() as pool:
        accepted = [pool.submit(embed, server, text) for text in ("a", "b")]
        until(lambda: server.host.loaded is not None and server.host.loaded.admission.requests == 2)
        refused = embed(server, "c")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert server.client.get("/health").status_code == 200
        server.engine.go.set()
        assert [future.result().status_code for future in accepted] == [200, 200]
        assert embed(server, "c").status_code == 200
        assert sum(server.engine.batch_sizes) == 3


def test_the_bytes_of_bodies_are_bounded_together_before_they_are_read() -> None:
    limits = {"max_waiting_bytes": 30_000_000, "max_prompt_chars": 10**9}
    with running(held(**limits)) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(embed, server, "a" * 20_000_000)
        until(lambda: server.engine.batch_sizes != [])
        assert server.host.bodies.cost == pytest.approx(20_000_000, rel=0.01)
        refused = embed(server, "b" * 20_000_000)  # its answer arrives, though the body was not read
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert "30,000,000 (--max-waiting-bytes)" in message
        assert int(refused.headers["retry-after"]) >= 1

        def chunks() -> Iterator[bytes]:
            yield b'{"input": "'
            for _ in range(200):
                yield b"c" * 100_000
            yield b'"}'

        headers = {"Content-Type": "application/json"}
        in_chunks = httpx.post(f"{server.url}/v1/embeddings", content=chunks(), headers=headers, timeout=60)
        assert in_chunks.status_code == 429
        assert "--max-waiting-bytes" in in_chunks.json()["error"]["message"]
        small = pool.submit(embed, server, "short")
        until(lambda: server.host.bodies.requests == 2)
        server.engine.go.set()
        assert [first.result().status_code, small.result().status_code] == [200, 200]
        assert embed(server, "b" * 20_000_000).status_code == 200
        until(lambda: server.host.bodies.requests == 0)


def test_one_body_larger_than_the_bytes_of_all_is_accepted_alone() -> None:
    with running(
        ServerSettings(
            EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), limits=ServeLimits(max_waiting_bytes=1000)
        )
    ) as server:
        assert embed(server, "a" * 100_000).status_code == 200


def test_single_texts_say_nothing_of_the_time_that_many_take() -> None:
    settings = ServerSettings(EngineConfig(task="embed", engine=f"{ENGINES}:Gradual", batch_size=32))
    with running(settings) as server, ThreadPoolExecutor() as pool:
        assert server.host.loaded is not None
        gate = server.host.loaded.admission
        assert [embed(server, text).status_code for text in "abc"] == [200] * 3
        assert gate.per_s == 0.0, "no batch was full"
        many = [pool.submit(server.post, "/v1/embeddings", {"input": ["word " * 30] * 500}) for _ in range(4)]
        assert [future.result().status_code for future in many] == [200] * 4
        assert gate.per_s > 0.0


def test_callers_of_one_key_do_not_wait_behind_each_others_many_texts() -> None:
    settings = replace(
        ServerSettings(EngineConfig(task="embed", engine=f"{ENGINES}:Gradual", batch_size=32)),
        keys=read_keys(None, "k1"),
    )
    with running(settings) as server, ThreadPoolExecutor() as pool:
        headers = {"Authorization": "Bearer k1"}
        many = [
            pool.submit(server.post, "/v1/embeddings", {"input": ["word"] * 2_000}, headers=headers) for _ in "abcd"
        ]
        service = server.host.loaded
        assert service is not None
        until(lambda: service.batcher.stats.waiting > 4_000)
        assert embed(server, "one", headers=headers).status_code == 200
        assert service.batcher.stats.waiting > 2_000, "the others still wait"
        assert [future.result().status_code for future in many] == [200] * 4


@pytest.mark.parametrize("long", [{"prompt": "1+1=", "max_tokens": 10**9}, {"prompt": "1 " * 400_000}])
def test_no_request_counts_for_more_than_the_model_can_do(long: dict[str, Any]) -> None:
    settings = ServerSettings(
        EngineConfig(task="generate", engine=f"{ENGINES}:Talker", engine_options={"step_s": 0.01})
    )
    with running(settings) as server, ThreadPoolExecutor() as pool:
        assert server.host.loaded is not None
        gate, server.host.loaded.most_cost = server.host.loaded.admission, 512
        gate.limits = replace(gate.limits, cost=Ceiling(2_000, "tokens", "max_cost"))
        first = pool.submit(server.post, "/v1/completions", {"prompt": "word " * 200, "max_tokens": 10**9})
        until(lambda: gate.requests == 1)
        others = [server.post("/v1/completions", body).status_code for body in (long, {"prompt": "1+1="})]
        assert others == [200, 200]
        assert first.result().status_code == 200


def test_a_request_whose_time_is_up_is_not_run() -> None:
    with running(held()) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(embed, server, "first")
        until(lambda: server.engine.batch_sizes != [])
        late = embed(server, "late", headers={"X-Request-Timeout": "0.05"})
        assert late.status_code == 408
        assert late.json()["error"]["code"] == "deadline_exceeded"
        both = server.post("/v1/embeddings", {"input": "late", "timeout": 60}, headers={"X-Request-Timeout": "0.05"})
        assert both.status_code == 408, "the shorter of both counts"
        server.engine.go.set()
        assert first.result().status_code == 200
        assert server.post("/v1/embeddings", {"input": "x", "timeout": 5}).status_code == 200
        assert sum(server.engine.batch_sizes) == 2


def test_a_client_that_has_gone_costs_no_work() -> None:
    with running(held()) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(embed, server, "first")
        until(lambda: server.engine.batch_sizes != [])
        leave_in_the_middle(server, "/v1/embeddings", {"input": "gone"})
        service = server.host.loaded
        assert service is not None
        until(lambda: service.cancelled == 1 and service.batcher.stats.waiting == 0)
        server.engine.go.set()
        assert first.result().status_code == 200
        assert server.engine.batch_sizes == [1]
        assert 'status="499"' in server.client.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone_frees_its_slot(stream: bool) -> None:
    with running(ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"))) as server:
        server.engine.step_s = 0.02
        body = {"prompt": "word " * 400, "max_tokens": 400, "stream": stream}
        if stream:
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            leave_in_the_middle(server, "/v1/completions", body)
        service = server.host.loaded
        assert service is not None
        until(lambda: service.cancelled == 1 and service.batcher.stats.in_flight == 0)
        assert server.engine.words_said < 300


def test_a_deadline_in_the_middle_of_an_answer_frees_its_slot() -> None:
    with running(ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"))) as server:
        server.engine.step_s = 0.02
        body = {"prompt": "word " * 400, "max_tokens": 400, "timeout": 0.2}
        assert server.post("/v1/completions", body).status_code == 408
        lines = server.post("/v1/completions", body | {"stream": True}).text.split("\n\n")
        assert '"code": "deadline_exceeded"' in lines[-2].replace('":"', '": "')
        service = server.host.loaded
        assert service is not None
        until(lambda: service.batcher.stats.in_flight == 0)


def test_what_is_accepted_is_finished_after_the_first_signal_and_the_rest_is_turned_away() -> None:
    with running(held()) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(embed, server, "first")
        until(lambda: server.engine.batch_sizes != [])
        server.client.get("/health")  # so that the connection is there before the signal
        server.server.handle_exit(15, None)
        ready = server.client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        turned_away = embed(server, "second")
        assert turned_away.status_code == 503
        assert "retry-after" in turned_away.headers
        server.engine.go.set()
        assert first.result().status_code == 200


def test_what_does_not_finish_within_the_drain_is_told_so() -> None:
    with running(held(drain_s=0.3)) as server, ThreadPoolExecutor() as pool:
        stuck = pool.submit(embed, server, "first")
        until(lambda: server.engine.batch_sizes != [])
        server.server.handle_exit(15, None)
        response = stuck.result()
        assert response.status_code == 503
        assert "retry-after" in response.headers
        server.engine.go.set()


def test_a_dead_engine_turns_readiness_off() -> None:
    with running(
        ServerSettings(EngineConfig(task="embed", engine=f"{ENGINES}:Mortal"), limits=ServeLimits(drain_s=5))
    ) as server:
        assert embed(server, "live").status_code == 200
        assert embed(server, "die").status_code == 503
        assert server.host.dead
        assert not server.host.ready


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alice k1\nbob k2 per_minute=1")
    keys = read_keys(path, "k3")
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), keys=keys)) as server:
        yield server


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json", "/v1/models", "/generate", "/nothing"])
def test_nothing_but_the_probes_is_open_without_a_key(locked: Running, path: str) -> None:
    answer = locked.client.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.client.get(path, headers={"Authorization": "Bearer k1"}).status_code != 401


def test_the_probes_are_open(locked: Running) -> None:
    assert locked.client.get("/health").status_code == locked.client.get("/ready").status_code == 200


def test_a_key_has_its_own_limit(locked: Running) -> None:
    headers = {"Authorization": "Bearer k2"}
    assert embed(locked, "x", headers=headers).status_code == 200
    refused = embed(locked, "x", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
    assert embed(locked, "x", headers={"Authorization": "Bearer k1"}).status_code == 200
