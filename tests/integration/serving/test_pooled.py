"""A server of several models: which answers, when each is loaded, and what goes wrong with one of them alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.serving.running import running
from tests.waiting import until

from headrace.app.servers import pooled as pooled_server
from headrace.app.servers.pooled import build_pooled, read_models
from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError
from headrace.events import Event, RequestDone
from headrace.serving.auth import read_keys
from headrace.serving.http.server import DrainingServer
from headrace.serving.limits import ServeLimits
from headrace.serving.state import ServerState
from headrace.testing import FakeEngine

MODELS = """
pool: {max_models: 1}
models:
  - {name: small, aliases: [text-embedding-3-small], task: embed, engine: headrace.testing:FakeEngine,
     engine_options: {dimension: 4}, max_wait_s: 0.05}
  - {name: org/large, task: embed, engine: headrace.testing:FakeEngine, engine_options: {dimension: 16},
     max_wait_s: 0.05}
  - {name: talker, task: generate, engine: "tests.integration.serving.engines:Talker", max_wait_s: 0.05}
"""


@contextlib.contextmanager
def serving(path: Path, text: str = MODELS, **settings: Any) -> Iterator[httpx.Client]:
    with server_of(path, text, **settings) as (_, _, client):
        yield client


@contextlib.contextmanager
def server_of(path: Path, text: str, **settings: Any) -> Iterator[tuple[DrainingServer, ServerState, httpx.Client]]:
    file = path / "models.yaml"
    file.write_text(text)
    app, state = build_pooled(read_models(file), ServerSettings(**settings))
    server = DrainingServer(app, state, {"host": "127.0.0.1", "port": 0, "log_level": "warning"})
    thread = threading.Thread(target=server.run_app, name="server-under-test")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield server, state, client
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


_may_load = threading.Event()


def held(model: str | None = None) -> FakeEngine:
    """A model that is not loaded before it may be."""
    assert _may_load.wait(60)
    return FakeEngine(model)


def embed(client: httpx.Client, model: str | None, **more: Any) -> httpx.Response:
    body = {"input": "some words", **({} if model is None else {"model": model})}
    return client.post("/v1/embeddings", json=body, **more)


def phases(client: httpx.Client) -> dict[str, str]:
    return {entry["id"]: entry["status"] for entry in client.get("/v1/models").json()["data"]}


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


def test_the_model_of_a_request_answers_it_and_is_loaded_for_it(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        assert set(phases(client).values()) == {"unloaded"}
        for model, length in (("small", 4), ("org/large", 16), ("text-embedding-3-small", 4)):
            answer = embed(client, model).json()
            assert len(answer["data"][0]["embedding"]) == length
        assert answer["model"] == "small"
        assert phases(client) == {
            "small": "loaded", "text-embedding-3-small": "loaded", "org/large": "unloaded", "talker": "unloaded",
        }  # fmt: skip
        assert client.get("/ready/small").status_code == 200
        assert client.get("/ready/org/large").status_code == 503
        assert client.get("/v1/models/org/large").json()["task"] == "embed"
        told = client.get("/openapi.json").json()["components"]["schemas"]["Model"]["properties"]
        assert {*client.get("/v1/models/org/large").json(), "commit", "parent"} == {*told}
        assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)


def test_openais_client_uses_all_models_at_its_defaults(tmp_path: Path) -> None:
    with serving(tmp_path) as client, openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as user:
        assert len(user.embeddings.create(model="org/large", input=["a", "b"]).data[1].embedding) == 16
        chat = user.chat.completions.create(model="talker", messages=[{"role": "user", "content": "hello there"}])
        assert chat.choices[0].message.content == "hello there"
        stream = user.chat.completions.create(
            model="talker", messages=[{"role": "user", "content": "one by one"}], stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "one by one"
        assert [model.id for model in user.models.list()][:2] == ["small", "text-embedding-3-small"]


def test_requests_that_no_model_can_answer_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        assert refusal(embed(client, "nobody"))[:2] == (404, "model_not_found")
        status, code, message = refusal(embed(client, None))
        assert (status, code) == (400, "missing_model")
        assert "'small', 'org/large'" in message
        status, code, message = refusal(embed(client, "talker"))
        assert (status, code) == (404, "wrong_task")
        assert "'talker' (generate) has no route /v1/embeddings" in message
        assert refusal(client.post("/v1/embeddings", content=b"{"))[:2] == (400, "json_invalid")
        assert refusal(embed(client, 7))[:2] == (404, "model_not_found")  # type: ignore[arg-type]
        many = {"model": "small", "input": [[]] * 70_000}
        assert refusal(client.post("/v1/embeddings", json=many))[:2] == (400, "too_many")
        assert refusal(client.post("/nowhere", json={}))[:2] == (404, "not_found")
        assert refusal(client.get("/v1/embeddings"))[:2] == (405, "method_not_allowed")
        assert set(phases(client).values()) == {"unloaded"}
        # With one model of a route, the name may be left out.
        assert client.post("/v1/completions", json={"prompt": "a b"}).json()["choices"][0]["text"] == "a b"


def test_one_model_that_cannot_be_loaded_fails_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = "tests.integration.cluster.engines:broken"
    text = f"{MODELS}  - {{name: broken, task: embed, engine: '{engine}', model: /nowhere}}\n"
    with serving(tmp_path, text) as client:
        status, code, message = refusal(embed(client, "broken"))
        assert (status, code) == (503, "model_not_loaded")
        assert "model 'broken' cannot be loaded" in message
        assert "no weights in /nowhere" in message
        assert "model 'broken' cannot be loaded" in caplog.text  # whoever runs the server learns it too
        assert embed(client, "small").status_code == 200
        assert "it is tried again in" in refusal(embed(client, "broken"))[2]


def test_a_model_whose_folder_goes_or_whose_device_is_full_fails_its_own_requests(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").touch()
    engine = "engine: 'tests.integration.serving.engines:FromFolder', batch_tokens: 64, max_wait_s: 0.05"
    with serving(tmp_path, f"{MODELS}  - {{name: mine, task: embed, {engine}, model: {folder}}}\n") as client:
        long = client.post("/v1/embeddings", json={"model": "mine", "input": "word " * 20})
        assert refusal(long)[:2] == (503, "out_of_memory")
        assert embed(client, "mine").status_code == 200
        assert embed(client, "small").status_code == 200  # takes its room
        (folder / "weights").rename(folder / "gone")
        status, code, message = refusal(embed(client, "mine"))
        assert (status, code) == (503, "model_not_loaded")
        assert f"no weights in {folder}" in message
        assert embed(client, "small").status_code == 200
        (folder / "gone").rename(folder / "weights")
        until(lambda: embed(client, "mine").status_code == 200)


def test_no_request_is_lost_while_models_take_turns(tmp_path: Path) -> None:
    with serving(tmp_path) as client, ThreadPoolExecutor(12) as threads:

        def ask(number: int) -> tuple[int, int]:
            model, length = (("small", 4), ("org/large", 16))[number % 2]
            answer = embed(client, model)
            return answer.status_code, len(answer.json()["data"][0]["embedding"]) - length

        assert set(threads.map(ask, range(300))) == {(200, 0)}
        page = client.get("/metrics").text
        loads = {model: stats["loads"] for model, stats in loads_of(page).items()}
        assert loads["small"] >= 1 and loads["org/large"] >= 1 and loads["talker"] == 0
        assert 'headrace_requests_total{model="small",route="/v1/embeddings",status="200"} 150.0' in page
        assert 'headrace_requests_total{model="org/large",route="/v1/embeddings",status="200"} 150.0' in page


@pytest.mark.parametrize("room", ["max_asleep: 1", "max_asleep: 0"])
def test_models_sleep_where_the_file_gives_room_for_it(tmp_path: Path, room: str) -> None:
    text = MODELS.replace("headrace.testing:FakeEngine", "tests.integration.serving.engines:Sleepy")
    with serving(tmp_path, text.replace("max_models: 1", f"max_models: 1, {room}")) as client:
        with ThreadPoolExecutor(8) as threads:
            turns = ["small", "org/large"] * 40
            assert {answer.status_code for answer in threads.map(lambda model: embed(client, model), turns)} == {200}
        assert embed(client, "small").status_code == 200
        until(lambda: embed(client, "org/large").status_code == 200 and phases(client)["small"] != "unloading")
        loads = loads_of(client.get("/metrics").text)["small"]["loads"]
        if room == "max_asleep: 1":
            assert (phases(client)["small"], loads) == ("asleep", 1)
            client.post("/models/unload", json={"model": "small"})
            until(lambda: phases(client)["small"] == "unloaded")
        else:
            assert phases(client)["small"] == "unloaded" and loads > 1


def loads_of(page: str) -> dict[str, dict[str, float]]:
    found = re.findall(r'^headrace_model_(loads)_total\{model="(.+)"\} (.+)$', page, re.MULTILINE)
    return {model: {kind: float(value)} for kind, model, value in found}


def test_a_stream_that_is_never_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", errors.append)
    prompt = ("w" * 2_000 + " ") * 4_000
    body = json.dumps({"model": "talker", "prompt": prompt, "max_tokens": 4_000, "stream": True}).encode()
    limits = ServeLimits(write_timeout_s=0.5, max_body_bytes=20_000_000, max_prompt_chars=20_000_000)
    with server_of(tmp_path, MODELS, limits=limits) as (server, _, client), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", client.base_url.port))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        connection.sendall(head % len(body) + body)
        until(lambda: server.server_state.connections)
        until(lambda: not server.server_state.connections)
    assert not errors


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A server of one model, and one of several."""
    one = ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine"), name="small")
    with running(one) as single, serving(tmp_path_factory.mktemp("pool")) as several:
        yield single.client, several


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_a_method_is_answered_as_by_a_server_of_one_model(
    beside: tuple[httpx.Client, httpx.Client], method: str
) -> None:
    of_status = ("/", "/health", "/ping", "/v1/models", "/v1/models/small", "/metrics", "/docs", "/dashboard")
    of_models = ("/v1/embeddings", "/embed", "/api/tags", "/predictions/small", "/v2/models/small", "/v2")
    for path in (*of_status, *of_models, "/nowhere"):
        one, other = (client.request(method, path) for client in beside)
        assert (one.status_code, one.headers.get("allow")) == (other.status_code, other.headers.get("allow")), path
        assert one.status_code not in (404, 405) or one.content == other.content


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\xef\xbb\xbf" + b'{"model": "small", "input": "a"}',
        '{"model": "small", "input": "a"}'.encode("utf-16"),
        b'{"model": "small", "input": "\\ud800"}',
        b'{"model": "small", "input": "\xff"}',
        b'{"model": "small", "input": "a", "timeout": NaN}',
        b'{"model": "small", "input": "a", "timeout": 1e999}',
        b'{"model": "small", "input": "a", "metadata": ' + b"[" * 3_000 + b"]" * 3_000 + b"}",
    ],
)
def test_a_body_is_read_as_by_a_server_of_one_model(beside: tuple[httpx.Client, httpx.Client], body: bytes) -> None:
    headers = {"content-type": "application/json"}
    one, other = (client.post("/v1/embeddings", content=body, headers=headers) for client in beside)
    assert one.status_code == other.status_code
    assert one.json().get("error") == other.json().get("error")


