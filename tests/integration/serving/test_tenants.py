"""A key sees its own files and batches only; an admin key sees all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_batches import ENGINES, line, rows_of
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.auth import read_keys
from headrace.serving.limits import ServeLimits

KEYS = "alice k-alice\nbob k-bob\nbob k-bobs-next\nk-nameless\nroot k-root admin\n"


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    def make(keys: str | None = KEYS, engine: str = "headrace.testing:FakeEngine") -> Any:
        path = tmp_path / "keys"
        path.write_text(keys or "")
        return running(
            ServerSettings(
                EngineConfig("embed", engine=engine, batch_tokens=8),
                state=tmp_path / "state",
                keys=read_keys(path, None) if keys else (),
                limits=ServeLimits(drain_s=2),
            )
        )

    return make


class Caller:
    """Requests with one key."""

    def __init__(self, server: Running, key: str | None) -> None:
        self._server = server
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._server.client.request(method, path, headers=self._headers, **options)

    def upload(self, count: int) -> str:
        content = "".join(json.dumps(line(number)) + "\n" for number in range(count)).encode()
        answer = self.ask("POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        return str(answer.json()["id"])

    def begin(self, file: str) -> httpx.Response:
        return self.ask("POST", "/v1/batches", json={"input_file_id": file, "endpoint": "/v1/embeddings"})

    def ids(self, kind: str) -> set[str]:
        return {entry["id"] for entry in self.ask("GET", f"/v1/{kind}").json()["data"]}

    def status(self, identity: str) -> str:
        return str(self.ask("GET", f"/v1/batches/{identity}").json()["status"])


def test_a_key_neither_sees_nor_uses_what_is_anothers(serve: Callable[..., Any]) -> None:
    with serve(engine=f"{ENGINES}:Gradual") as server:
        alice, bob, nameless, root = (Caller(server, f"k-{name}") for name in ("alice", "bob", "nameless", "root"))
        file = alice.upload(400)
        identity = alice.begin(file).json()["id"]
        for other in (bob, nameless):
            for method, path in (
                ("GET", f"/v1/files/{file}"),
                ("GET", f"/v1/files/{file}/content"),
                ("DELETE", f"/v1/files/{file}"),
                ("GET", f"/v1/batches/{identity}"),
                ("POST", f"/v1/batches/{identity}/cancel"),
            ):
                # To the letter what is said of one that there is not.
                unknown = path.replace(file, "file-" + "0" * 32).replace(identity, "batch_" + "0" * 32)
                refused, told = other.ask(method, path), other.ask(method, unknown)
                assert refused.status_code == told.status_code == 404
                assert refused.json() == {
                    "error": told.json()["error"] | {"message": refused.json()["error"]["message"]}
                }
                assert refused.json()["error"]["message"].split("'")[0] == told.json()["error"]["message"].split("'")[0]
            assert other.begin(file).status_code == 404
            assert other.ids("files") == other.ids("batches") == set()
        assert alice.status(identity) in ("validating", "in_progress")  # nobody has stopped it
        assert alice.ids("files") == root.ids("files") == {file}
        assert root.ids("batches") == {identity}
        assert root.ask("POST", f"/v1/batches/{identity}/cancel").status_code == 200
        until(lambda: alice.status(identity) == "cancelled")


def test_the_output_belongs_to_whom_the_batch_belongs(serve: Callable[..., Any]) -> None:
    with serve() as server:
        alice, bob, root = (Caller(server, f"k-{name}") for name in ("alice", "bob", "root"))
        identity = alice.begin(alice.upload(3)).json()["id"]
        until(lambda: alice.status(identity) == "completed")
        output = alice.ask("GET", f"/v1/batches/{identity}").json()["output_file_id"]
        assert alice.ask("GET", f"/v1/files/{output}/content").text.count("\n") == 3
        assert root.ask("GET", f"/v1/files/{output}/content").text.count("\n") == 3
        assert bob.ask("GET", f"/v1/files/{output}/content").status_code == 404


def test_keys_of_one_name_share(serve: Callable[..., Any]) -> None:
    with serve() as server:
        file = Caller(server, "k-bob").upload(1)
        assert Caller(server, "k-bobs-next").ids("files") == {file}


def test_what_a_key_owns_stays_its_own_when_the_key_file_changes(serve: Callable[..., Any]) -> None:
    with serve("k-first\nk-second\nroot k-root admin") as server:
        file = Caller(server, "k-second").upload(1)
    with serve("k-second\nk-third\nroot k-root admin") as server:
        assert Caller(server, "k-second").ids("files") == {file}
        assert Caller(server, "k-third").ids("files") == set()


def test_what_was_made_without_keys_is_for_the_admin_alone(serve: Callable[..., Any]) -> None:
    with serve(None) as server:
        file = Caller(server, None).upload(2)
        identity = Caller(server, None).begin(file).json()["id"]
        until(lambda: Caller(server, None).status(identity) == "completed")
    with serve() as server:
        assert Caller(server, "k-alice").ids("files") == Caller(server, "k-alice").ids("batches") == set()
        assert Caller(server, "k-root").ids("batches") == {identity}
    with serve(None) as server:
        assert file in Caller(server, None).ids("files")
        assert rows_of(server, Caller(server, None).ask("GET", f"/v1/batches/{identity}").json()["output_file_id"])
