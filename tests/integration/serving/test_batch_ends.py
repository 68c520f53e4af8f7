"""What a batch refuses, waits for and keeps."""

from __future__ import annotations

import base64
import errno
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import running
from tests.integration.serving.test_batches import ENGINES, batch, begin, ended, line, rows_of, upload
from tests.settings import server_settings
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.io.storage.parts import PartFolder
from headrace.serving.limits import ServeLimits
from headrace.testing import FakeEngine


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    def make(engine: str = "headrace.testing:FakeEngine", **settings: Any) -> Any:
        settings.setdefault("limits", ServeLimits(drain_s=2))
        return running(server_settings(task="embed", engine=engine, state=tmp_path / "state", **settings))

    return make


BAD: dict[str, tuple[list[Any], list[tuple[int | None, str]]]] = {
    "a double id": ([line(0), line(1), "", line(0)], [(4, "duplicate_custom_id")]),
    "a bad first line": (["nonsense", line(1)], [(1, "invalid_json_line")]),
    "no object": ([line(0), "[1]"], [(2, "invalid_json_line")]),
    "blank lines alone": (["", " "], [(None, "empty_file")]),
    "a wrong url": ([line(0), line(1, url="/v1/completions")], [(2, "mismatched_url")]),
    "a wrong model": ([line(0), line(1, body={"model": "gpt-x", "input": "a"})], [(2, "model_not_found")]),
    "a wrong method": ([line(0, method="GET")], [(1, "invalid_method")]),
    "no id": ([line(0, custom_id=None), line(1, custom_id="")], [(1, "invalid_custom_id"), (2, "invalid_custom_id")]),
    "a field that no request has": ([line(0), line(1, priority="high")], [(2, "unknown_field")]),
    "no body": ([line(0, body="x")], [(1, "invalid_body")]),
    "a long line": ([line(0, body={"input": "x" * 500_000})], [(1, "line_too_long")]),
    "many values": ([line(0, body={"input": ["x"] * 70_000})], [(1, "too_many")]),
    "several": (
        [line(0), "x", line(0), line(2, method="PUT"), line(0)],
        [(2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "invalid_method"), (5, "duplicate_custom_id")],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_fails_before_anything_is_computed(serve: Callable[..., Any], name: str) -> None:
    rows, expected = BAD[name]
    with serve(limits=ServeLimits(max_body_bytes=400_000)) as server:
        done = ended(server, begin(server, rows))
        assert done["status"] == "failed"
        assert [(error["line"], error["code"]) for error in done["errors"]["data"]] == expected
        assert all(error["message"] for error in done["errors"]["data"])
        assert done["output_file_id"] is None
        assert done["failed_at"]
        assert not server.engine.batch_sizes


def test_the_errors_of_a_file_are_bounded(serve: Callable[..., Any]) -> None:
    with serve() as server:
        assert len(ended(server, begin(server, ["x"] * 5_000))["errors"]["data"]) == 100


def test_a_server_that_takes_few_requests_does_whole_batches(serve: Callable[..., Any]) -> None:
    with serve(limits=ServeLimits(max_requests=8)) as server:
        done = ended(server, begin(server, [line(number) for number in range(3_000)]))
        assert done["request_counts"] == {"total": 3_000, "completed": 3_000, "failed": 0}


def test_the_served_model_may_be_named(serve: Callable[..., Any]) -> None:
    with serve(name="ours") as server:
        rows = [line(0, body={"model": "ours", "input": "a"}), line(1)]
        assert ended(server, begin(server, rows))["request_counts"]["completed"] == 2


def test_a_line_may_have_several_inputs(serve: Callable[..., Any]) -> None:
    engine = FakeEngine()
    rows = [
        line(0, body={"input": ["a b", "c", "d e f"]}),
        line(1, body={"input": ["x"], "encoding_format": "base64"}),
        line(2, body={"input": ["good", ""]}),
        line(3, body={"input": [f"text {n}" for n in range(3_000)]}),
        line(4, body={"input": [f"text {n}" for n in range(2_048)]}),
    ]
    with serve() as server:
        done = ended(server, begin(server, rows))
        assert done["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
        several, spelt, many = (row["response"]["body"] for row in rows_of(server, done["output_file_id"]))
        assert [item["index"] for item in several["data"]] == [0, 1, 2]
        assert [item["embedding"] for item in several["data"]] == [engine.vector(t) for t in ("a b", "c", "d e f")]
        assert several["usage"]["prompt_tokens"] == 6
        vector = list(struct.unpack("<8f", base64.b64decode(spelt["data"][0]["embedding"])))
        assert vector == pytest.approx(engine.vector("x"))
        assert many["data"][2_047]["embedding"] == engine.vector("text 2047")
        errors = {row["custom_id"]: row["error"]["message"] for row in rows_of(server, done["error_file_id"])}
        assert errors.keys() == {"r2", "r3"}
        assert "2048" in errors["r3"]


def test_a_completion_line_may_have_several_prompts_and_no_stream(tmp_path: Path) -> None:
    def ask(number: int, **body: Any) -> dict[str, Any]:
        return line(number, url="/v1/completions", body=body)

    rows = [ask(0, prompt=["one two", "three"]), ask(1, prompt="x", stream=True)]
    with running(
        ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), state=tmp_path / "s")
    ) as server:
        done = ended(server, begin(server, rows, "/v1/completions"))
        (answer,) = (row["response"]["body"] for row in rows_of(server, done["output_file_id"]))
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "one two"), (1, "three")]
        assert answer["usage"]["completion_tokens"] == 3
        (refused,) = rows_of(server, done["error_file_id"])
        assert "stream" in refused["error"]["message"]