def test_a_web_page_loads_no_model_and_uploads_no_file(tmp_path: Path) -> None:
    page = {"origin": "http://a.example"}
    with serving(tmp_path, state=tmp_path / "state") as client:
        for path in ("/models/load", "/models/unload"):
            assert refusal(client.post(path, content=b'{"model": "small"}', headers=page))[:2] == (400, "not_json")
        form: dict[str, Any] = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
        assert refusal(client.post("/v1/files", **form, headers=page))[:2] == (400, "not_json")
        assert client.post("/v1/files", **form).status_code == 200
        assert client.post("/models/load", json={"model": "small"}, headers=page).status_code == 200
    keys = read_keys(None, "k1")
    with serving(tmp_path, state=tmp_path / "state", keys=keys) as client:  # no page of another site knows the key
        assert client.post("/v1/files", **form, headers={**page, "authorization": "Bearer k1"}).status_code == 200


def test_who_waits_for_a_model_at_the_end_of_a_drain_is_told_to_come_again(tmp_path: Path) -> None:
    text = f"models: [{{name: small, task: embed, engine: '{__name__}:held'}}]"
    _may_load.clear()
    with (
        ThreadPoolExecutor(1) as threads,
        server_of(tmp_path, text, limits=ServeLimits(drain_s=0.1)) as (server, _, client),
    ):
        try:
            waiting = threads.submit(httpx.post, f"{client.base_url}/v1/embeddings", json={"input": "a"}, timeout=60)
            until(lambda: phases(client)["small"] == "loading")
            server.handle_exit(signal.SIGTERM, None)
            assert refusal(waiting.result())[:2] == (503, "stopping")
            assert waiting.result().headers["retry-after"]
        finally:
            _may_load.set()


