"""Every field of a request is obeyed, or refused by its name; what is cut is told."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.integration.serving.running import Running, running
from tests.settings import server_settings

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.networks.quantizing import quantized
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"
NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "logit_bias": {},
    "n": 1,
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "stream_options": {"include_usage": True},
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "seed": 5,
    "stop": None,
    "max_tokens": None,
}


class Short(FakeEngine):
    """Takes three words; its vectors may be cut to 2 or 4 components."""

    dimension = 8
    matryoshka = (2, 4)
    max_model_len = 3

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, max_model_len=3)


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="embed", engine=f"{__name__}:Short"), name="short")) as server:
        yield server


@pytest.fixture(scope="module")
def labels() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="classify", engine=f"{ENGINES}:Labels"), name="labels")) as server:
        yield server


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), name="talker")) as server:
        yield server


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    with running(server_settings(task="generate")) as server:
        yield server


def refused(server: Running, path: str, body: dict[str, Any], param: str) -> str:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    return str(error["message"])


def test_text_parts_are_the_text_that_they_hold(talker: Running) -> None:
    parts = [{"type": "text", "text": "12 + 7"}, {"type": "text", "text": "="}]
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": parts}], "stream": stream}
        response = talker.post("/v1/chat/completions", body)
        if stream:
            chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
            said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        else:
            said = response.json()["choices"][0]["message"]["content"]
        assert said == "12 + 7 ="


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role"),
        ([5], "messages.0"),
        ([], "messages"),
        ("hi", "messages"),
    ],
)
def test_a_message_that_cannot_be_taken_is_named(talker: Running, messages: Any, param: str) -> None:
    refused(talker, "/v1/chat/completions", {"messages": messages}, param)


def test_neutral_values_are_welcome(talker: Running, short: Running) -> None:
    chat = [{"role": "assistant", "content": None}, {"role": "user", "content": "a b"}]
    answer = talker.post("/v1/chat/completions", {"messages": chat, **NEUTRAL})
    assert answer.json()["choices"][0]["message"]["content"] == "a b"
    answer = talker.post("/v1/completions", {"prompt": "a b", **NEUTRAL, "best_of": 1, "echo": False, "suffix": None})
    assert answer.json()["choices"][0]["text"] == "a b"
    body = {"input": "a", "dimensions": 8, "encoding_format": "float", "user": "u", "truncate": None, "other": None}
    body |= {"metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s"}
    assert short.post("/v1/embeddings", body).status_code == 200


NOT_A_NUMBER: list[Any] = [True, "5", 1.5, float("nan"), [5]]


@pytest.mark.parametrize("value", NOT_A_NUMBER)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed"])
def test_what_is_no_whole_number_is_refused_by_generation(real: Running, field: str, value: Any) -> None:
    assert_no_number(real, "/v1/completions", {"prompt": "x"}, field, value)
    assert_no_number(real, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, field, value)


@pytest.mark.parametrize("value", [True, "0.5", float("nan"), float("inf"), [0.5]])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "timeout"])
def test_what_is_no_number_is_refused_by_generation(real: Running, field: str, value: Any) -> None:
    assert_no_number(real, "/v1/completions", {"prompt": "x"}, field, value)


@pytest.mark.parametrize("value", NOT_A_NUMBER)
def test_what_is_no_number_is_refused_for_texts(short: Running, labels: Running, value: Any) -> None:
    for server, path, body in (
        (short, "/v1/embeddings", {"input": "a"}),
        (short, "/generate", {"prompts": ["a"]}),
        (labels, "/classify", {"input": "a"}),
    ):
        assert_no_number(server, path, body, "truncate_prompt_tokens", value)
        assert_no_number(server, path, body, "timeout", "5" if value == 1.5 else value)
    assert_no_number(short, "/v1/embeddings", {"input": "a"}, "dimensions", value)


@pytest.mark.parametrize("value", ["true", 1, "no", 0])
def test_what_is_neither_true_nor_false_is_refused(short: Running, talker: Running, value: Any) -> None:
    assert_no_number(talker, "/v1/completions", {"prompt": "x"}, "stream", value)
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": value}}
    refused(talker, "/v1/completions", body, "stream_options.include_usage")
    assert_no_number(short, "/v1/embeddings", {"input": "a"}, "truncate", value)


def assert_no_number(server: Running, path: str, body: dict[str, Any], field: str, value: Any) -> None:
    raw = json.dumps({**body, field: value})  # with NaN, which is no JSON and which httpx does not send
    response = server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"] == field, response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("tools", "search"),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"1": 5}),
        ("store", True),
        ("modalities", ["audio"]),
        ("max_completion_tokens", 0),
        ("stream_options", "yes"),
        ("colour", "red"),
        ("temperature", -1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_generation_cannot_obey_is_refused(talker: Running, field: str, value: Any, stream: bool) -> None:
    refused(talker, "/v1/completions", {"prompt": "x", "stream": stream, field: value}, field)
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": stream, field: value}
    assert field in refused(talker, "/v1/chat/completions", chat, field)


def test_an_answer_is_no_longer_than_either_name_allows(talker: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "a b c"}], "max_completion_tokens": 2}
    assert talker.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"] == "a b"


def test_unknown_fields_are_refused_by_every_route(short: Running, labels: Running, talker: Running) -> None:
    for server, path, body in (
        (short, "/v1/embeddings", {"input": "a"}),
        (short, "/generate", {"prompts": ["a"]}),
        (labels, "/classify", {"input": "a"}),
        (talker, "/generate", {"prompts": ["a"]}),
    ):
        assert "'colour'" in refused(server, path, {**body, "colour": "red"}, "colour")
        assert server.post(path, {**body, "model": server.host.service.name, "user": "u"}).status_code == 200
        assert server.post(path, {**body, "model": "other"}).status_code == 404
    misspelt = "input: Field required; unknown field 'inputs'; did you mean input?"
    assert refused(short, "/v1/embeddings", {"inputs": "a"}, "input") == misspelt
    assert refused(short, "/v1/embeddings", {"sentence": "a"}, "input") == "input: Field required"


def test_a_route_that_the_server_lacks_is_told_with_a_way_out(short: Running) -> None:
    for path in ("/v1/files", "/v1/batches/batch_1"):
        assert "the Batch API needs headrace serve --state-dir DIR" in short.post(path, {}).text
    assert "/docs lists all routes" in short.post("/v1/filed", {}).text
    assert "it is of servers with --task score" in short.post("/v1/rerank", {}).text
    assert "/ accepts POST, not PUT" in short.client.put("/").text


@pytest.mark.parametrize("given", [5, [1, 2], [[1, 2]], None, {"text": "a"}, ["a", 5]])
def test_an_input_that_is_no_text_is_named(short: Running, talker: Running, given: Any) -> None:
    assert "text" in refused(short, "/v1/embeddings", {"input": given}, "input")
    assert "text" in refused(talker, "/v1/completions", {"prompt": given}, "prompt")


@pytest.mark.parametrize("spelling", ["float", "base64"])
def test_dimensions_of_a_matryoshka_model_are_obeyed_at_length_1(short: Running, spelling: str) -> None:
    whole = np.array(FakeEngine().vector("a b"))
    for wanted in (2, 4, 8):
        body = {"input": "a b", "dimensions": wanted, "encoding_format": spelling}
        got = short.post("/v1/embeddings", body).json()["data"][0]["embedding"]
        vector = np.array(struct.unpack(f"<{wanted}f", base64.b64decode(got)) if spelling == "base64" else got)
        cut = whole[:wanted]
        np.testing.assert_allclose(vector, cut if wanted == 8 else cut / np.linalg.norm(cut), rtol=1e-6)


@pytest.mark.parametrize("wanted", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_output_dtype_is_obeyed_after_dimensions(short: Running, wanted: Any) -> None:
    whole = np.array([FakeEngine().vector("a b")], np.float32)
    cut = whole[:, :4] / np.linalg.norm(whole[:, :4])
    for dimensions, vectors in ((None, whole), (4, cut)):
        expected = quantized(vectors, wanted)[0]
        body = {"input": "a b", "dimensions": dimensions, "output_dtype": wanted}
        numbers = short.post("/v1/embeddings", body).json()["data"][0]["embedding"]
        np.testing.assert_allclose(numbers, expected, rtol=1e-6)
        assert {type(number) for number in numbers} == {float if wanted == "float32" else int}
        packed = short.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), expected.dtype), expected, rtol=1e-6)


def test_an_unknown_output_dtype_is_refused(short: Running) -> None:
    assert "ubinary" in refused(short, "/v1/embeddings", {"input": "a", "output_dtype": "int4"}, "output_dtype")


@pytest.mark.parametrize("wanted", [1, 3, 9, 0, -1, 2.5])
def test_other_dimensions_are_refused(short: Running, wanted: Any) -> None:
    message = refused(short, "/v1/embeddings", {"input": "a", "dimensions": wanted}, "dimensions")
    assert wanted in (0, -1, 2.5) or "2, 4, 8" in message


def test_dimensions_of_an_engine_that_does_not_tell_its_own() -> None:
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"))) as server:
        assert server.post("/v1/embeddings", {"input": "a", "dimensions": 8}).status_code == 200
        refused(server, "/v1/embeddings", {"input": "a", "dimensions": 4}, "dimensions")


def test_what_is_cut_is_told(short: Running, labels: Running) -> None:
    response = short.post("/v1/embeddings", {"input": ["a b c d", "a b c"]})
    answer = response.json()
    assert [entry.get("truncated", False) for entry in answer["data"]] == [True, False]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "truncated_inputs": 1}
    assert response.headers["x-truncated-inputs"] == "1"
    assert short.post("/generate", {"prompts": ["a b c d"]}).headers["x-truncated-inputs"] == "1"
    response = labels.post("/classify", {"input": ["a b c d", "a"]})
    assert [entry.get("truncated", False) for entry in response.json()["data"]] == [True, False]
    response = short.post("/v1/embeddings", {"input": "a b c"})
    assert "x-truncated-inputs" not in response.headers
    assert "truncated" not in response.text


def test_who_does_not_want_to_be_cut_is_told_instead(short: Running, labels: Running) -> None:
    long = "a b c d"
    refused(short, "/v1/embeddings", {"input": ["a", long], "truncate": False}, "input")
    refused(short, "/generate", {"prompts": [long], "truncate": False}, "prompts")
    assert "3 tokens" in refused(labels, "/classify", {"input": long, "truncate": False}, "input")
    for fine in ({"truncate": True}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 3}):
        assert short.post("/v1/embeddings", {"input": long, **fine}).headers["x-truncated-inputs"] == "1"
    assert short.post("/v1/embeddings", {"input": "a b c", "truncate": False}).status_code == 200
    for bad in ({"truncate_prompt_tokens": 2}, {"truncate": False, "truncate_prompt_tokens": -1}):
        refused(short, "/v1/embeddings", {"input": long, **bad}, "truncate_prompt_tokens")
    with running(
        ServerSettings(EngineConfig(task="embed", engine=f"{__name__}:Short"))
    ) as server:  # nothing of a refusal stays behind
        refused(server, "/v1/embeddings", {"input": long, "truncate": False}, "input")
        assert server.host.service.admission.requests == server.host.service.batcher.stats.waiting == 0
