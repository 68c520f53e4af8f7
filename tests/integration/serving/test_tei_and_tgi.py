"""The routes of Text Embeddings Inference and Text Generation Inference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.serving.running import Running, running
from tests.settings import server_settings
from tests.small_models import text_model

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.errors import ApiError
from headrace.serving.routes import tei, tgi
from headrace.testing import FakeEngine

TEXTS = ["a mill", "a canal", "a b"]


class Sparse(FakeEngine):
    """Sparse vectors: the lengths of a text's words."""

    def forward(self, batch: Any) -> Any:
        return [
            {"indices": np.arange(len(row), dtype=np.int32), "values": np.asarray(row, np.float32)}
            for row in super().forward(batch)
        ]


class Matrices(FakeEngine):
    """Two vectors for each text."""

    def forward(self, batch: Any) -> Any:
        return [np.asarray([row, row], np.float32) for row in super().forward(batch)]


def served(task: str, engine: str | None = None, **options: Any) -> Any:
    return running(ServerSettings(EngineConfig(task, engine=engine, **options), name="m"))


@pytest.fixture(scope="module")
def embed() -> Iterator[Running]:
    with running(server_settings(task="embed")) as server:
        yield server


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with served("generate", "tests.integration.serving.engines:Talker") as server:
        yield server


def unit(text: str, server: Running) -> Any:
    vector = np.array(server.post("/v1/embeddings", {"input": text}).json()["data"][0]["embedding"])
    return vector / np.linalg.norm(vector)


def test_vectors_and_similarities(embed: Running) -> None:
    expected = [unit(text, embed) for text in TEXTS]
    for path in ("/embed", "/"):
        found = embed.post(path, {"inputs": TEXTS, "truncate": None, "truncation_direction": "Right"}).json()
        np.testing.assert_allclose(found, expected, atol=1e-5)
    raw = embed.post("/embed", {"inputs": TEXTS[0], "normalize": False}).json()[0]
    own = embed.post("/v1/embeddings", {"input": TEXTS[0]}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(raw, own, rtol=1e-5)
    compared = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}, "parameters": {"truncate": True}}
    for path in ("/similarity", "/"):
        found = embed.post(path, compared).json()
        np.testing.assert_allclose(found, [expected[0] @ one for one in expected], atol=1e-5)


def test_sparse_vectors_and_vectors_of_tokens() -> None:
    row = FakeEngine().vector("a mill")
    with served("sparse-embed", f"{__name__}:Sparse") as server:
        for path in ("/embed_sparse", "/"):
            [found] = server.post(path, {"inputs": "a mill"}).json()
            assert [one["index"] for one in found] == list(range(8))
            np.testing.assert_allclose([one["value"] for one in found], row, rtol=1e-6)
    with served("multi-vector-embed", f"{__name__}:Matrices") as server:
        found = server.post("/embed_all", {"inputs": ["a mill", "b"]}).json()
        np.testing.assert_allclose(found[0], [row, row], rtol=1e-6)


def test_labels_of_texts_and_pairs(tmp_path: Path) -> None:
    options = {"top_labels": 2}
    folder = str(text_model(tmp_path))
    with running(ServerSettings(EngineConfig("classify", folder, engine_options=options), name="m")) as server:
        both = server.post("/predict", {"inputs": [["a mill"], ["a", "canal"]]}).json()
        for inputs, expected in (("a mill", both[0]), (["a", "canal"], both[1])):
            found = server.post("/predict", {"inputs": inputs}).json()
            assert [one["label"] for one in found] == [one["label"] for one in expected]
            assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-5)
        assert sorted(one["label"] for one in both[0]) == ["no", "yes"]
        assert both[0][0]["score"] >= both[0][1]["score"]
        asked = {"inputs": "a mill", "parameters": {"top_k": 1, "function_to_apply": None}}
        [[only]] = server.post("/", asked).json()
        assert only["label"] == both[0][0]["label"]
        refused = server.post("/predict", {"inputs": [["a", "b"], ["a", ""]]})
        assert refused.json()["error"] == "text 1 of inputs is empty"
        several: list[Any] = [["a", "b", "c"], [["a", "b", "c"]], [], 5, [[]]]
        for wrong in several:
            refused = server.post("/predict", {"inputs": wrong})
            assert refused.status_code in (413, 422)
            assert "inputs" in refused.json()["error"], refused.text


def test_rankings_at_the_root(tmp_path: Path) -> None:
    with running(ServerSettings(EngineConfig("score", str(text_model(tmp_path, ("x",)))), name="m")) as server:
        body = {"query": "canal", "texts": TEXTS}
        assert server.post("/", body).json() == server.post("/rerank", body).json()
        assert server.client.get("/info").json()["model_type"] == {"reranker": {}}
        strange = {"query": "documents", "documents": ["texts", "b"]}  # names of fields as values
        assert "results" in server.post("/rerank", strange).json()


