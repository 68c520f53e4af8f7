"""Chats and vectors in the shapes of other APIs; limits, keys, deadlines and errors are alike in all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.integration.serving.running import Running, running
from tests.settings import server_settings
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.limits import KeySettings
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"
WORDS = "one two three four"
USER = [{"role": "user", "content": WORDS}]


@dataclass(frozen=True)
class Api:
    """How an API is asked, and where its answers have what."""

    path: str
    body: dict[str, Any]
    text: Callable[[Any], str]
    piece: Callable[[Any], str]
    tokens: Callable[[Any], tuple[int, int]]
    """The tokens read and generated, in an answer and in the last events of a stream."""
    limit: dict[str, Any]
    """What limits the answer to two tokens."""
    cut: Callable[[Any], str]
    """Why it ended."""
    missing: str
    """A required field."""
    error: Callable[[Any], str]


APIS = {
    "anthropic": Api(
        "/v1/messages",
        {"model": "m", "max_tokens": 9, "messages": USER},
        lambda found: found["content"][0]["text"],
        lambda event: event.get("delta", {}).get("text", ""),
        lambda found: (found["usage"]["input_tokens"], found["usage"]["output_tokens"]),
        {"max_tokens": 2},
        lambda found: found["stop_reason"],
        "max_tokens",
        lambda found: found["error"]["message"],
    ),
    "responses": Api(
        "/v1/responses",
        {"model": "m", "input": WORDS},
        lambda found: found["output"][0]["content"][0]["text"],
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda found: (found["usage"]["input_tokens"], found["usage"]["output_tokens"]),
        {"max_output_tokens": 2},
        lambda found: found["incomplete_details"]["reason"],
        "input",
        lambda found: found["error"]["message"],
    ),
    "cohere": Api(
        "/v2/chat",
        {"model": "m", "messages": USER},
        lambda found: found["message"]["content"][0]["text"],
        lambda event: event["delta"]["message"]["content"]["text"] if event["type"] == "content-delta" else "",
        lambda found: tuple(found["usage"]["tokens"].values()),
        {"max_tokens": 2},
        lambda found: found["finish_reason"],
        "messages",
        lambda found: found["message"],
    ),
    "ollama chat": Api(
        "/api/chat",
        {"model": "m:latest", "messages": USER},
        lambda found: found["message"]["content"],
        lambda event: event["message"]["content"],
        lambda found: (found["prompt_eval_count"], found["eval_count"]),
        {"options": {"num_predict": 2}},
        lambda found: found["done_reason"],
        "messages",
        lambda found: found["error"],
    ),
    "ollama generate": Api(
        "/api/generate",
        {"model": "m", "prompt": WORDS},
        lambda found: found["response"],
        lambda event: event["response"],
        lambda found: (found["prompt_eval_count"], found["eval_count"]),
        {"options": {"num_predict": 2}},
        lambda found: found["done_reason"],
        "model",
        lambda found: found["error"],
    ),
    "tgi": Api(
        "/generate_stream",
        {"inputs": WORDS},
        lambda found: found["generated_text"],
        lambda event: event["token"]["text"],
        lambda found: (found["details"]["input_length"], found["details"]["generated_tokens"]),
        {"parameters": {"max_new_tokens": 2}},
        lambda found: found["details"]["finish_reason"],
        "inputs",
        lambda found: found["error"],
    ),
}
WHOLE = [name for name in APIS if name != "tgi"]


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig("generate", engine=f"{ENGINES}:Talker"), name="m")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    keys = [
        KeySettings("slow", hashlib.sha256(b"slow").digest()),
        *(
            KeySettings(name, hashlib.sha256(name.encode()).digest(), per_minute=1)
            for name in (path.path for path in APIS.values())
        ),
    ]
    config = EngineConfig("generate", engine=f"{ENGINES}:SlowTalker")
    with running(ServerSettings(config, name="m", keys=keys)) as server:
        yield server


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ").removeprefix("data:") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer(talker: Running, name: str) -> None:
    api = APIS[name]
    found = talker.post(api.path, {**api.body, "stream": False}).json()
    assert (api.text(found), api.tokens(found)) == (WORDS, (4, 4))
    short = talker.post(api.path, {**api.body, "stream": False, **api.limit}).json()
    assert api.text(short) == "one two"


@pytest.mark.parametrize("name", APIS)
def test_a_stream(talker: Running, name: str) -> None:
    api = APIS[name]
    response = talker.post(api.path, api.body if name == "tgi" else {**api.body, "stream": True})
    assert response.status_code == 200, response.text
    found = events(response.text)
    assert "".join(api.piece(one) for one in found) == WORDS
    assert len([one for one in found if api.piece(one)]) > 1


@pytest.mark.parametrize("name", APIS)
def test_a_missing_or_wrong_field_is_named(talker: Running, name: str) -> None:
    api = APIS[name]
    for body, field in (
        ({key: value for key, value in api.body.items() if key != api.missing}, api.missing),
        ({**api.body, "colour": 1}, "colour"),
        ({**api.body, api.missing: {"a": 5}}, api.missing),
    ):
        response = talker.post(api.path, body)
        assert 400 <= response.status_code < 500
        assert field in api.error(response.json()), response.text
    if "model" in api.body:
        response = talker.post(api.path, {**api.body, "model": "other"})
        assert response.status_code == 404
        assert "other" in api.error(response.json())
    broken = talker.client.post(api.path, content=b"{", headers={"content-type": "application/json"})
    assert "JSON" in api.error(broken.json())


@pytest.mark.parametrize("name", APIS)
def test_keys_limits_deadlines_and_clients_that_leave(guarded: Running, name: str) -> None:
    api = APIS[name]
    response = guarded.post(api.path, api.body)
    assert response.status_code == 401
    assert "API key" in api.error(response.json())
    own = {"authorization": f"Bearer {api.path}"}
    late = guarded.post(api.path, {**api.body, "stream": False} if name != "tgi" else api.body, headers={
        **own, "x-request-timeout": "0.02",
    })  # fmt: skip
    told = events(late.text)[-1] if late.status_code == 200 else late.json()
    assert "timed out" in (told["message"] if told.get("type") == "error" and "message" in told else api.error(told))
    refused = guarded.post(api.path, api.body, headers=own)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 1
    assert "requests per minute" in api.error(refused.json())
    before = guarded.host.service.cancelled
    streamed = api.body if name == "tgi" else {**api.body, "stream": True}
    long = json.loads(json.dumps(streamed).replace(WORDS, "w " * 500))
    if "max_tokens" in long:
        long["max_tokens"] = 500
    with guarded.client.stream("POST", api.path, json=long, headers={"authorization": "Bearer slow"}) as stream:
        assert stream.status_code == 200
        next(stream.iter_bytes())
    until(lambda: guarded.host.service.cancelled == before + 1)


def test_the_events_of_anthropic(talker: Running) -> None:
    api = APIS["anthropic"]
    found = events(talker.post(api.path, {**api.body, "stream": True}).text)
    kinds = list(dict.fromkeys(one["type"] for one in found))
    assert kinds == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert found[-2]["delta"]["stop_reason"] == "end_turn"
    assert api.tokens(found[-2]) == (4, 4)


def test_the_events_of_responses(talker: Running) -> None:
    api = APIS["responses"]
    found = events(talker.post(api.path, {**api.body, "stream": True, "max_output_tokens": 9}).text)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [kind.removeprefix("response.") for kind in dict.fromkeys(one["type"] for one in found)]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert api.text(found[-1]["response"]) == WORDS
    kept = talker.post(api.path, {**api.body, "previous_response_id": "resp_1"})
    assert kept.json()["error"]["param"] == "previous_response_id"
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "said"},
    ]
    assert api.text(talker.post(api.path, {"model": "m", "input": turns}).json()) == "said"
    strange = talker.post(api.path, {"model": "m", "input": [*turns, {"type": "web_search_call"}]})
    assert strange.json()["error"]["param"] == "input.3"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"city": "Oslo"}
ACTING = f"<think> hm </think> Look: <tool_call> {json.dumps({'name': 'weather', 'arguments': CALL})} </tool_call>"
TOOLS: dict[str, dict[str, Any]] = {
    "anthropic": {"name": "weather", "input_schema": SCHEMA},
    "responses": {"type": "function", "name": "weather", "parameters": SCHEMA},
    "cohere": {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    "ollama": {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
}
PATHS = {"anthropic": "/v1/messages", "responses": "/v1/responses", "cohere": "/v2/chat", "ollama": "/api/chat"}


def acting(name: str, *, stream: bool, said: str = ACTING) -> tuple[str, dict[str, Any]]:
    """A request for an answer with reasoning, a text and a call."""
    body: dict[str, Any] = {"model": "m", "tools": [TOOLS[name]], "stream": stream}
    asked = {"input": said} if name == "responses" else {"messages": [{"role": "user", "content": said}]}
    return PATHS[name], body | asked | ({"max_tokens": 99} if name == "anthropic" else {})


def test_an_answer_with_reasoning_and_a_call(talker: Running) -> None:
    found = {name: talker.post(*acting(name, stream=False)).json() for name in PATHS}
    thought, text, call = found["anthropic"]["content"]
    assert (thought["thinking"], text["text"]) == ("hm", "Look:")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", CALL)
    assert found["anthropic"]["stop_reason"] == "tool_use"
    thought, message, call = found["responses"]["output"]
    assert (thought["content"][0]["text"], message["content"][0]["text"]) == ("hm", "Look:")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", CALL)
    message = found["cohere"]["message"]
    assert message["content"] == [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Look:"}]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == CALL
    assert found["cohere"]["finish_reason"] == "TOOL_CALL"
    message = found["ollama"]["message"]
    assert (message["thinking"], message["content"]) == ("hm", "Look:")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": CALL}


def test_an_answer_can_be_sent_back_as_it_came(talker: Running) -> None:
    path, body = acting("anthropic", stream=False)
    content = talker.post(path, body).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "sunny"}
    turns = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    body["messages"] += turns
    assert talker.post(path, body).json()["content"][0]["text"] == "sunny"
    path, body = acting("cohere", stream=False)
    message = talker.post(path, body).json()["message"]
    told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    body["messages"] += [message, told]
    assert talker.post(path, body).json()["message"]["content"][0]["text"] == "sunny"
    path, body = acting("responses", stream=False)
    output = talker.post(path, body).json()["output"]
    told = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "sunny"}
    body["input"] = [{"role": "user", "content": "x"}, *output, told]
    assert talker.post(path, body).json()["output"][0]["content"][0]["text"] == "sunny"


def test_a_call_alone_has_no_empty_text(talker: Running) -> None:
    said = ACTING.split("Look: ")[1]
    assert [one["type"] for one in talker.post(*acting("anthropic", stream=False, said=said)).json()["content"]] == [
        "tool_use"
    ]
    items = talker.post(*acting("responses", stream=False, said=said)).json()["output"]
    assert [one["type"] for one in items] == ["function_call"]
    broken = said.replace('"Oslo"}', '"Oslo"] ')
    [block] = talker.post(*acting("anthropic", stream=False, said=broken)).json()["content"][-1:]
    assert block["type"] == "tool_use" and "INVALID_JSON" in block["input"]


def test_streams_of_reasoning_and_a_call(talker: Running) -> None:
    found = {name: events(talker.post(*acting(name, stream=True)).text) for name in PATHS}
    blocks: dict[int, Any] = {}
    for one in found["anthropic"]:
        if one["type"] == "content_block_start":
            blocks[one["index"]] = {**one["content_block"], "more": ""}
        elif one["type"] == "content_block_delta":
            blocks[one["index"]]["more"] += "".join(value for name, value in one["delta"].items() if name != "type")
    assert [(one["type"], one["more"].strip()) for one in blocks.values()] == [
        ("thinking", "hm"), ("text", "Look:"), ("tool_use", json.dumps(CALL)),
    ]  # fmt: skip
    assert [one["index"] for one in found["anthropic"] if one["type"] == "content_block_stop"] == [0, 1, 2]
    items = [one["item"] for one in found["responses"] if one["type"] == "response.output_item.done"]
    whole = found["responses"][-1]["response"]["output"]
    assert [one["type"] for one in items] == ["reasoning", "message", "function_call"]
    assert [(one["id"], one["type"]) for one in items] == [(one["id"], one["type"]) for one in whole]
    assert json.loads(items[2]["arguments"]) == CALL
    called = [one for one in found["cohere"] if one["type"].startswith("tool-call")]
    assert [one["type"] for one in called if one["type"] != "tool-call-delta"] == ["tool-call-start", "tool-call-end"]
    pieces = [one["delta"]["message"]["tool_calls"] for one in called if "delta" in one]
    assert json.loads("".join(one["function"]["arguments"] for one in pieces)) == CALL
    messages = [one["message"] for one in found["ollama"]]
    assert [one["tool_calls"][0]["function"]["arguments"] for one in messages if "tool_calls" in one] == [CALL]
    assert "".join(one.get("thinking", "") for one in messages) == "hm"


def test_blocks_of_anthropic(talker: Running) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "it said"}]},
    ]
    body = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "s"}], "messages": turns}
    assert talker.post("/v1/messages", body).json()["content"][0]["text"] == "it said"
    body["messages"] = [{"role": "user", "content": [{"type": "document"}]}]
    assert "messages.0.content.0" in talker.post("/v1/messages", body).json()["error"]["message"]


def test_tokens_of_a_chat_are_counted() -> None:
    with running(server_settings(task="generate")) as server:
        body = {"model": server.host.service.name, "messages": [{"role": "user", "content": "What is 2 plus 3?"}]}
        count = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
        found = server.post("/v1/messages", {**body, "max_tokens": 5}).json()
        assert found["usage"]["input_tokens"] + found["usage"].get("cache_read_input_tokens", 0) == count


def test_a_model_may_have_ollamas_tag_in_its_name() -> None:
    with running(
        ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine"), name="m:latest")
    ) as server:
        for name in ("m", "m:latest"):
            assert server.post("/api/embed", {"model": name, "input": "a"}).json()["model"] == "m:latest"


def test_vectors_of_cohere_and_ollama() -> None:
    row = np.array(FakeEngine().vector("a b"))
    unit = row / np.linalg.norm(row)
    with running(ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine"), name="m")) as server:
        asked = {"model": "m", "texts": ["a b"], "input_type": "search_query", "embedding_types": ["float", "int8"]}
        found = server.post("/v2/embed", asked).json()
        np.testing.assert_allclose(found["embeddings"]["float"], [row], rtol=1e-5)
        assert np.array(found["embeddings"]["int8"]).shape == (1, 8)
        assert found["texts"] == ["a b"]
        old = server.post("/v1/embed", {"model": "m", "texts": ["a b"]}).json()
        np.testing.assert_allclose(old["embeddings"], [row], rtol=1e-5)
        assert "input_type" in server.post("/v2/embed", {**asked, "input_type": "image"}).json()["message"]
        found = server.post("/api/embed", {"model": "m:latest", "input": ["a b", "c"]}).json()
        np.testing.assert_allclose(found["embeddings"][0], unit, rtol=1e-5)
        assert found["prompt_eval_count"] == 3
        curl = {"content-type": "application/x-www-form-urlencoded"}
        plain = b'{"model": "m", "input": "a b"}'
        for path, headers, status in (
            ("/api/embed", curl, 200),
            ("/api/embed", {**curl, "origin": "http://evil.example"}, 400),
            ("/v1/embeddings", {}, 200),
            ("/v1/embeddings", {"origin": "http://evil.example"}, 400),
            ("/v1/embeddings", curl, 400),
        ):
            assert server.client.post(path, content=plain, headers=headers).status_code == status, (path, headers)
        unset = {"model": "m", "input": "a b", "options": {"mirostat": None, "temperature": None}}
        assert server.post("/api/embed", unset).json()["embeddings"] == found["embeddings"][:1]
        old = server.post("/api/embeddings", {"model": "m", "prompt": "a b"}).json()
        np.testing.assert_allclose(old["embedding"], row, rtol=1e-5)
        assert [one["model"] for one in server.client.get("/api/tags").json()["models"]] == ["m"]
        assert server.post("/api/show", {"model": "m"}).json()["capabilities"] == ["embedding"]
        assert server.client.get("/api/version").status_code == 200


SHAPES = {
    "/v1/messages": {"type", "error"},
    "/v1/messages/none": {"type", "error"},
    "/api/none": {"error"},
    "/v2/none": {"error"},
    "/predictions/m/1/none": {"code", "type", "message"},
    "/v2/chat": {"message"},
    "/embed_all": {"error", "error_type"},
    "/none": {"error"},
}


def test_what_an_api_lacks_is_told_in_its_shape() -> None:
    with running(ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine"), name="m")) as server:
        for path, keys in SHAPES.items():
            refused = server.post(path, {})
            assert (refused.status_code, set(refused.json())) == (404, keys), refused.text
        wrong = server.client.get("/api/embed")
        assert (wrong.status_code, wrong.headers["allow"], type(wrong.json()["error"])) == (405, "POST", str)
        wrong = server.client.get("/embed")
        assert (wrong.status_code, set(wrong.json())) == (405, {"error", "error_type"})
