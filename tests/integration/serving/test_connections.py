"""Connections that are slow, large, half closed, or never read."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import time
from collections.abc import Iterator

import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.limits import ServeLimits

ENGINES = "tests.integration.serving.engines"
LIMITS = ServeLimits(
    body_timeout_s=0.5,
    write_timeout_s=0.5,
    max_header_bytes=16_384,
    max_body_bytes=4 * 1024 * 1024,
    max_prompt_chars=10_000_000,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), limits=LIMITS)) as server:
        yield server


def connect(server: Running) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)
    connection.settimeout(60)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    got = b""
    try:
        while part := connection.recv(65_536):
            got += part
    except ConnectionResetError:  # it closed while there was more to read
        pass
    return got


def test_headers_without_end_are_cut_off(server: Running) -> None:
    with connect(server) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 1_000_000 + b"\r\n\r\n")
        except (ConnectionResetError, BrokenPipeError):
            pass
        got = answer(connection)
    assert got == b"" or b" 431 " in got.splitlines()[0]


def test_long_headers_are_told_so_in_the_usual_shape(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 16_400)
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert b" 431 " in head
    assert json.loads(body)["error"]["code"] == "headers_too_long"


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_who_sends_all_of_a_long_body_before_reading_is_told_the_limit(server: Running) -> None:
    part = b"%x\r\n%b\r\n" % (1_000_000, b"y" * 1_000_000)
    plain = b"content-length: 8000000\r\n\r\n" + b"y" * 8_000_000
    for body in (b"transfer-encoding: chunked\r\n\r\n" + 8 * part + b"0\r\n\r\n", plain):
        with connect(server) as connection:
            connection.sendall(HEAD + body)
            head, _, found = answer(connection).partition(b"\r\n\r\n")
        assert b" 413 " in head
        assert "4,194,304 bytes allowed (--max-body-bytes)" in json.loads(found)["error"]["message"]


def test_connections_that_announce_long_bodies_and_are_silent_shut_out_nobody() -> None:
    limits = ServeLimits(max_waiting_bytes=10_000_000, body_timeout_s=3_600)
    settings = ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), limits=limits)
    with running(settings) as server, contextlib.ExitStack() as silent:
        for _ in range(2):
            connection = silent.enter_context(connect(server))
            connection.sendall(HEAD.replace(b"completions", b"embeddings") + b"content-length: 5000000\r\n\r\n{")
        until(lambda: server.host.bodies.requests == 2)
        until(lambda: server.host.bodies.cost < 100)
        assert server.post("/v1/embeddings", {"input": "word " * 100_000}).status_code == 200


def test_headers_that_do_not_come_are_not_waited_for(server: Running) -> None:
    began = time.monotonic()
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert answer(connection) == b""
    assert time.monotonic() - began > 0.3


def test_a_body_that_does_not_come_is_not_waited_for(server: Running) -> None:
    began = time.monotonic()
    with connect(server) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert b" 408 " in answer(connection).splitlines()[0]
    assert time.monotonic() - began > 0.3


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_who_still_sends_when_refused_loses_no_answer(server: Running, close: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + close + b"content-length: 4000000\r\n\r\n{")
        assert select.select([connection], [], [], 5)[0], "the body was too slow"
        for _ in range(3):
            connection.sendall(b"y" * 1_000_000)
        assert b" 408 " in answer(connection).splitlines()[0]


def test_a_body_without_a_length_is_bounded_too(server: Running) -> None:
    part = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with connect(server) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(100):
                connection.sendall(part)
        except (ConnectionResetError, BrokenPipeError):
            pass
        got = answer(connection)
    assert got == b"" or b" 413 " in got.splitlines()[0]


def test_what_is_no_http_is_refused(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert b" 400 " in answer(connection).splitlines()[0]


def test_idle_connections_keep_nobody_out(server: Running) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(300):  # both ends are files of this process, which may have 1,024
            crowd.enter_context(connect(server))
        answers = [server.post("/generate", {"prompts": ["one two"]}) for _ in range(20)]
        assert [answer.json()["results"] for answer in answers] == [["one two"]] * 20
        until(lambda: len(server.server.server_state.connections) < 30)  # though the other end keeps them open


def completion(words: int, *, stream: bool = False) -> bytes:
    body = json.dumps({"prompt": "w " * words, "max_tokens": words, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("requests", [1, 2])  # the second waits for the first
def test_who_closes_its_half_of_the_connection_is_answered(server: Running, requests: int, stream: bool) -> None:
    server.engine.step_s = 0.02
    with connect(server) as connection:
        connection.sendall(completion(20, stream=stream) * requests)
        connection.shutdown(socket.SHUT_WR)
        got = answer(connection)  # until the server closes
    server.engine.step_s = 0.0
    answers = [part for part in got.split(b"HTTP/1.1 ") if part and not part.startswith(b"100")]
    assert [part[:3] for part in answers] == [b"200"] * requests
    assert got.count(b"HTTP/1.1 100") <= 2  # in 0.8 s at most: one at once, the next after a second
    assert got.count(b"[DONE]" if stream else b'"completion_tokens":20') == requests


@pytest.mark.parametrize("stream", [False, True])
def test_who_closes_all_of_it_is_given_up(server: Running, stream: bool) -> None:
    service = server.host.loaded
    assert service is not None
    server.engine.step_s, said = 0.02, server.engine.words_said
    with connect(server) as connection:
        connection.sendall(completion(4_000, stream=stream))
        until(lambda: service.batcher.stats.in_flight == 1)
    until(lambda: service.batcher.stats.in_flight == 0)
    assert server.engine.words_said < said + 4_000
    server.engine.step_s = 0.0


def test_who_closes_its_half_over_http_1_0_gets_nothing(server: Running) -> None:
    server.engine.step_s = 0.02
    with connect(server) as connection:
        connection.sendall(completion(20).replace(b"HTTP/1.1", b"HTTP/1.0"))
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection) == b""
    server.engine.step_s = 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_answers_over_http_1_0_have_no_chunks(server: Running, stream: bool) -> None:
    with connect(server) as connection:
        connection.sendall(completion(3, stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    if not stream:
        assert json.loads(body)["usage"]["completion_tokens"] == 3
        return
    events = body.decode().split("\n\n")
    assert [event[:6] for event in events[:-1]] == ["data: "] * (len(events) - 1)
    assert (events[-2], events[-1]) == ("data: [DONE]", "")


def test_half_of_a_request_is_given_up(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(completion(4_000)[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection) == b""


@pytest.mark.parametrize("kept", [True, False])
def test_an_answer_that_is_never_read_is_given_up(kept: bool) -> None:
    body = json.dumps({"prompt": "w" * 8_000_000, "max_tokens": 1}).encode()
    limits = ServeLimits(write_timeout_s=0.1, keep_alive_s=1, max_body_bytes=20_000_000, max_prompt_chars=20_000_000)
    settings = ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"), limits=limits)
    with running(settings) as other, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", int(other.url.rsplit(":", 1)[1])))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        if not kept:
            head += b"connection: close\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: other.server.server_state.total_requests == 1)
        until(lambda: not other.server.server_state.connections)


def test_a_stream_that_is_never_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", errors.append)
    body = json.dumps({"prompt": ("w" * 2_000 + " ") * 4_000, "max_tokens": 4_000, "stream": True}).encode()
    with running(
        ServerSettings(
            EngineConfig(task="generate", engine=f"{ENGINES}:Talker"),
            limits=ServeLimits(write_timeout_s=0.5, max_body_bytes=20_000_000, max_prompt_chars=20_000_000),
        )
    ) as other:
        service = other.host.loaded
        assert service is not None
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        with connection:
            connection.connect(("127.0.0.1", int(other.url.rsplit(":", 1)[1])))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                + str(len(body)).encode()
                + b"\r\n\r\n"
                + body
            )
            until(lambda: service.cancelled == 1)
            until(lambda: service.admission.requests == 0)
            until(lambda: not other.server.server_state.connections)
    assert not errors
