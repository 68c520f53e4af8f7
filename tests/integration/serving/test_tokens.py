"""Token ids in requests, /tokenize and /detokenize, with the real models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    config = EngineConfig("embed", batch_tokens=2048, engine_options={"dtype": "float32"})  # so that none are tried
    with running(ServerSettings(config, name=["mini", "text-embedding-ada-002"])) as server:
        yield server


@pytest.fixture(scope="module")
def generator() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig("generate"))) as server:
        yield server


def vectors(server: Running, given: Any, **fields: Any) -> list[list[float]]:
    response = server.post("/v1/embeddings", {"input": given, **fields})
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def tokens(server: Running, **fields: Any) -> list[int]:
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["count"] == len(body["tokens"])
    ids: list[int] = body["tokens"]
    return ids


def test_ids_of_the_model_give_the_vectors_of_their_texts(embedder: Running) -> None:
    texts = ["a mill on the canal", "water"]
    ids = [tokens(embedder, prompt=text) for text in texts]
    assert vectors(embedder, ids, add_special_tokens=False) == vectors(embedder, texts)
    assert vectors(embedder, ids[1], add_special_tokens=False) == vectors(embedder, texts[1])


def test_ids_of_an_unknown_tokenizer_are_refused_with_both_ways_out(embedder: Running) -> None:
    # "hello world" by OpenAI's cl100k_base: both ids are in this model's vocabulary, where they mean something else.
    for given in ([15339, 1917], [[15339, 1917]]):
        response = embedder.post("/v1/embeddings", {"input": given})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("input", "token_ids")
        assert "check_embedding_ctx_length=False" in error["message"]
        assert '"add_special_tokens": false' in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "about"),
    [
        (
            {"input": [[101, 30_522, 102]], "add_special_tokens": False},
            "input",
            "30522 is not in the model's vocabulary",
        ),
        ({"input": [1 << 40], "add_special_tokens": False}, "input", "not in the model's vocabulary"),
        ({"input": [[101] * 257], "add_special_tokens": False}, "input", "257 token ids"),
        ({"input": [[]], "add_special_tokens": False}, "input", "empty"),
        ({"input": [[101], "text"], "add_special_tokens": False}, "input", "list of token ids"),
        ({"input": [-1], "add_special_tokens": False}, "input", "list of token ids"),
        ({"input": [1.5], "add_special_tokens": False}, "input", "list of token ids"),
        ({"input": [True], "add_special_tokens": False}, "input", "list of token ids"),
        ({"input": "text", "add_special_tokens": False}, "add_special_tokens", "special tokens"),
    ],
)
def test_bad_ids_are_refused_by_name(embedder: Running, body: dict[str, Any], param: str, about: str) -> None:
    response = embedder.post("/v1/embeddings", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert about in error["message"]


def test_an_engine_that_does_not_tokenize_refuses_ids() -> None:
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"))) as server:
        response = server.post("/v1/embeddings", {"input": [5], "add_special_tokens": False})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "token_ids")
        assert server.post("/tokenize", {"prompt": "x"}).status_code == 404
        assert server.post("/detokenize", {"tokens": [5]}).status_code == 404


def test_tokens_and_back(embedder: Running) -> None:
    body = embedder.post("/tokenize", {"prompt": "A mill", "return_token_strs": True, "model": "mini"}).json()
    assert body == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [101, 1037, 4971, 102],
        "token_strs": ["[CLS]", "a", "mill", "[SEP]"],
    }
    assert tokens(embedder, prompt="A mill", add_special_tokens=False) == [1037, 4971]
    assert embedder.post("/detokenize", {"tokens": [1037, 4971]}).json() == {"prompt": "a mill"}
    assert len(tokens(embedder, prompt="word " * 900)) == 902


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 1_000_001}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
        ("/detokenize", {"tokens": [30_522]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(embedder: Running, path: str, body: dict[str, Any], param: str) -> None:
    # As bytes: httpx does not write lone surrogates.
    headers = {"Content-Type": "application/json"}
    response = embedder.client.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_chat_has_the_tokens_of_its_template(generator: Running) -> None:
    chat = [{"role": "user", "content": "2+3"}]
    ids = tokens(generator, messages=chat)
    assert generator.post("/detokenize", {"tokens": ids}).json()["prompt"] == "Q: 2+3\nA: "
    whole = generator.post("/v1/chat/completions", {"messages": chat}).json()
    by_ids = generator.post("/v1/completions", {"prompt": ids}).json()
    assert by_ids["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == len(ids)
    assert by_ids["choices"][0]["text"] == whole["choices"][0]["message"]["content"]


def test_completions_take_several_lists_of_ids(generator: Running) -> None:
    texts = ["Q: 2+3\nA: ", "Q: 4+5\nA: "]
    by_text = generator.post("/v1/completions", {"prompt": texts}).json()
    by_ids = generator.post("/v1/completions", {"prompt": [tokens(generator, prompt=text) for text in texts]}).json()
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == by_text["usage"]
    for bad, about in (([[3, 99_999]], "99999"), ([3] * 2000, "2000 tokens")):
        response = generator.post("/v1/completions", {"prompt": bad})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert about in response.json()["error"]["message"]


def test_every_name_of_the_model_is_served(embedder: Running) -> None:
    names = [model["id"] for model in embedder.client.get("/v1/models").json()["data"]]
    assert names == ["mini", "text-embedding-ada-002"]
    for name in names:
        body = embedder.post("/v1/embeddings", {"input": "x", "model": name}).json()
        assert body["model"] == "mini"
        assert embedder.client.get(f"/v1/models/{name}").json()["id"] == name
    refused = embedder.post("/v1/embeddings", {"input": "x", "model": "other"})
    assert refused.status_code == 404
    assert "'mini' and 'text-embedding-ada-002'" in refused.json()["error"]["message"]
    assert embedder.client.get("/v1/models/other").status_code == 404


class OpenAIIds:
    """Stands for tiktoken, whose vocabulary is not part of its package."""

    def get_encoding(self, name: str) -> OpenAIIds:
        assert name == "cl100k_base"
        return self

    def decode(self, ids: list[int]) -> str:
        return " ".join({15339: "hello", 1917: "world"}[one] for one in ids)


def test_ids_for_a_model_of_openai_are_texts_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "text-embedding-ada-002"
    settings = ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine"), name=("m", name))
    with running(settings) as server:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
        refused = server.post("/v1/embeddings", {"input": [[15339, 1917]], "model": name}).json()["error"]
        assert "headrace[tiktoken]" in refused["message"]
        monkeypatch.setitem(sys.modules, "tiktoken", OpenAIIds())
        expected = vectors(server, ["hello world", "world"])
        assert vectors(server, [[15339, 1917], [1917]], model=name) == expected
        assert vectors(server, [1917], model=name) == expected[1:]
        wrong = server.post("/v1/embeddings", {"input": [7], "model": name}).json()["error"]
        assert (wrong["param"], wrong["code"], "7" in wrong["message"]) == ("input", "token_ids", True)
        assert server.post("/v1/embeddings", {"input": [1917], "model": "m"}).status_code == 400
