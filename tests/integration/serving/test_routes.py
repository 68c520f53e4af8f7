"""What the routes answer, over a real socket."""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import struct
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from tests.integration.serving.running import Running, running

from headrace.app.servers.server import ServerSettings, build_app
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.responses import JsonReply, as_base64
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"
LIMITS = ServeLimits(max_body_bytes=20_000, max_prompts=4, max_prompt_chars=1_000)


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    with running(
        ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), name="fake", limits=LIMITS)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with running(
        ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), name="talker", limits=LIMITS)
    ) as server:
        yield server


def error(response: Any) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def test_embeddings_in_both_spellings(embedder: Running) -> None:
    numbers = embedder.post("/v1/embeddings", {"input": ["a b", "c"], "model": "fake"}).json()
    packed = embedder.post("/v1/embeddings", {"input": ["a b", "c"], "encoding_format": "base64"}).json()
    assert [entry["embedding"] for entry in numbers["data"]] == [FakeEngine().vector("a b"), FakeEngine().vector("c")]
    assert numbers["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    for plain, spelt in zip(numbers["data"], packed["data"], strict=True):
        assert list(struct.unpack("<8f", base64.b64decode(spelt["embedding"]))) == plain["embedding"]


def test_generate_takes_prompts_and_gives_results(embedder: Running, talker: Running) -> None:
    answer = embedder.post("/generate", {"prompts": ["x"], "task_id": "t1"}).json()
    assert answer == {"results": [FakeEngine().vector("x")], "task_id": "t1"}
    assert talker.post("/generate", {"prompts": ["one two"]}).json() == {"results": ["one two"], "task_id": None}


def test_completions_and_chats(talker: Running) -> None:
    done = talker.post("/v1/completions", {"prompt": ["one two three", "four"], "max_tokens": 2}).json()
    assert [choice["text"] for choice in done["choices"]] == ["one two", "four"]
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    chat = talker.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello you"}]}).json()
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "hello you"}
    assert chat["object"] == "chat.completion"


def test_a_stream_says_each_word_once_and_then_that_it_is_done(talker: Running) -> None:
    body = {"prompt": "one two three", "stream": True, "stream_options": {"include_usage": True}}
    with talker.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"  # else an nginx that compresses keeps it back
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "one two three"
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "json_invalid"),
        (b"[" * 5_000, 400, None),
        (b'{"input": 5}', 400, "not_text"),
        (b'{"input": []}', 400, "empty"),
        (b'{"input": ""}', 400, "empty"),
        (b'{"input": ["a", "b", "c", "d", "e"]}', 400, "too_many"),
        (b'{"input": "' + b"x" * 1_001 + b'"}', 400, "too_long"),
        (b'{"input": "x", "timeout": -1}', 400, "greater_than"),
        (b'{"input": "x", "model": "gpt-9"}', 404, "model_not_found"),
        (b'{"input": "' + b"x" * 30_000 + b'"}', 413, "too_long"),
        (b"\xff\xfe", 400, None),
        (b"", 400, "missing"),
    ],
)
def test_a_bad_request_is_told_why(embedder: Running, body: bytes, status: int, code: str | None) -> None:
    response = embedder.client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    detail = error(response)
    assert code is None or detail["code"] == code
    assert code not in ("too_many", "too_long") or "(--max-" in detail["message"]
    assert embedder.post("/v1/embeddings", {"input": "fine"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": ["a", "b", ""]}, "text 2 of input is empty"),
        ("/generate", {"prompts": ["a", ""]}, "text 1 of prompts is empty"),
        ("/v2/embed", {"texts": ["a", ""], "input_type": "search_query"}, "text 1 of texts is empty"),
        ("/api/embed", {"model": "fake", "input": ["a", ""]}, "text 1 of input is empty"),
        ("/embed", {"inputs": ["a", "b", "c", ""]}, "text 3 of inputs is empty"),
        ("/v1/embeddings", {"input": ["a", "x" * 1_001]}, "text 1 of input has 1,001 characters, more than the 1,000"),
    ],
)
def test_a_bad_text_is_named_by_its_number(embedder: Running, path: str, body: dict[str, Any], said: str) -> None:
    response = embedder.post(path, body)
    assert response.status_code in (400, 413, 422)
    assert said in response.text