def test_models_are_loaded_and_unloaded_by_hand(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        assert client.post("/models/load", json={"model": "small"}).json()["status"] == "loaded"
        assert phases(client)["small"] == "loaded"
        client.post("/models/unload", json={"model": "small"})
        until(lambda: phases(client)["small"] == "unloaded")
        assert refusal(client.post("/models/load", json={"model": "x"}))[:2] == (404, "model_not_found")
        assert refusal(client.post("/models/unload", json={"model": "small", "now": 1}))[:2] == (400, "unknown_field")
        assert refusal(client.post("/models/load", json=[]))[:2] == (400, "model_type")
        assert "'small', 'org/large'" in refusal(client.post("/models/load", json={}))[2]


def test_keys_decide_who_may_use_which_model(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice k-alice\nbob k-bob\nroot k-root admin\n")
    keys = read_keys(tmp_path / "keys", None)
    text = MODELS.replace("name: small,", "name: small, keys: [alice],")
    with serving(tmp_path, text, keys=keys) as client:

        def header(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        assert embed(client, "small").status_code == 401
        assert set(phases_of(client, header("k-alice")).values()) == {"unloaded"}
        assert refusal(embed(client, "small", headers=header("k-bob")))[:2] == (403, "model_not_allowed")
        assert embed(client, "small", headers=header("k-alice")).status_code == 200
        assert embed(client, "org/large", headers=header("k-bob")).status_code == 200
        unload = {"json": {"model": "small"}}
        assert client.post("/models/unload", **unload, headers=header("k-alice")).status_code == 403
        assert client.post("/models/unload", **unload, headers=header("k-root")).status_code == 200
        assert client.get("/metrics", headers=header("k-bob")).status_code == 403


def test_each_request_is_counted_once_under_its_route_and_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[RequestDone] = []
    requests = [
        ("/v1/embeddings", {"model": "small", "input": "a"}, "small", 200),
        ("/v1/embeddings", {"model": "org/large", "input": "a"}, "org/large", 200),
        ("/v1/embeddings", {"model": "org/large", "input": ""}, "org/large", 400),
        ("/v1/completions", {"prompt": "a b"}, "talker", 200),
        ("/v1/embeddings", {"model": "nobody", "input": "a"}, "", 404),
        ("/nowhere", {}, "", 404),
    ]
    wanted = {
        (model, path if path.startswith("/v1") else "other", str(status)): 1 for path, _, model, status in requests
    }

    def hear(event: Event) -> None:
        if isinstance(event, RequestDone) and event.method == "POST":
            heard.append(event)

    with caplog.at_level(logging.INFO, "headrace.access"), serving(tmp_path, listeners=(hear,)) as client:
        for path, body, _, status in requests:
            assert client.post(path, json=body).status_code == status
        page = client.get("/metrics").text
        samples = [
            sample
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.labels.get("route") != "/metrics"
        ]
        counts = {
            tuple(sample.labels[name] for name in ("model", "route", "status")): sample.value
            for sample in samples
            if sample.name == "headrace_requests_total"
        }
        assert counts == wanted
        timed = sum(sample.value for sample in samples if sample.name == "headrace_request_duration_seconds_count")
        assert timed == len(requests)
        assert "400 on /v1/embeddings" in client.get("/report").text
    assert [(one.model, one.route, str(one.status)) for one in heard] == list(wanted)
    assert 0 < heard[0].waited_s < heard[0].duration_s  # it loaded its model
    logged = [record.facts for record in caplog.records if hasattr(record, "facts")]
    assert [(one["route"], str(one["status"])) for one in logged if one["method"] == "POST"] == [
        found[1:] for found in wanted
    ]


def test_the_counters_of_a_model_go_on_over_all_its_loads(tmp_path: Path) -> None:
    with server_of(tmp_path, MODELS) as (_, state, client):

        def counted() -> dict[str, float]:
            """What is counted of the model, by name; without what is counted by events."""
            families = text_string_to_metric_families(client.get("/metrics").text)
            samples = [sample for family in families for sample in family.samples if family.type != "gauge"]
            return {
                one.name: one.value for one in samples if one.labels.get("model") == "small" and len(one.labels) == 1
            }

        def shown() -> dict[str, Any]:
            found: dict[str, Any] = client.get("/dashboard/state").json()
            return found

        for turns in (1, 2, 3):
            assert embed(client, "small").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "a b"}).status_code == 200  # takes its room
            assert phases(client)["small"] == "unloaded"
            found = counted()
            assert found["headrace_prompt_tokens_total"] == 2 * turns
            assert found["headrace_queue_time_seconds_count"] == turns
        until(lambda: shown()["replicas"][0]["records"] == 3)
        assert "headrace_busy_seconds_total" in found  # also while it is not loaded
        state.parts[0].ended = replace(state.parts[0].ended, refused=5, cancelled=7)
        assert counted()["headrace_refused_records_total"] == 5
        until(lambda: shown()["counts"]["refused"] == 5)
        assert embed(client, "small").status_code == 200
        assert counted()["headrace_cancelled_records_total"] == 7


def test_a_client_that_leaves_its_model_is_counted_as_one_that_left(tmp_path: Path) -> None:
    with serving(tmp_path, MODELS.replace(":Talker", ":SlowTalker")) as client:
        assert client.post("/v1/completions", json={"model": "talker", "prompt": "word"}).status_code == 200
        long = {"model": "talker", "prompt": "word " * 1000, "max_tokens": 1000}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=long, timeout=0.3)
        until(lambda: 'model="talker",route="/v1/completions",status="499"' in client.get("/metrics").text)
        assert 'status="500"' not in client.get("/metrics").text


