"""Answers of the Responses API that later requests continue."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving import response_store
from headrace.serving.limits import KeySettings

PATH = "/v1/responses"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    engine = EngineConfig("generate", engine="tests.integration.serving.engines:Reciter")
    keys = [KeySettings(name, hashlib.sha256(name.encode()).digest()) for name in ("one", "other")]
    with running(ServerSettings(engine, name="m", state=tmp_path, keys=keys)) as found:
        found.client.headers["authorization"] = "Bearer one"
        yield found


def asked(server: Running, said: str, **more: Any) -> dict[str, Any]:
    response = server.post(PATH, {"model": "m", "input": said, **more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_an_answer_is_continued(server: Running) -> None:
    first = asked(server, "a", instructions="i")
    assert (text(first), first["store"]) == ("i a", True)
    second = asked(server, "b", previous_response_id=first["id"])  # instructions are those of each request
    assert (text(second), second["previous_response_id"]) == ("a i a b", first["id"])
    streamed = server.post(PATH, {"model": "m", "input": "c", "previous_response_id": second["id"], "stream": True})
    identity = streamed.text.partition('"id":"resp_')[2].partition('"')[0]
    third = server.client.get(f"{PATH}/resp_{identity}").json()
    assert text(third) == "a i a b a i a b c"
    assert server.client.get(f"{PATH}/{second['id']}").json() == second


def test_what_is_not_kept_is_not_found(server: Running) -> None:
    kept, not_kept = asked(server, "a"), asked(server, "a", store=False)
    assert not_kept["store"] is False
    server.client.delete(f"{PATH}/{kept['id']}").raise_for_status()
    for identity in (kept["id"], not_kept["id"], "resp_../../x", "none"):
        refused = server.post(PATH, {"model": "m", "input": "b", "previous_response_id": identity})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        assert server.client.get(f"{PATH}/{identity}").status_code == 404


def test_the_answers_of_another_key_are_not_found(server: Running) -> None:
    kept = asked(server, "a")
    server.client.headers["authorization"] = "Bearer other"
    refused = server.post(PATH, {"model": "m", "input": "b", "previous_response_id": kept["id"]})
    assert refused.status_code == 404
    assert server.client.delete(f"{PATH}/{kept['id']}").status_code == 404


def test_old_answers_are_deleted(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "SWEEP_S", 0)
    old, new = asked(server, "a"), asked(server, "b")
    past = time.time() - response_store.KEPT_S - 60
    os.utime(tmp_path / "responses" / f"{old['id']}.json", (past, past))
    asked(server, "c")
    assert server.client.get(f"{PATH}/{old['id']}").status_code == 404
    assert server.client.get(f"{PATH}/{new['id']}").status_code == 200
