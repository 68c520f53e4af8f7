"""Batches of scores, rankings and labels, with small real models: the answers are those over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_batches import begin, ended, rows_of
from tests.small_models import text_model

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig

DOCUMENTS = ["a mill on the canal", "nothing", "water " * 400]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = text_model(tmp_path_factory.mktemp("pairs"), ("relevance",))
    config = EngineConfig("score", str(folder))
    with running(ServerSettings(config, name="ranker", state=tmp_path_factory.mktemp("state"))) as server:
        yield server


@pytest.fixture(scope="module")
def labeler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = text_model(tmp_path_factory.mktemp("labels"))
    config = EngineConfig("classify", str(folder))
    with running(ServerSettings(config, name="labels", state=tmp_path_factory.mktemp("state"))) as server:
        yield server


def line(identity: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": identity, "method": "POST", "url": url, "body": body}


def numbers(value: Any) -> Any:
    """The value without what differs between two answers, its numbers rounded."""
    if isinstance(value, dict):
        return {name: numbers(inner) for name, inner in value.items() if name not in ("id", "created")}
    if isinstance(value, list):
        return [numbers(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def check(server: Running, url: str, bodies: list[dict[str, Any]]) -> None:
    done = ended(server, begin(server, [line(str(n), url, body) for n, body in enumerate(bodies)], url))
    assert done["status"] == "completed"
    assert done["error_file_id"] is None, rows_of(server, done["error_file_id"])
    answers = {row["custom_id"]: row["response"]["body"] for row in rows_of(server, done["output_file_id"])}
    for number, body in enumerate(bodies):
        expected = server.post(url, body)
        assert expected.status_code == 200, expected.text
        assert numbers(answers[str(number)]) == numbers(expected.json())
        assert ("created" in answers[str(number)]) == ("created" in expected.json())


def test_scores(scorer: Running) -> None:
    bodies = [{"text_1": "canal", "text_2": text} for text in ("a mill", DOCUMENTS)]
    check(scorer, "/v1/score", [*bodies, {"text_1": DOCUMENTS, "text_2": DOCUMENTS, "model": "ranker"}])


def test_rankings(scorer: Running) -> None:
    whole = {"query": "canal", "documents": DOCUMENTS}
    check(scorer, "/v1/rerank", [whole, {**whole, "top_n": 1, "return_documents": False}])


def test_labels(labeler: Running) -> None:
    check(labeler, "/classify", [{"input": "a mill"}, {"input": DOCUMENTS}])


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "colour": 1}, "colour"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "timeout": 5}, "timeout"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "texts": ["b"]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": DOCUMENTS, "truncate": False}, "documents"),
    ],
)
def test_a_wrong_body_fails_its_line_alone(scorer: Running, url: str, body: dict[str, Any], param: str) -> None:
    good = {"text_1": "a", "text_2": "b"} if url == "/v1/score" else {"query": "a", "documents": ["b"]}
    done = ended(scorer, begin(scorer, [line("good", url, good), line("bad", url, body)], url))
    assert [row["custom_id"] for row in rows_of(scorer, done["output_file_id"])] == ["good"]
    [row] = rows_of(scorer, done["error_file_id"])
    assert (row["custom_id"], row["error"]["param"]) == ("bad", param)


def test_endpoints_of_other_tasks_are_refused(scorer: Running, labeler: Running) -> None:
    for server, url in ((scorer, "/classify"), (labeler, "/v1/score"), (scorer, "/v1/embeddings")):
        body = {"input_file_id": f"file-{'0' * 32}", "endpoint": url}
        response = server.post("/v1/batches", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "endpoint")


@pytest.mark.parametrize("url", ["/v1/score", "/v1/rerank", "/classify"])
def test_a_job_names_the_way_out(tmp_path: Path, url: str) -> None:
    import json

    import headrace
    from headrace.errors import ConfigError

    source = tmp_path / "requests.jsonl"
    source.write_text(json.dumps(line("1", url, {"input": "a"})) + "\n")
    with pytest.raises(ConfigError, match="--state-dir"):
        headrace.run(source, sink=tmp_path / "out.jsonl")