def test_the_engines_own_refusal_is_the_callers_mistake(talker: Running) -> None:
    response = talker.post("/v1/completions", {"prompt": "x", "colour": "red"})
    assert response.status_code == 400
    assert "colour" in error(response)["message"]


def test_half_a_surrogate_pair_goes_out_as_it_came_in(talker: Running) -> None:
    response = talker.client.post(
        "/generate", content=b'{"prompts": ["a \\ud800"]}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
    assert response.json()["results"] == ["a \ud800"]


def test_unknown_paths_and_models_are_told_in_the_same_shape(embedder: Running) -> None:
    nothing = error(embedder.client.get("/nothing"))
    assert (nothing["type"], nothing["code"]) == ("not_found_error", "not_found")
    assert "/nothing" in nothing["message"]
    assert error(embedder.client.get("/v1/models/other"))["code"] == "model_not_found"
    assert embedder.client.get("/v1/models/fake").json()["id"] == "fake"
    assert error(embedder.client.get("/v1/embeddings"))["type"] == "invalid_request_error"
    assert embedder.post("/v1/chat/completions", {}).status_code == 404  # no route of this model's task


def test_the_counters_tell_what_was_served(embedder: Running) -> None:
    embedder.post("/v1/embeddings", {"input": ["count", "me"]})
    page = embedder.client.get("/metrics").text
    assert 'headrace_requests_total{route="/v1/embeddings",status="200"}' in page
    assert 'headrace_records_total{result="ok"}' in page
    assert "headrace_ready 1.0" in page


def test_the_documents_name_every_route(embedder: Running, talker: Running) -> None:
    common = {"/generate", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/{model}"}
    assert common | {"/v1/embeddings"} <= set(embedder.client.get("/openapi.json").json()["paths"])
    assert common | {"/v1/completions", "/v1/chat/completions"} <= set(
        talker.client.get("/openapi.json").json()["paths"]
    )


def test_a_body_that_is_not_said_to_be_json_is_not_taken(embedder: Running) -> None:
    form, page = {"content-type": "application/x-www-form-urlencoded"}, {"origin": "http://a.example"}
    for headers in ({"content-type": "text/plain"}, form, page):
        response = embedder.client.post("/v1/embeddings", content=b'{"input": "x"}', headers=headers)
        assert (response.status_code, error(response)["code"]) == (400, "not_json")
    fine = {"content-type": "application/vnd.of-ours+json; charset=utf-8"}
    for headers in (fine, {**fine, **page}, {}):  # a web page cannot leave out that it is one
        assert embedder.client.post("/v1/embeddings", content=b'{"input": "x"}', headers=headers).status_code == 200


def test_a_body_that_comes_in_pieces_is_put_together(embedder: Running) -> None:
    def pieces() -> Iterator[bytes]:
        for piece in (b'{"inp', b'ut": "a b"', b"}"):
            yield piece
            time.sleep(0.05)

    headers = {"content-type": "application/json"}
    response = embedder.client.post("/v1/embeddings", content=pieces(), headers=headers)
    assert response.json()["data"][0]["embedding"] == FakeEngine().vector("a b")


def test_an_app_can_be_mounted_and_wrapped() -> None:
    inner = build_app(task="embed", engine="headrace.testing:FakeEngine", name="fake")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with inner.router.lifespan_context(inner):
            yield

    outer = FastAPI(lifespan=lifespan)
    outer.mount("/models", inner)

    @inner.middleware("http")
    async def marked(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-mark"] = "seen"
        return response

    inner.get("/")(lambda: "at home")
    inner.post("/form")(lambda: "taken")
    with TestClient(outer) as client:
        assert client.get("/models/").json() == "at home"
        assert client.post("/models/form", data={"a": "b"}, headers={"origin": "http://a.example"}).json() == "taken"
        answer = client.post("/models/v1/embeddings", json={"input": "a b"})
        assert answer.json()["data"][0]["embedding"] == FakeEngine().vector("a b")
        assert answer.headers["x-mark"] == "seen"
        assert client.get("/models/v1/models").json()["data"][0]["id"] == "fake"
        assert "no route '/api/nothing'" in client.get("/models/api/nothing").json()["error"]  # as Ollama has it


@pytest.mark.skipif("max_body_size" not in inspect.signature(FastAPI).parameters, reason="FastAPI knows no limit")
@pytest.mark.parametrize("of_parent", [True, False])
def test_a_limit_of_fastapi_on_bodies_is_obeyed(of_parent: bool) -> None:
    inner = build_app(task="embed", engine="headrace.testing:FakeEngine")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with inner.router.lifespan_context(inner):
            yield

    outer = FastAPI(lifespan=lifespan)
    (outer if of_parent else inner).max_body_size = 30
    outer.mount("/models", inner)
    with TestClient(outer) as client:
        assert client.post("/models/v1/embeddings", json={"input": "a b"}).status_code == 200
        for body in (
            {"content": b'{"input": "' + b"a" * 30 + b'"}'},
            {"content": iter([b'{"input": "', b"a" * 30, b'"}'])},
        ):
            answer = client.post("/models/v1/embeddings", headers={"content-type": "application/json"}, **body)
            assert answer.status_code == 413


@pytest.mark.parametrize("layers", [0, 1])
def test_an_unexpected_error_is_told_once_by_the_handler_of_the_app(
    layers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("headrace.serving.http.direct.read_body", fails)
    for own in (None, lambda *_: PlainTextResponse("mine", 500)):
        app = build_app(task="embed", engine="headrace.testing:FakeEngine")
        assert isinstance(app.build_middleware_stack(), ServerErrorMiddleware)  # which tools that trace apps look for
        for _ in range(layers):
            app.add_middleware(GZipMiddleware)
        if own is not None:
            app.add_exception_handler(500, own)
        with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as client:
            answer = client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "me"})
        assert answer.status_code == 500
        assert own is not None or answer.headers.get_list("x-request-id") == ["me"]
        assert (answer.text == "mine") == (own is not None)
    assert caplog.text.count("request me failed") == 1


def test_a_mounted_app_whose_lifespan_does_not_begin_says_so() -> None:
    outer = FastAPI()
    outer.mount("/models", build_app(task="embed", engine="headrace.testing:FakeEngine"))
    with TestClient(outer) as client:
        answer = client.post("/models/v1/embeddings", json={"input": "a b"})
    assert answer.status_code == 503
    assert "`mounted.router.lifespan_context(mounted)`" in answer.json()["error"]["message"]


def test_an_output_that_no_answer_can_hold_is_named(caplog: pytest.LogCaptureFixture) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1]}
    with running(ServerSettings(EngineConfig("custom", engine=f"{ENGINES}:sets"), name="m")) as server:
        refused = server.post("/generate", {"prompts": ["a"]})
        assert (refused.status_code, error(refused)["code"]) == (500, "engine")
        assert error(refused)["message"].startswith("an output of type set cannot be written as JSON; make a text")
        refused = server.post("/v2/models/m/infer", {"inputs": [{**tensor, "data": ["a"]}]})
        assert (refused.status_code, refused.json()["error"]) == (
            500,
            caplog.records[-1].getMessage().split(": ", 1)[1],
        )
        found = server.post("/v2/models/m/infer", {"inputs": [{**tensor, "data": ["nan"]}]}).json()
        assert found["outputs"][0]["data"] == ["null"]
    assert "Traceback" not in caplog.text


def test_what_json_has_no_word_for_goes_out_all_the_same() -> None:
    vector = np.array([0.1, float("nan")], dtype=np.float32)
    assert JsonReply({"a": vector, "b": np.float32(0.5)}).body == b'{"a":[0.1,null],"b":0.5}'
    assert json.loads(JsonReply({"a": 2**70, "b": vector[:1]}).body) == {"a": 2**70, "b": [pytest.approx(0.1)]}
    assert base64.b64decode(as_base64(vector[:1])) == base64.b64decode(as_base64([0.1])) == struct.pack("<f", 0.1)
