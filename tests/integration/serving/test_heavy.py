"""Long texts and heavy bodies: they are bounded, and nobody else waits for them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import running
from tests.integration.serving.test_batches import begin, ended, rows_of

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.text.embedding import EmbeddingEngine
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.requests import HEAVY_BYTES, MOST_VALUES, check_values
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"
JSON = {"content-type": "application/json"}
MIB = 1024 * 1024


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those on which long texts are prepared and heavy bodies parsed, by their identifiers."""
    seen: list[int] = []

    def watch(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def watched(self: Any, given: Any) -> Any:
            if len(given) > HEAVY_BYTES or any(len(str(one)) > HEAVY_BYTES for one in given[:10]):
                seen.append(threading.get_ident())
            return function(self, given)

        monkeypatch.setattr(owner, name, watched)

    for engine in (EmbeddingEngine, GenerationEngine, FakeEngine):
        watch(engine, "prepare")
    watch(DirectRoute, "_parse")
    return seen


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_a_prompt_of_a_million_characters_keeps_nobody_waiting(task: str, threads: list[int]) -> None:
    """The real models."""
    text = ("1234 567 " * 120_000)[:1_000_000]
    path, body = ("/v1/completions", {"prompt": text}) if task == "generate" else ("/v1/embeddings", {"input": text})
    with running(ServerSettings(EngineConfig(task=task))) as server:
        server.post(path, {**body, next(iter(body)): "1+1="})
        assert server.post(path, body).status_code == (400 if task == "generate" else 200)
        assert len(threads) == 2  # the body and the text
        assert server.thread not in threads


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
def test_a_heavy_body_is_refused_before_it_costs_anything(body: bytes, threads: list[int]) -> None:
    """Only the long text is parsed: it has few values."""
    with running(
        ServerSettings(
            EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), limits=ServeLimits(max_prompt_chars=1_000)
        )
    ) as server:
        assert server.client.post("/v1/embeddings", content=body, headers=JSON).status_code == 400
        assert len(threads) == (1 if b"\\u" in body else 0)
        assert server.thread not in threads


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"input":' * 50_000, b"[" * 10_000 + b"]" * 10_000 + b" " * 40_000])
def test_a_deep_body_is_refused(body: bytes) -> None:
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"))) as server:
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
        ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), limits=LIMITS, state=tmp_path)
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


def test_a_line_of_twenty_megabytes_keeps_nobody_waiting(tmp_path: Path, threads: list[int]) -> None:
    rows = [batch_line(0, "/v1/embeddings", {"input": "short"})]
    rows += [batch_line(number, "/v1/embeddings", {"input": "word " * 190_000}) for number in (1, 2)]
    longer = [batch_line(number, "/v1/embeddings", {"input": "word " * (4 * MIB)}) for number in (3, 4)]
    with running(ServerSettings(state=tmp_path, limits=ServeLimits(max_body_bytes=4 * MIB))) as server:
        identities = [begin(server, rows), begin(server, [*rows, *longer])]
        done, refused = (ended(server, identity) for identity in identities)
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert [(error["line"], error["code"]) for error in refused["errors"]["data"]] == [
            (4, "line_too_long"),
            (5, "line_too_long"),
        ]
        assert len(threads) >= 2
        assert server.thread not in threads
