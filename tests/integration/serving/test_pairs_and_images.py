"""Routes of cross-encoders, zero-shot classifiers and models of images, with small real models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.small_models import NLI, encoded, picture, text_model, vision_model

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.serving.auth import read_keys
from headrace.serving.limits import ServeLimits

TEXTS = ["a mill on the canal", "nothing", "the wheel turns"]
LONG = "water " * 400


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = text_model(tmp_path_factory.mktemp("pairs"), ("relevance",))
    with running(ServerSettings(EngineConfig("score", str(folder)), name="ranker")) as server:
        yield server, folder


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = vision_model(tmp_path_factory.mktemp("vit"))
    limits = ServeLimits(max_prompts=8, max_body_bytes=6_000_000)
    config = EngineConfig("image-classify", str(folder), engine_options={"top_labels": 2})
    with running(ServerSettings(config, name="seer", limits=limits)) as server:
        yield server


def expected_scores(folder: Path, query: str) -> list[float]:
    engine: Any = create("score", folder)
    try:
        return [engine.forward([entry.payload])[0] for entry in engine.prepare([(query, text) for text in TEXTS])]
    finally:
        engine.close()


def data_url(seed: int, width: int = 40) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(picture(width, seed=seed))).decode()


def error(answer: Any) -> tuple[int, str, str | None]:
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_many(pairs: tuple[Running, Path], path: str) -> None:
    server, folder = pairs
    answer = server.post(path, {"model": "ranker", "text_1": "canal", "text_2": TEXTS}).json()
    assert (answer["object"], answer["model"]) == ("list", "ranker")
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected_scores(folder, "canal"), abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 9
    one = server.post(path, {"text_1": ["canal"], "text_2": [TEXTS[0]]}).json()["data"]
    assert [item["score"] for item in one] == pytest.approx([answer["data"][0]["score"]], abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_the_best_first(pairs: tuple[Running, Path], path: str) -> None:
    server, folder = pairs
    scores = expected_scores(folder, "canal")
    order = sorted(range(3), key=lambda place: -scores[place])
    answer = server.post(path, {"query": "canal", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}).json()
    assert [one["index"] for one in answer["results"]] == order
    assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[place] for place in order]
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == pytest.approx([scores[place] for place in order], abs=1e-5)
    short = server.post(path, {"query": "canal", "documents": TEXTS, "top_n": 1, "return_documents": False}).json()
    assert [sorted(one) for one in short["results"]] == [["index", "relevance_score"]]
    assert short["results"][0]["index"] == order[0]


def test_texts_are_ranked_as_text_embeddings_inference_does(pairs: tuple[Running, Path]) -> None:
    server, folder = pairs
    scores = expected_scores(folder, "canal")
    order = sorted(range(3), key=lambda place: -scores[place])
    body = {"query": "canal", "texts": TEXTS, "raw_scores": False}
    answer = server.post("/rerank", body).json()
    assert [sorted(one) for one in answer] == [["index", "score"]] * 3
    assert [one["index"] for one in answer] == order
    assert [one["score"] for one in answer] == pytest.approx([scores[place] for place in order], abs=1e-5)
    named = server.post("/rerank", {**body, "return_text": True}).json()
    assert [one["text"] for one in named] == [TEXTS[place] for place in order]
    refused = server.post("/rerank", {"query": "canal", "texts": [LONG]})
    assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
    assert "texts" in refused.json()["error"]
    assert server.post("/rerank", {"query": "canal", "texts": [LONG], "truncate": True}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "documents"),
        ({"texts": ["a"], "documents": ["a"]}, 400, "texts"),
        ({"texts": ["a"], "top_n": 1}, 422, "top_n"),
        ({"documents": ["a"], "return_text": True}, 400, "return_text"),
        ({"texts": ["a"], "raw_scores": True}, 422, "raw_scores"),
    ],
)
def test_fields_of_two_apis_are_refused(
    pairs: tuple[Running, Path], fields: dict[str, Any], status: int, param: str
) -> None:
    response = pairs[0].post("/rerank", {"query": "canal", **fields})
    assert response.status_code == status
    assert param in response.text


def test_pairs_that_were_cut_are_marked(pairs: tuple[Running, Path]) -> None:
    server, _ = pairs
    answer = server.post("/v1/score", {"text_1": "canal", "text_2": ["short", LONG]})
    assert [one.get("truncated") for one in answer.json()["data"]] == [None, True]
    assert answer.headers["X-Truncated-Inputs"] == "1"
    assert answer.json()["usage"]["truncated_inputs"] == 1
    refused = server.post("/v1/rerank", {"query": "canal", "documents": [LONG], "truncate": False})
    assert error(refused) == (400, "too_long", "documents")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text 1 of text_2 is empty"),
        ("/v1/score", {"text_1": ["a", "b", ""], "text_2": ["a", "b", "c"]}, "text 2 of text_1 is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c", ""]}, "text 2 of documents is empty"),
    ],
)
def test_an_empty_text_is_named_by_its_number(
    pairs: tuple[Running, Path], path: str, body: dict[str, Any], said: str
) -> None:
    assert pairs[0].post(path, body).json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, (400, "bad_length", "text_2")),
        ("/v1/score", {"text_1": "a", "text_2": []}, (400, "empty", "text_2")),
        ("/v1/score", {"text_1": "", "text_2": "b"}, (400, "empty", "text_1")),
        ("/v1/score", {"text_1": "a", "text_2": 3}, (400, "not_text", "text_2")),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, (400, "empty", "query")),
        ("/v1/rerank", {"query": "a", "documents": []}, (400, "empty", "documents")),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, (400, "greater_than_equal", "top_n")),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "colour": 1}, (400, "unknown_field", "colour")),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "x"}, (404, "model_not_found", "model")),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 3_000}, (400, "too_many", "documents")),
        ("/v1/score", {"text1": "a", "text_2": "b"}, (400, "missing", "text_1")),
        ("/generate", {"prompts": ["a"]}, (404, "not_found", None)),
        ("/v1/embeddings", {"input": ["a"]}, (404, "not_found", None)),
    ],
)
def test_what_is_no_pair_is_refused(
    pairs: tuple[Running, Path], path: str, body: dict[str, Any], found: tuple[int, str, str | None]
) -> None:
    assert error(pairs[0].post(path, body)) == found


def test_zero_shot_answers_by_the_labels_given(tmp_path: Path) -> None:
    folder = text_model(tmp_path, NLI)
    config = EngineConfig("zero-shot", str(folder), engine_options={"labels": ["sports", "politics"]})
    with running(ServerSettings(config)) as server:
        data = server.post("/classify", {"input": TEXTS}).json()["data"]
    assert [sorted(one["labels"]) for one in data] == [["politics", "sports"]] * 3


def test_images_are_classified_however_they_are_written(labels: Running) -> None:
    plain = data_url(1).partition(",")[2]
    data = labels.post("/classify", {"input": [data_url(1), plain, {"image": data_url(1)}, data_url(2)]}).json()["data"]
    assert [one["index"] for one in data] == [0, 1, 2, 3]
    assert data[0]["label"] in ("canal", "mill", "wheel")
    assert len(data[0]["labels"]) == 2
    assert [one["score"] for one in data[1:3]] == pytest.approx([data[0]["score"]] * 2, abs=1e-5)
    assert data[3]["score"] != pytest.approx(data[0]["score"], abs=1e-5)
    alone = labels.post("/classify", {"input": data_url(2)}).json()["data"]
    assert alone[0]["score"] == pytest.approx(data[3]["score"], abs=1e-5)


def test_a_photo_is_larger_than_the_body_of_a_text(labels: Running) -> None:
    photo = base64.b64encode(encoded(picture(1_300, 1_000), "BMP")).decode()
    assert len(photo) > 4 * 1024 * 1024
    assert labels.post("/classify", {"input": photo}).status_code == 200
    assert labels.post("/classify", {"input": photo * 2}).status_code == 413


@pytest.mark.parametrize("given", ["/etc/hostname", "https://example.com/a.png", "data:image/png,abc", "", "data:x"])
def test_no_file_and_no_address_is_opened_for_a_client(labels: Running, given: str) -> None:
    assert error(labels.post("/classify", {"input": [data_url(1), given]})) == (400, "invalid_image", "input")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"input": base64.b64encode(b"no image").decode()}, (400, "invalid_value", "input")),
        ({"input": []}, (400, "empty", "input")),
        ({"input": [data_url(1)] * 9}, (400, "too_many", "input")),
        ({"input": [data_url(1)], "truncate": True}, (400, "unknown_field", "truncate")),
    ],
)
def test_what_is_no_image_is_refused(labels: Running, body: Any, found: tuple[int, str, str | None]) -> None:
    assert error(labels.post("/classify", body)) == found
    assert labels.post("/generate", {"prompts": ["/etc/hostname"]}).status_code == 404


def test_images_have_vectors_for_the_openai_client(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    folder = vision_model(tmp_path, "clip")
    config = EngineConfig("image-embed", str(folder))
    with running(ServerSettings(config, name="clip", keys=read_keys(None, "k1"))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k1")
        vectors = client.embeddings.create(model="clip", input=[data_url(1), data_url(2)]).data
        assert [len(one.embedding) for one in vectors] == [24, 24]
        assert vectors[0].embedding != vectors[1].embedding
        assert server.post("/v1/embeddings", {"input": data_url(1)}).status_code == 401
        metrics = server.client.get("/metrics", headers={"X-API-Key": "k1"}).text
    assert 'headrace_requests_total{route="/v1/embeddings",status="200"} 1.0' in metrics


@pytest.mark.parametrize(
    "fields",
    [
        {"max_chunk_per_doc": 1},
        {"max_chunk_per_doc": 10, "overlap_tokens": 80},
        {"max_chunks_per_doc": 10},
        {"max_tokens_per_doc": 4096},
        {"priority": 3},
        {"truncation": True},
        {"return_documents": True, "top_n": None},
    ],
)
def test_fields_of_other_rankers_that_change_nothing_are_taken(
    pairs: tuple[Running, Path], fields: dict[str, Any]
) -> None:
    server, _ = pairs
    body = {"query": "canal", "documents": [*TEXTS, LONG]}
    plain, given = (server.post("/v1/rerank", {**body, **more}).json() for more in ({}, fields))
    results = given["data" if "truncation" in fields else "results"]  # as Voyage has it, or the others
    assert results == plain["results"]
    assert [one.get("truncated") for one in results].count(True) == 1  # what is cut is told


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_chunk_per_doc": 0}, "max_chunk_per_doc"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"top_n": 1, "top_k": 2}, "top_k"),
    ],
)
def test_fields_that_change_a_ranking_are_refused(
    pairs: tuple[Running, Path], fields: dict[str, Any], param: str
) -> None:
    server, _ = pairs
    answer = server.post("/v1/rerank", {"query": "canal", "documents": TEXTS, **fields})
    assert error(answer)[::2] == (400, param)
    cut = server.post("/v1/rerank", {"query": "canal", "documents": [LONG], "truncation": False})
    assert error(cut)[1] == "too_long"
    best = server.post("/v1/rerank", {"query": "canal", "documents": TEXTS, "top_k": 1}).json()["data"]
    assert len(best) == 1


def test_a_limit_on_chunks_is_refused_where_documents_are_split(tmp_path: Path) -> None:
    folder = text_model(tmp_path, ("relevance",))
    config = EngineConfig("score", str(folder), engine_options={"on_too_long": "split"})
    with running(ServerSettings(config, name="ranker")) as server:
        for name in ("max_chunk_per_doc", "max_chunks_per_doc", "overlap_tokens"):
            answer = server.post("/v1/rerank", {"query": "canal", "documents": [LONG], name: 2})
            assert error(answer)[::2] == (400, name)
