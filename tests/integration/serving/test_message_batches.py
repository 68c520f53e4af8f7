"""Anthropic's Message Batches on the server's batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.limits import KeySettings

PATH, CHATS = "/v1/messages/batches", "/v1/chat/completions"
CHAT = {"role": "user", "content": "What is 2 plus 3?"}
PARAMS: dict[str, Any] = {"model": "arithmetic", "max_tokens": 64, "messages": [CHAT]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = [KeySettings(name, hashlib.sha256(name.encode()).digest()) for name in ("one", "other")]
    settings = ServerSettings(EngineConfig("generate"), state=tmp_path_factory.mktemp("state"), keys=keys)
    with running(settings) as found:
        found.client.headers["x-api-key"] = "one"
        yield found


def entries(*names: str, **params: Any) -> list[dict[str, Any]]:
    return [{"custom_id": name, "params": {**PARAMS, **params}} for name in names]


def created(server: Running, requests: list[dict[str, Any]]) -> dict[str, Any]:
    response = server.post(PATH, {"requests": requests})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ended(server: Running, batch: dict[str, Any]) -> dict[str, Any]:
    def now() -> dict[str, Any]:
        return dict(server.client.get(f"{PATH}/{batch['id']}").json())

    until(lambda: now()["processing_status"] == "ended")
    return now()


def results(server: Running, batch: dict[str, Any]) -> dict[str, Any]:
    lines = server.client.get(f"{PATH}/{batch['id']}/results").text.splitlines()
    return {row["custom_id"]: row["result"] for row in map(json.loads, lines)}


def test_the_answers_are_those_of_messages(server: Running) -> None:
    alone = server.post("/v1/messages", PARAMS).json()
    batch = created(server, [*entries("a", "b"), *entries("long", messages=[{**CHAT, "content": "1+1=" * 900}])])
    assert batch["id"].startswith("msgbatch_")
    assert (batch["request_counts"]["processing"], batch["results_url"]) == (3, None)
    found = ended(server, batch)
    assert found["request_counts"] == {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0}
    assert found["ended_at"] >= found["created_at"]
    said = results(server, batch)
    for name in ("a", "b"):
        assert {**said[name]["message"], "id": "", "usage": 0} == {**alone, "id": "", "usage": 0}
    assert said["a"]["message"]["usage"]["output_tokens"] == alone["usage"]["output_tokens"]
    assert said["long"]["error"]["error"]["type"] == "invalid_request_error"


def test_the_results_of_a_batch_are_below_the_path_of_a_proxy(server: Running) -> None:
    batch = ended(server, created(server, entries("a")))
    path = f"{PATH}/{batch['id']}"
    assert batch["results_url"] == f"{server.url}{path}/results"
    for before in ("/llm", "/llm/"):
        behind = server.client.get(path, headers={"x-forwarded-prefix": before}).json()
        assert behind["results_url"] == f"{server.url}/llm{path}/results"


def test_batches_are_listed_in_pages(server: Running) -> None:
    made = [created(server, entries("a"))["id"] for _ in range(3)]
    for one in made:
        ended(server, {"id": one})

    def page(**asked: Any) -> tuple[list[str], bool]:
        found = server.client.get(PATH, params=asked).json()
        return [one["id"] for one in found["data"]], found["has_more"]

    newest = page(limit=100)[0]
    assert set(made) <= set(newest)  # those of one second are in any order
    assert page(limit=100, beta="true")[0] == newest
    assert page(limit=1) == (newest[:1], True)
    assert page(limit=1, after_id=newest[0]) == (newest[1:2], True)
    assert page(limit=1, before_id=newest[2]) == (newest[1:2], True)
    assert page(limit=2, before_id=newest[2]) == (newest[:2], False)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("after_id=nope", 404, "after_id is 'nope'"),
        ("before_id=", 404, "before_id is ''"),
        ("foo=1", 400, "'foo'"),
        ("limit=0", 400, "limit is '0'"),
        ("after_id={0}&before_id={0}", 400, "after_id and before_id"),
    ],
)
def test_a_query_that_is_not_valid_is_refused(server: Running, query: str, status: int, words: str) -> None:
    batch = created(server, entries("a"))
    ended(server, batch)
    refused = server.client.get(f"{PATH}?{query.format(batch['id'])}")
    assert (refused.status_code, refused.json()["type"]) == (status, "error")
    assert words in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["msgbatch_nope", "nope"])
def test_a_batch_that_is_not_there_is_named_as_it_was_asked_for(server: Running, name: str) -> None:
    refused = server.client.get(f"{PATH}/{name}")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        404,
        f"batch_id: there is no batch '{name}' of chats",
    )


def test_requests_without_an_answer_are_canceled(server: Running) -> None:
    batch = created(server, entries(*(f"r{n}" for n in range(400)), max_tokens=4000))
    canceled = server.client.post(f"{PATH}/{batch['id']}/cancel").json()
    assert canceled["cancel_initiated_at"] is not None
    early = server.client.get(f"{PATH}/{batch['id']}/results")
    assert early.status_code in (200, 404)
    counts = ended(server, batch)["request_counts"]
    said = results(server, batch)
    kinds = [one["type"] for one in said.values()]
    assert len(said) == 400
    assert kinds.count("canceled") == counts["canceled"] > 0


def test_a_batch_that_fails_tells_why_in_each_result(server: Running) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": CHATS, "body": {**PARAMS, "model": name}}
        for name in ("arithmetic", "other")
    ]
    file = server.client.post(
        "/v1/files", files={"file": ("b.jsonl", "\n".join(map(json.dumps, lines)))}, data={"purpose": "batch"}
    ).json()
    made = server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": CHATS}).json()
    batch = {"id": f"msg{made['id']}"}
    ended(server, batch)
    found = results(server, batch)
    assert set(found) == {"arithmetic", "other"}
    for result in found.values():
        assert (
            "'other'; this server serves 'arithmetic' (--served-model-name adds" in result["error"]["error"]["message"]
        )


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests"),
        (entries("a", "a"), "requests.1.custom_id"),
        (entries("no spaces"), "custom_id"),
        ([{"custom_id": "a", "params": {"model": "arithmetic"}}], "requests.0.params"),
        (entries("a", colour="red"), "colour"),
        (entries("a", thinking={"type": "enabled"}), "requests.0.params.thinking is"),
        (entries("a") + entries("b", model="other"), "requests.1.params.model: there is no model 'other'; this server"),
        (entries("a") + entries("b", stream=True), "requests.1.params.stream is true"),
        (entries("a", system="Be brief.", messages=[{**CHAT, "role": "robot"}]), "params.messages.0.role is 'robot'"),
        (entries("a", messages=[CHAT, {"role": "user"}]), "requests.0.params.messages.1.content is empty"),
        (entries("a") + entries("b", messages=[]), "requests.1.params.messages: List"),
    ],
)
def test_what_is_not_valid_is_refused(server: Running, requests: list[Any], words: str) -> None:
    response = server.post(PATH, {"requests": requests})
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    message = response.json()["error"]["message"]
    assert words in message
    assert message.count("params") <= 1


def test_the_batches_of_another_key_are_not_found(server: Running) -> None:
    batch = created(server, entries("a"))
    ended(server, batch)
    for path in (f"{PATH}/{batch['id']}", f"{PATH}/{batch['id']}/results", f"{PATH}/msgbatch_1"):
        refused = server.client.get(path, headers={"x-api-key": "other"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    assert server.client.get(PATH, headers={"x-api-key": "other"}).json()["data"] == []


def test_a_server_without_a_folder_says_what_is_missing(tmp_path: Path) -> None:
    with running(ServerSettings(EngineConfig("generate"))) as found:
        response = found.post(PATH, {"requests": entries("a")})
    assert (response.status_code, response.json()["type"]) == (404, "error")
    assert "--state-dir" in response.json()["error"]["message"]