def test_the_input_of_a_running_batch_is_not_deleted(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        identity = begin(server, [line(number) for number in range(400)])
        file = batch(server, identity)["input_file_id"]
        refused = server.client.delete(f"/v1/files/{file}")
        assert refused.status_code == 409
        assert identity in refused.json()["error"]["message"]
        server.post(f"/v1/batches/{identity}/cancel", {})
        assert ended(server, identity)["status"] == "cancelled"
        assert server.client.delete(f"/v1/files/{file}").status_code == 200
        assert server.client.get(f"/v1/files/{file}/content").status_code == 404


def disk(monkeypatch: pytest.MonkeyPatch, number: int, after: int) -> Callable[[], None]:
    """Every commit after so many fails, until the returned function is called."""
    commit, done, fails = PartFolder.commit, [0], [True]

    def failing(self: PartFolder, *given: Any) -> None:
        done[0] += 1
        if fails[0] and done[0] > after:
            raise OSError(number, "no")
        commit(self, *given)

    monkeypatch.setattr(PartFolder, "commit", failing)
    return lambda: fails.__setitem__(0, False)


@pytest.mark.parametrize("after", [0, 2])
def test_a_batch_waits_for_a_full_disk(serve: Callable[..., Any], monkeypatch: Any, after: int) -> None:
    free = disk(monkeypatch, errno.ENOSPC, after)
    with serve(f"{ENGINES}:Gradual", batch_tokens=64) as server:
        identity = begin(server, [line(number) for number in range(3_000)])
        until(lambda: server.engine.batch_sizes and not server.host.loaded.batcher.stats.waiting)
        assert batch(server, identity)["status"] == "in_progress"
        free()
        done = ended(server, identity)
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 3_000, "completed": 3_000, "failed": 0}
        ids = [row["custom_id"] for row in rows_of(server, done["output_file_id"])]
        assert ids == [f"r{number}" for number in range(3_000)]


def test_a_batch_that_fails_midway_keeps_what_is_finished(serve: Callable[..., Any], monkeypatch: Any) -> None:
    disk(monkeypatch, errno.EFBIG, 1)
    with serve() as server:
        done = ended(server, begin(server, [line(number) for number in range(3_000)]))
        assert done["status"] == "failed"
        assert "no" in done["errors"]["data"][0]["message"]
        kept = rows_of(server, done["output_file_id"])
        assert 0 < len(kept) == done["request_counts"]["completed"] < 3_000


def test_a_batch_that_waits_for_its_turn_is_cancelled_at_once(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Held") as server:
        running_ones = [begin(server, [line(0)]) for _ in range(4)]
        until(lambda: all(batch(server, identity)["status"] == "in_progress" for identity in running_ones))
        waiting = begin(server, [line(0), line(1)])
        until(lambda: batch(server, waiting)["status"] == "in_progress")
        assert server.post(f"/v1/batches/{waiting}/cancel", {}).json()["status"] == "cancelling"
        done = ended(server, waiting)
        assert done["status"] == "cancelled"
        assert done["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
        assert done["output_file_id"] is None
        server.engine.go.set()
        assert [ended(server, identity)["status"] for identity in running_ones] == ["completed"] * 4


def test_a_cancelled_batch_has_its_counts_after_a_restart_too(serve: Callable[..., Any], tmp_path: Path) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        identity = begin(server, [line(number) for number in range(400)])
        until(lambda: batch(server, identity)["request_counts"]["completed"] > 0)
    path = tmp_path / "state" / "batches" / f"{identity}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "cancelling"}))  # as a kill leaves it
    with serve() as server:
        done = ended(server, identity)
        assert done["status"] == "cancelled"
        kept = rows_of(server, done["output_file_id"])
        assert 0 < len(kept) == done["request_counts"]["completed"] < 400


def test_a_batch_waits_for_a_server_of_its_model(serve: Callable[..., Any]) -> None:
    with serve(f"{ENGINES}:Gradual", batch_tokens=8) as server:
        identity = begin(server, [line(number) for number in range(4_000)])
        until(lambda: batch(server, identity)["request_counts"]["completed"] > 0)
    with serve(model="another") as server:
        other = begin(server, [line(0)])
        assert ended(server, other)["status"] == "completed"
        assert batch(server, identity)["status"] == "in_progress"
    with serve() as server:
        assert ended(server, identity)["request_counts"]["completed"] == 4_000


def test_an_upload_without_a_line_is_refused(serve: Callable[..., Any]) -> None:
    with serve() as server:
        response = server.client.post("/v1/files", files={"file": ("in.jsonl", b"")}, data={"purpose": "batch"})
        assert response.status_code == 400
        assert upload(server, [line(0)])
