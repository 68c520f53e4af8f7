"""Long texts and heavy bodies: they are bounded, and nobody else waits for them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.serving.running import Running, running, until
from tests.integration.serving.test_batches import begin, ended, rows_of

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.errors import ApiError
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.requests import MOST_VALUES, check_values

ENGINES = "tests.integration.serving.engines"
JSON = {"content-type": "application/json"}
MIB = 1024 * 1024


@contextlib.contextmanager
def probed(server: Running) -> Iterator[list[float]]:
    """How long `/health` takes, in seconds, again and again while the body runs."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            client.get("/health")
            while not over.is_set():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                took.append(time.perf_counter() - began)
                over.wait(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: bool(took))
    try:
        yield took
    finally:
        over.set()
        thread.join()


def p99(took: list[float]) -> float:
    return sorted(took)[int(0.99 * (len(took) - 1))]


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_a_prompt_of_a_million_characters_keeps_nobody_waiting(task: str) -> None:
    """The real models. On an idle machine the slowest probe takes 20 ms; on the loop it would be seconds."""
    text = ("1234 567 " * 120_000)[:1_000_000]
    path, body = ("/v1/completions", {"prompt": text}) if task == "generate" else ("/v1/embeddings", {"input": text})
    with running(ServerSettings(EngineConfig(task=task))) as server:
        server.post(path, {**body, next(iter(body)): "1+1="})
        with probed(server) as took:
            answers = [server.client.post(path, json=body, timeout=60) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {400 if task == "generate" else 200}
        assert p99(took) < 0.25, sorted(took)[-5:]


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":[' + b"1," * (2 * MIB - 20) + b"1]}",
        b'{"input":[' + b'"a",' * (MIB - 20) + b'"a"]}',
        b'{"input":"a",' + b",".join(b'"%d":1' % number for number in range(350_000)) + b"}",
        b'{"input":' + b"[]," * (MIB - 20) + b"1}",
        b'{"input":"' + b"\\u00e9" * (MIB // 2) + b'"}',
    ],
    ids=["numbers", "texts", "fields", "lists", "escapes"],
)
def test_a_heavy_body_is_refused_before_it_costs_anything(body: bytes) -> None:
    with running(
        ServerSettings(EngineConfig(engine="headrace.testing:FakeEngine"), limits=ServeLimits(max_prompt_chars=1_000))
    ) as server:
        with probed(server) as took:
            began = time.perf_counter()
            answers = [server.client.post("/v1/embeddings", content=body, headers=JSON) for _ in range(4)]
            each = (time.perf_counter() - began) / 4
        assert {answer.status_code for answer in answers} == {400}
        assert each < 1
        assert p99(took) < 0.25


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"input":' * 50_000, b"[" * 10_000 + b"]" * 10_000 + b" " * 40_000])
def test_a_deep_body_is_refused(body: bytes) -> None:
    with running(ServerSettings(EngineConfig(engine="headrace.testing:FakeEngine"))) as server:
        answer = server.client.post("/v1/embeddings", content=body, headers=JSON)
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_values_are_counted_and_text_is_not() -> None:
    for fine in (
        json.dumps({"input": "[{," * MOST_VALUES}),
        json.dumps({"input": ['"\\",[' * 1_000] * 1_000}),
        json.dumps({"input": ["a"] * (MOST_VALUES - 10)}),
        json.dumps({"input": "\\" * 10_001 + '"'}),
    ):
        check_values(fine.encode())
    for heavy in (
        json.dumps(["a"] * (MOST_VALUES + 2)),
        "[" * (MOST_VALUES + 2),
        json.dumps([{}] * (MOST_VALUES // 2 + 2)),
    ):
        with pytest.raises(ApiError, match="more than"):
            check_values(heavy.encode())


LIMITS = ServeLimits(max_body_bytes=100_000, max_prompt_chars=1_000, max_prompts=4)


def batch_line(number: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def test_limits_hold_for_lines_of_batches(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": "fine"},
        {"input": "x" * 1_001},
        {"input": ["a"] * 5},
        {"input": "y" * 1_000, "encoding_format": "float", "user": "u"},
        {"input": "a", "dimensions": 4},
        {"input": "a", "encoding_format": "base64"},
        {"input": "a", "colour": "red"},
    ]
    rows = [batch_line(number, "/v1/embeddings", body) for number, body in enumerate(bodies)]
    with running(
        ServerSettings(EngineConfig(engine="headrace.testing:FakeEngine"), limits=LIMITS, state=tmp_path)
    ) as server:
        done = ended(server, begin(server, rows))
        assert [row["custom_id"] for row in rows_of(server, done["output_file_id"])] == ["r0", "r3", "r5"]
        errors = rows_of(server, done["error_file_id"])
        told = [row["error"]["message"] for row in errors]
    for message, word in zip(
        told,
        ("1,001 characters", "5 texts", "dimensions", "'colour'"),
        strict=True,
    ):
        assert word in message


def test_limits_hold_for_chats_in_batches(tmp_path: Path) -> None:
    url = "/v1/chat/completions"
    contents: list[Any] = ["fine", "x" * 1_001, [{"type": "text", "text": "in parts"}], [{"type": "image_url"}], "a b"]
    rows = [
        batch_line(number, url, {"messages": [{"role": "user", "content": content}]})
        for number, content in enumerate(contents)
    ]
    rows[4]["body"]["best_of"] = 2
    with running(
        ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), limits=LIMITS, state=tmp_path)
    ) as server:
        done = ended(server, begin(server, rows, url))
        answers = [row["response"]["body"] for row in rows_of(server, done["output_file_id"])]
        told = [row["error"]["message"] for row in rows_of(server, done["error_file_id"])]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["fine", "in parts"]
    for word, message in zip(("1,005 characters", "image_url", "best_of is 2"), told, strict=True):
        assert word in message


def test_a_line_of_twenty_megabytes_keeps_nobody_waiting(tmp_path: Path) -> None:
    rows = [batch_line(0, "/v1/embeddings", {"input": "short"})]
    rows += [batch_line(number, "/v1/embeddings", {"input": "word " * 190_000}) for number in (1, 2)]
    longer = [batch_line(number, "/v1/embeddings", {"input": "word " * (4 * MIB)}) for number in (3, 4)]
    with running(ServerSettings(state=tmp_path)) as server:
        identities = [begin(server, rows), begin(server, [*rows, *longer])]
        with probed(server) as took:
            done, refused = (ended(server, identity) for identity in identities)
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert [(error["line"], error["code"]) for error in refused["errors"]["data"]] == [
            (4, "line_too_long"),
            (5, "line_too_long"),
        ]
        assert p99(took) < 0.25, sorted(took)[-5:]