def test_no_model_is_loaded_for_a_body_that_it_refuses(tmp_path: Path) -> None:
    """Or a client with a wrong field makes the models drive each other out."""
    with serving(tmp_path) as client:
        for body, code in (
            ({"input": "a", "nonsense": 1}, "unknown_field"),
            ({}, "missing"),
            ({"input": "a", "dimensions": "x"}, "int_type"),
        ):
            answer = client.post("/v1/embeddings", json={"model": "small", **body})
            assert refusal(answer)[:2] == (400, code)
            assert phases(client)["small"] == "unloaded"
        before = refusal(answer)
        assert embed(client, "small").status_code == 200
        loaded = client.post("/v1/embeddings", json={"model": "small", "input": "a", "dimensions": "x"})
        assert refusal(loaded) == before


def test_a_pool_can_be_mounted(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODELS)
    inner, _ = build_pooled(read_models(file), ServerSettings())
    outer = FastAPI(lifespan=lambda _: inner.router.lifespan_context(inner))
    outer.mount("/ai", inner)
    with TestClient(outer) as client:
        body = {"model": "small", "input": "some words"}
        assert len(client.post("/ai/v1/embeddings", json=body).json()["data"][0]["embedding"]) == 4
        asked = client.get("/ai/v1/models/small")
        assert (asked.status_code, asked.json()["status"]) == (200, "loaded")
        assert client.post("/ai/v1/nothing", json=body).status_code == 404


