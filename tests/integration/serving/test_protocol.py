"""What surrounds a request: its id, methods, connections, and errors below HTTP's own level."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.limits import ServeLimits
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"


class Failing(FakeEngine):
    """Fails on the word "fail"."""

    def __init__(self, model: str | None = None) -> None:
        def refused(text: str) -> Exception | None:
            return RuntimeError("a bug in the engine") if text == "fail" else None

        super().__init__(model, refuses=refused)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = ServeLimits(body_timeout_s=2.0, max_header_bytes=16_384, max_body_bytes=10_000)
    with running(
        ServerSettings(
            EngineConfig(task="embed", engine=f"{__name__}:Failing"), limits=limits, state=tmp_path_factory.mktemp("s")
        )
    ) as server:
        yield server


def connect(server: Running) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)
    connection.settimeout(60)
    return connection


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the one answer before the server closes."""
    got = b""
    try:
        while part := connection.recv(65_536):
            got += part
    except ConnectionResetError:
        pass
    head, _, body = got.partition(b"\r\n\r\n")
    status, *lines = head.decode().splitlines()
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def test_a_connection_that_is_never_used_is_closed(server: Running) -> None:
    began = time.monotonic()
    with connect(server) as connection:
        assert connection.recv(1) == b""
    assert time.monotonic() - began > 1.5


def test_a_connection_that_is_used_again_late_is_not(server: Running) -> None:
    with connect(server) as connection:
        for pause_s in (0, 3):
            time.sleep(pause_s)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            got = b""
            while not got.endswith(b'{"status":"ok"}'):  # head and body may come in parts
                got += (part := connection.recv(65_536))
                assert part, got
            assert got.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 16_400, 431, "headers_too_long"),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20000\r\n\r\n", 413, "too_long"),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{", 408, "slow_body"),
    ],
)
def test_errors_of_the_protocol_have_the_shape_of_all_others(
    server: Running, sent: bytes, status: int, code: str
) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        got, headers, body = answer(connection)
    assert got == status
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"].startswith("req_")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/batches", "/v1/files", "/generate"])
@pytest.mark.parametrize(
    ("content", "kind"), [(b"{", "application/json"), (b"hi", "text/plain"), (b"", "application/json"), (b"x", "")]
)
def test_bodies_that_cannot_be_read_have_it_too(server: Running, path: str, content: bytes, kind: str) -> None:
    response = server.client.post(path, content=content, headers={"content-type": kind} if kind else {})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_a_request_has_an_id(server: Running) -> None:
    ids = [server.client.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models") * 2]
    ids += [server.post("/v1/embeddings", body).headers["x-request-id"] for body in ({"input": "x"}, {})]
    assert len(set(ids)) == 8
    assert all(re.fullmatch(r"req_[0-9a-f]+", one) for one in ids)


@pytest.mark.parametrize(("given", "kept"), [("abc-1:2", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)])
def test_the_clients_own_id_is_kept_if_it_is_sane(server: Running, given: str, kept: bool) -> None:
    for response in (
        server.client.get("/health", headers={"X-Request-ID": given}),
        server.post("/v1/embeddings", {"input": 5}, headers={"X-Request-ID": given}),
    ):
        assert response.headers.get_list("x-request-id") == [given] or not kept
        assert response.headers.get_list("request-id") == response.headers.get_list("x-request-id")
        assert kept or response.headers["x-request-id"].startswith("req_")


def test_the_log_says_which_request_failed(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "headrace"):
        response = server.post("/v1/embeddings", {"input": "fail"}, headers={"X-Request-ID": "mine-7"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine-7"
    assert "mine-7" in response.json()["error"]["message"]
    assert any("mine-7" in record.getMessage() for record in caplog.records)


def test_a_bug_of_the_servers_own_has_an_id_too(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(server.host), "check_texts", broken)
    response = server.post("/v1/embeddings", {"input": "x"}, headers={"X-Request-ID": "mine-8"})
    assert response.status_code == 500
    assert response.headers.get_list("x-request-id") == response.headers.get_list("request-id") == ["mine-8"]
    assert response.headers["connection"] == "close"
    assert "mine-8" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/docs", "/openapi.json", "/v1/files"])
def test_head_is_get_without_its_body(server: Running, path: str) -> None:
    whole, head = server.client.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert server.client.get("/health").json() == {"status": "ok"}  # the connection can be used again


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("POST", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("DELETE", "/v1/batches", "GET, HEAD, POST"),
        ("GET", "/v1/embeddings", "POST"),
        ("HEAD", "/v1/embeddings", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_all_right_ones(server: Running, method: str, path: str, allowed: str) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        assert response.json()["error"]["code"] == "method_not_allowed"


def test_the_documents_load_nothing_from_elsewhere(server: Running) -> None:
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" + "://" not in page.text
    assert "https" + "://" not in page.text
    assert "<script" not in page.text
    for path in server.client.get("/openapi.json").json()["paths"]:
        assert path in page.text
    assert "dimensions" in page.text


def test_answers_of_a_batch_say_when_they_were_made(tmp_path: Path) -> None:
    from tests.integration.serving.test_batches import begin, ended, rows_of

    url = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "hi"}]}
    row = {"custom_id": "1", "method": "POST", "url": url, "body": body}
    before = int(time.time())
    with running(ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), state=tmp_path)) as server:
        done = ended(server, begin(server, [row], url))
        [line] = rows_of(server, done["output_file_id"])
    answer = line["response"]["body"]
    assert before <= answer["created"] <= time.time()
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(answer)