def test_tokens_there_and_back(embed: Running) -> None:
    [found] = embed.post("/tokenize", {"inputs": "a mill"}).json()
    assert [one["special"] for one in found] == [True, False, False, True]
    assert [(one["text"], one["start"], one["stop"]) for one in found[1:3]] == [("a", 0, 1), ("mill", 2, 6)]
    assert (found[0]["text"], found[0]["start"], found[0]["stop"]) == ("[CLS]", None, None)
    ids = [one["id"] for one in found]
    assert ids == embed.post("/tokenize", {"prompt": "a mill"}).json()["tokens"], "as vLLM has the same path"
    assert embed.post("/decode", {"ids": ids}).json() == ["a mill"]
    whole = embed.post("/decode", {"ids": [ids, ids], "skip_special_tokens": False}).json()
    assert whole == ["[CLS] a mill [SEP]"] * 2
    plain = embed.post("/tokenize", {"inputs": ["a mill"], "add_special_tokens": False}).json()
    assert [one["id"] for one in plain[0]] == ids[1:-1]
    assert "ids" in embed.post("/decode", {"ids": [1 << 40]}).json()["error"]


def test_what_the_server_is(embed: Running, talker: Running) -> None:
    info = embed.client.get("/info").json()
    assert (info["model_id"], info["max_input_length"]) == (embed.host.service.name, embed.host.service.longest)
    assert talker.client.get("/info").json()["model_pipeline_tag"] == "text-generation"


def test_a_generated_text(talker: Running) -> None:
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 2, "details": True, "stop": [], "seed": None}}
    details = {"finish_reason": "eos_token", "generated_tokens": 2, "seed": None, "prefill": [], "tokens": []}
    whole = {"generated_text": "one two", "details": details}
    assert talker.post("/generate", body).json() == whole
    assert talker.post("/", body).json() == [whole]
    full = {**body, "parameters": {"return_full_text": True}}
    assert talker.post("/generate", full).json() == {"generated_text": "one two three" * 2}
    assert talker.post("/generate", {"prompts": ["a b"]}).json()["results"] == ["a b"], "Headrace's own"


def test_a_text_in_pieces(talker: Running) -> None:
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}
    for path, asked in (("/generate_stream", body), ("/", {**body, "stream": True})):
        response = talker.post(path, asked)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[5:]) for line in response.text.split("\n\n") if line]
        assert "".join(one["token"]["text"] for one in events) == "one two three"
        assert [one["index"] for one in events] == list(range(1, len(events) + 1))
        assert events[-1]["generated_text"] == "one two three"
        assert events[-1]["details"]["generated_tokens"] == 3


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"watermark": True}, "watermark"),
        ({"decoder_input_details": True}, "decoder_input_details"),
        ({"colour": 1}, "colour"),
        ({"temperature": 0}, "temperature"),
        ({"grammar": {"type": "json", "value": {}}}, "response_format"),
        ({"grammar": {"type": "regex", "value": "a"}}, "structured_outputs"),
        ({"temperature": 101}, "temperature"),
    ],
)
def test_a_parameter_that_cannot_be_obeyed_is_named(talker: Running, parameters: Any, field: str) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        response = talker.post(path, {"inputs": "a", "parameters": parameters})
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")
        assert field in response.json()["error"]


def test_a_timeout_is_no_mistake_of_the_request() -> None:
    """Hugging Face's client goes by the type of the error."""
    late = ApiError(408, "the request timed out", code="deadline_exceeded")
    assert tgi.errors(late) == (408, {"error": "the request timed out", "error_type": "generation"})
    assert tei.errors(late) == (408, {"error": "the request timed out", "error_type": "Backend"})


@pytest.mark.parametrize("name", ["tgi", "dummy", "http://127.0.0.1:8000"])
def test_the_names_that_their_clients_send(talker: Running, name: str) -> None:
    chat = {"model": name, "messages": [{"role": "user", "content": "a"}]}
    assert talker.post("/v1/chat/completions", chat).json()["model"] == "m"
    refused = talker.post("/v1/chat/completions", {**chat, "model": "x"}).json()["error"]["message"]
    assert "--served-model-name '*'" in refused


def test_any_name() -> None:
    engine = EngineConfig("generate", engine="tests.integration.serving.engines:Talker")
    for names, answered in ((("*", "first"), "first"), ("*", "arithmetic")):
        with running(ServerSettings(engine, name=names)) as server:
            chat = {"model": "whatever", "messages": [{"role": "user", "content": "a"}]}
            assert server.post("/v1/chat/completions", chat).json()["model"] == answered
            assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == [answered]