def phases_of(client: httpx.Client, headers: dict[str, str]) -> dict[str, str]:
    return {entry["id"]: entry["status"] for entry in client.get("/v1/models", headers=headers).json()["data"]}


def test_a_request_that_waits_too_long_for_its_model_is_told(tmp_path: Path) -> None:
    text = MODELS.replace("max_wait_s: 0.05}", "max_wait_s: 60}")
    with serving(tmp_path, text, limits=ServeLimits(timeout_s=0.5, drain_s=1)) as client:
        assert embed(client, "small").status_code == 200
        status, code, message = refusal(embed(client, "org/large"))
        assert (status, code) == (503, "not_ready")
        assert "'org/large' was not loaded within 0.5 s" in message
        assert "within 0.25 s" in refusal(embed(client, "org/large", headers={"X-Request-Timeout": "0.25"}))[2]
        own = client.post("/v1/embeddings", json={"model": "org/large", "input": "a", "timeout": 0.125})
        assert "within 0.125 s" in refusal(own)[2]
        assert embed(client, "small").status_code == 200


def test_each_answer_has_one_request_id_and_documents_name_all_routes(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        answer = embed(client, "small", headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert {"/v1/embeddings", "/v1/chat/completions", "/models/load"} <= client.get("/openapi.json").json()[
            "paths"
        ].keys()
        assert "/v1/chat/completions" in client.get("/docs").text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'must be a mapping with "models"'),
        ("models: []", "models must be a list of at least one model"),
        ("models: [{name: a}, {name: b, aliases: [a]}]", "the name 'a' is given twice"),
        ("models: [{name: a, tsk: embed}]", "model 'a': 'tsk' is unknown; did you mean task?"),
        ("models: [{name: a, dtype: float32}]", "model 'a': 'dtype' is unknown; it is an option of an engine"),
        ("task: embed", r"'task' is unknown \(settings of a job are for headrace run --config FILE\); known: pool"),
        ("pol: {}\nmodels: [{name: a}]", "'pol' is unknown; did you mean pool?"),
        ("models: [{name: a, task: dance}]", "model 'a': unknown task 'dance'"),
        ("models: [{name: a, task: embed, model: /nowhere}]", "model 'a': .*nowhere"),
        ("models: [{name: a, task: embed, engine_options: {dimnsion: 3}}]", "model 'a': .*dimnsion"),
        ("models: [{name: a, engine: 'nowhere:engine'}]", "model 'a': 'nowhere:engine': cannot import nowhere"),
        ("models: [{name: a, engine: 'json:dmp'}]", "model 'a': 'json:dmp': json has no attribute 'dmp'"),
        ("models: [{name: a, keys: [eve]}]", "model 'a': there is no API key named 'eve'"),
        ("models: [{name: a, memory: big}]\npool: {memory: 8GB}", "model 'a': memory: 'big' is not a size"),
        ("models: [{name: a, memory: 9GB}]\npool: {memory: 8GB}", "takes 9,000,000,000 bytes, and the pool has"),
        ("models: [{name: a}]\npool: {max_models: 1, memory: 8GB}", "either max_models or memory_bytes"),
        ("models: [{name: a}]\npool: {max_models: 0}", "pool: max_models is 0; it must be >= 1"),
        ("models: [{name: a, name: b}]", "the key 'name' is given twice"),
        ('models: [{name: "a\\0"}]', r"the name 'a\\x00' cannot be used"),
        ("models: [{name: a, batch_size: x}]", "model 'a': batch_size is 'x'; it must be a whole number or None"),
        (
            "models: [{name: a, engine_timeout_s: 0}]",
            "model 'a': engine_timeout_s is 0; it must be a finite number > 0",
        ),
        ("models: [{name: a, aliases: b}]", "model 'a': aliases is 'b'; it must be a list, each item a text"),
        ("models: [{name: a, keys: [1]}]", r"model 'a': keys is \[1\]; it must be a list, each item a text or None"),
        ("models: [{task: embed}]", "model 1 needs name"),
        ("models: [a]", "model 1 is of type str; it must be a mapping"),
        ("models: [{name: a}]\npool: 3", "pool is of type int; it must be a mapping"),
        ("models: [{name: a, load_timeout_s: .inf}]", "model 'a': load_timeout_s is inf"),
        ("models: [", "is not YAML"),
        ("a: &a [*a]\nmodels: *a", "'a' is unknown"),
        ("a: &a {b: *a}\nmodels: [*a]", "'a' is unknown"),
        ("models: !!python/object/apply:os.system [id]", "is not YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        build_pooled(read_models(file), ServerSettings())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [(".", "cannot read"), ("nothing.yaml", "cannot read"), ("/dev/zero", "/dev/zero is larger than")],
)
def test_a_file_that_cannot_be_read_is_named(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_models(tmp_path / path)


def test_an_engine_that_dies_is_loaded_again_and_the_server_goes_on(tmp_path: Path) -> None:
    text = f"{MODELS}  - {{name: mortal, task: embed, engine: 'tests.integration.serving.engines:Mortal'}}\n"
    with serving(tmp_path, text) as client:
        dying = client.post("/v1/embeddings", json={"model": "mortal", "input": "die"})
        assert refusal(dying)[:2] == (503, "engine")
        assert embed(client, "mortal").status_code == 200
        assert client.get("/health").status_code == 200


def test_a_client_that_leaves_while_it_waits_leaves_no_trace(tmp_path: Path) -> None:
    text = MODELS.replace("max_wait_s: 0.05}", "max_wait_s: 60}")
    with serving(tmp_path, text) as client:
        assert embed(client, "small").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            embed(client, "org/large", timeout=0.3)
        until(lambda: 'model="",route="/v1/embeddings",status="499"' in client.get("/metrics").text)
        assert phases(client)["small"] == "loaded"
        assert embed(client, "small").status_code == 200


def test_accepted_requests_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    slow = "engine: headrace.testing:FakeEngine, engine_options: {seconds_per_batch: 1.0}"
    text = f"models: [{{name: slow, task: embed, {slow}}}]"
    with server_of(tmp_path, text) as (server, state, client), ThreadPoolExecutor(4) as threads:
        url = f"{client.base_url}/v1/embeddings"
        asked = [threads.submit(httpx.post, url, json={"input": "a"}, timeout=60) for _ in range(4)]
        until(lambda: state.in_progress == 4)
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: client.get("/ready").status_code == 503)
        assert embed(client, "slow").status_code == 503
        assert [future.result().status_code for future in asked] == [200] * 4


def test_each_model_has_its_own_latency_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[float | None] = []

    def build(settings: ServerSettings, *others: Any) -> Any:
        targets.append(settings.latency_target_s)
        return real(settings, *others)

    real = pooled_server.build_part
    monkeypatch.setattr(pooled_server, "build_part", build)
    file = tmp_path / "models.yaml"
    file.write_text(MODELS.replace("name: small,", "name: small, latency_target_ms: 250,"))
    build_pooled(read_models(file), ServerSettings())
    assert targets == [0.25, None, None]


@pytest.mark.parametrize("name", ["a.b/c%20d", "..%2f..", "x?y#z", "ümlaut / ::"])
def test_names_with_any_characters(tmp_path: Path, name: str) -> None:
    text = MODELS.replace("name: small", f"name: {json.dumps(name)}")
    with serving(tmp_path, text) as client:
        path = quote(name, safe="")
        assert client.get(f"/v1/models/{path}").json()["id"] == name
        assert client.get(f"/ready/{path}").status_code == 503
        answer = client.post("/v1/embeddings", json={"model": name, "input": "a"})
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert client.get(f"/ready/{path}").status_code == 200
        assert client.post("/models/unload", json={"model": name}).json()["id"] == name


def test_models_are_loaded_and_unloaded_under_load_without_a_failed_request(tmp_path: Path) -> None:
    text = MODELS.replace("max_models: 1", "max_models: 3")
    with serving(tmp_path, text) as client, ThreadPoolExecutor(7) as threads:
        over = threading.Event()

        def ask(number: int) -> bool:
            with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as user:
                for turn in itertools.count(number):
                    model, length = (("small", 4), ("org/large", 16))[turn % 2]
                    if len(user.embeddings.create(model=model, input="a").data[0].embedding) != length:
                        return False
                    if user.completions.create(model="talker", prompt="a b").choices[0].text != "a b":
                        return False
                    if over.is_set():
                        break
            return True

        def roll() -> None:
            try:
                for turn in range(15):
                    for path in ("/models/unload", "/models/load"):
                        model = ("small", "org/large", "talker")[turn % 3]
                        assert client.post(path, json={"model": model}).status_code == 200
            finally:
                over.set()

        rolling = threads.submit(roll)
        assert all(threads.map(ask, range(6)))
        rolling.result()
        assert sum(stats["loads"] for stats in loads_of(client.get("/metrics").text).values()) >= 6


def test_the_example_can_be_served() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "models.yaml"
    _, state = build_pooled(read_models(example), ServerSettings())
    assert [part.name for part in state.parts] == ["minilm", "docstrings", "sums"]


def test_no_model_is_loaded_to_be_described(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        for name in ("small", "text-embedding-3-small", "org/large", "talker"):
            path = f"/v2/models/{quote(name, safe='')}"
            assert client.get(f"{path}/ready").json()["ready"] is True
            assert client.get(f"{path}/versions/1").json()["platform"].startswith("headrace_")
        assert client.get("/v2/models/other/ready").status_code == 404
        assert client.get("/v2").json()["name"] == "headrace"
        assert client.get("/api/version").status_code == 200
        listed = [one["name"] for one in client.get("/api/tags").json()["models"]]
        assert listed == ["small", "text-embedding-3-small", "org/large", "talker"]
        assert client.get("/api/ps").json() == {"models": []}
        assert set(phases(client).values()) == {"unloaded"}
        refused = client.get("/info")
        assert refused.status_code == 422 and "model is missing; /info has 'small', 'org/large'" in refused.text
        chat = {"model": "talker:latest", "messages": [{"role": "user", "content": "a b"}], "stream": False}
        assert client.post("/api/chat", json=chat).json()["message"]["content"] == "a b"
        assert [one["name"] for one in client.get("/api/ps").json()["models"]] == ["talker"]


def test_kept_answers_are_read_and_deleted_without_their_model(tmp_path: Path) -> None:
    text = MODELS + MODELS.splitlines()[-1].replace("talker", "other") + "\n"
    with serving(tmp_path, text, state=tmp_path / "state") as client:
        kept = client.post("/v1/responses", json={"model": "talker", "input": "a b"}).json()
        assert embed(client, "small").status_code == 200
        path = f"/v1/responses/{kept['id']}"
        assert client.get(path).json() == kept
        assert client.delete(path).json()["deleted"] is True
        assert client.get(path).status_code == 404
        assert phases(client)["talker"] == phases(client)["other"] == "unloaded"


def test_other_apis_choose_a_model_by_the_body_or_the_path(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a b"]}
        for name, length in (("small", 4), ("org/large", 16)):
            found = client.post(f"/v2/models/{quote(name, safe='')}/infer", json={"inputs": [tensor]})
            assert found.json()["outputs"][0]["shape"] == [1, length]
        assert client.post("/predictions/small", content=b"a b").status_code == 200
        unknown = client.post("/predictions/other", content=b"a b")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "ModelNotFoundException")
        wrong = client.post("/v2/models/missing/infer", json={"inputs": [tensor]})
        assert (wrong.status_code, list(wrong.json())) == (404, ["error"])
        asked = {"model": "talker", "max_tokens": 9, "messages": [{"role": "user", "content": "a b"}]}
        assert client.post("/v1/messages", json=asked).json()["content"][0]["text"] == "a b"
        refused = client.post("/v1/messages", json={**asked, "model": "other"}).json()
        assert refused["error"]["type"] == "not_found_error"
        nameless = {"model": "tgi", "messages": asked["messages"]}
        assert client.post("/v1/chat/completions", json=nameless).json()["model"] == "talker"
