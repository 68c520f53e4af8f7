"""Prompts by name, and the routes of Text Embeddings Inference, with a small real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tests.integration.serving.running import Running, running
from tests.small_models import text_model

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig

PROMPTS = {"query": "search for: ", "document": ""}
TEXTS = ["a mill", "the canal feeds a wheel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mean-pooled encoder with prompts, whose vectors are not normalized."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    place = tmp_path_factory.mktemp("models")
    encoder = Transformer(str(text_model(place / "encoder", head=False)))
    model = SentenceTransformer(modules=[encoder, Pooling(32)], prompts=PROMPTS, device="cpu")
    model.save(str(place / "prompted"))
    return place / "prompted"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(ServerSettings(EngineConfig("embed", str(folder)))) as server:
        yield server


@pytest.fixture(scope="module")
def reference(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def embed(server: Running, **body: Any) -> np.ndarray[Any, Any]:
    response = server.post("/v1/embeddings", {"input": TEXTS, **body})
    assert response.status_code == 200, response.text
    return np.array([entry["embedding"] for entry in response.json()["data"]])


@pytest.mark.parametrize("name", [None, "query", "document"])
def test_a_prompt_by_name_is_that_of_sentence_transformers(
    server: Running, reference: SentenceTransformer, name: str | None
) -> None:
    expected = reference.encode(TEXTS, prompt_name=name)
    assert np.abs(embed(server, prompt_name=name) - expected).max() < 1e-4
    tei = server.post("/embed", {"inputs": TEXTS, "prompt_name": name}).json()
    normal = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(np.array(tei) - normal).max() < 1e-5


def test_the_prompt_changes_the_vector(server: Running) -> None:
    assert np.abs(embed(server, prompt_name="query") - embed(server)).max() > 0.01


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "prompt_name": "question"}, "prompt_name"),
        ({"input": [5], "add_special_tokens": False, "prompt_name": "query"}, "prompt_name"),
        ({"input": "x", "prompt_name": 5}, "prompt_name"),
    ],
)
def test_an_unknown_prompt_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.post("/v1/embeddings", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_unknown_prompt_names_the_known_ones(server: Running) -> None:
    message = server.post("/v1/embeddings", {"input": "x", "prompt_name": "question"}).json()["error"]["message"]
    assert "'query', 'document'" in message


def test_the_server_has_a_prompt_of_its_own(folder: Path, reference: SentenceTransformer) -> None:
    options = {"prompt": "find ", "normalize": True, "truncate_dim": 16}
    with running(ServerSettings(EngineConfig("embed", str(folder), engine_options=options))) as server:
        expected = reference.encode(TEXTS, prompt="find ", normalize_embeddings=True, truncate_dim=16)
        assert np.abs(embed(server) - expected).max() < 1e-5


@pytest.mark.parametrize("path", ["/embed", "/"])
def test_the_route_of_text_embeddings_inference(server: Running, path: str) -> None:
    [one] = server.post(path, {"inputs": TEXTS[0]}).json()
    both = server.post(path, {"inputs": TEXTS, "truncate": True, "normalize": True}).json()
    assert np.abs(np.array(both[0]) - one).max() < 1e-5
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": ["word " * 900]}, "inputs"),
        ({"inputs": "x", "dimensions": 16}, "dimensions"),
        ({"inputs": "x", "truncation_direction": "left"}, "truncation_direction"),
        ({"inputs": []}, "inputs"),
    ],
)
def test_what_it_cannot_obey_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.post("/embed", body)
    assert response.status_code in (413, 422)
    assert param in response.json()["error"]


def test_a_long_text_is_cut_if_asked(server: Running) -> None:
    response = server.post("/embed", {"inputs": "word " * 900, "truncate": True})
    assert response.headers["x-truncated-inputs"] == "1"


def test_a_job_has_prompts_too(folder: Path, reference: SentenceTransformer, tmp_path: Path) -> None:
    import headrace

    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    out = tmp_path / "out.jsonl"
    headrace.run(rows, str(folder), sink=out, task="embed", prompt_name="query", progress=False)
    found = [json.loads(line)["embedding"] for line in out.read_text().splitlines()]
    assert np.abs(np.array(found) - reference.encode(TEXTS, prompt_name="query")).max() < 1e-4


@pytest.mark.parametrize(
    ("options", "about"),
    [({"prompt_name": "question"}, "query"), ({"prompt_name": "query", "prompt": "x"}, "only one of them")],
)
def test_a_wrong_prompt_is_refused_when_the_model_is_loaded(folder: Path, options: dict[str, str], about: str) -> None:
    from headrace.engines.choosing.registry import create
    from headrace.errors import ConfigError

    with pytest.raises(ConfigError, match=about):
        create("embed", str(folder), **options)


def test_a_prompt_outside_the_pooling_is_the_same_for_all_texts(folder: Path, tmp_path: Path) -> None:
    import shutil

    from headrace.engines.choosing.registry import create

    shutil.copytree(folder, tmp_path / "instructor")
    config = tmp_path / "instructor" / "1_Pooling" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "include_prompt": False}))
    reference = SentenceTransformer(str(tmp_path / "instructor"), device="cpu")
    engine = create("embed", str(tmp_path / "instructor"), prompt_name="query")
    assert engine.profile.prompt_names == ()
    payloads = [one.payload for one in engine.prepare(TEXTS)]
    assert np.abs(np.array(engine.forward(payloads)) - reference.encode(TEXTS, prompt_name="query")).max() < 1e-4
    engine.close()


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "document"}, "document"),
        ({"input_type": "query", "prompt_name": "query"}, "query"),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "retrieval.passage"}, "document"),
        ({"task": None, "input_type": None}, None),
    ],
)
def test_input_type_and_task_are_the_models_prompts(
    server: Running, reference: SentenceTransformer, body: dict[str, Any], name: str | None
) -> None:
    expected = reference.encode(TEXTS, prompt_name=name)
    assert np.abs(embed(server, **body) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input_type": "search_query"}, "input_type", "'query', 'document'"),
        ({"task": "text-matching"}, "task", "'query', 'document'"),
        ({"task": "retrieval.query", "input_type": "query"}, "task", "differ"),
        ({"input_type": "query", "prompt_name": "document"}, "input_type", "give one"),
        ({"late_chunking": True}, "late_chunking", "False"),
        ({"normalized": False}, "normalized", "True"),
        ({"dimensions": 2, "output_dimension": 3}, "output_dimension", "differ"),
        ({"output_dimension": 7}, "dimensions", "dimensions is 7"),
        ({"encoding_format": "base64", "embedding_type": "float"}, "embedding_type", "differ"),
        ({"output_dtype": "int8", "embedding_type": "binary"}, "embedding_type", "differ"),
        ({"truncate": True, "truncation": False}, "truncation", "differ"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(
    server: Running, body: dict[str, Any], param: str, words: str
) -> None:
    answer = server.post("/v1/embeddings", {"input": TEXTS, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_fields_of_voyage_and_jina_mean_what_openais_do(server: Running) -> None:
    plain = embed(server)
    same = {"output_dimension": 32, "output_dtype": "float", "truncation": True, "late_chunking": False}
    assert np.array_equal(embed(server, **same, embedding_type="float"), plain)
    held = [{"text": text} for text in TEXTS]
    assert np.array_equal(embed(server, input=held, encoding_type="float", return_multivector=False), plain)
    normal = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.abs(embed(server, normalized=True) - normal).max() < 1e-5
    assert np.array_equal(embed(server, embedding_type="binary"), embed(server, output_dtype="binary"))
    encoded = [
        server.post("/v1/embeddings", {"input": TEXTS, **body}).json()["data"]
        for body in ({"embedding_type": "base64"}, {"encoding_format": "base64"})
    ]
    assert encoded[0] == encoded[1]
    assert isinstance(encoded[0][0]["embedding"], str)
    long = server.post("/v1/embeddings", {"input": "mill " * 5_000, "truncation": False})
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "too_long"
