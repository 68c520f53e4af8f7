"""What clients send around a request: wishes for other protocols, codings, hosts, spellings of paths, doubled keys."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.auth import read_keys
from headrace.serving.limits import ServeLimits

ENGINE = "headrace.testing:FakeEngine"
BODY = json.dumps({"input": "a text"}).encode()
PIECES = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\n\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n"
WEBSOCKET = b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
JAVA = """
import java.net.URI;
import java.net.http.*;

public class Client {
    public static void main(String[] given) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(given[0] + "/v1/embeddings"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(given[1]))
                .build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = ServerSettings(EngineConfig("embed", engine=ENGINE), state=tmp_path_factory.mktemp("state"))
    with running(settings) as server:
        yield server


def connect(server: Running) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)
    connection.settimeout(60)
    return connection


def request(more: bytes, content: bytes = BODY, *, version: bytes = b"1.1") -> bytes:
    length = b"" if b"transfer-encoding" in more else b"content-length: %d\r\n" % len(content)
    head = b"POST /v1/embeddings HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n" % version
    return head + more + length + b"\r\n" + content


def statuses(server: Running, *parts: bytes, answers: int = 1) -> list[bytes]:
    """The status lines of so many answers to what is sent in parts."""
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        got = b""
        while got.count(b"HTTP/1.1 ") < answers or not got.endswith(b"}"):
            part = connection.recv(65_536)
            assert part, got
            got += part
    return [line.split(b"\r\n")[0] for line in got.split(b"HTTP/1.1 ")[1:]]


# -- other protocols ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish", [H2C, WEBSOCKET, H2C.replace(b"h2c", b"TLS/1.2, h2c"), b"connection: Upgrade\r\nupgrade: x\r\n"]
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_wish_for_another_protocol_is_ignored(server: Running, wish: bytes, version: bytes) -> None:
    assert statuses(server, request(wish, version=version)) == [b"200 OK"]


def test_its_body_may_come_later_in_pieces_or_without_a_length(server: Running) -> None:
    whole = request(H2C)
    assert statuses(server, whole[:40], whole[40:-30], whole[-30:-3], whole[-3:]) == [b"200 OK"]
    chunked = request(H2C + b"transfer-encoding: chunked\r\n", PIECES)
    assert statuses(server, chunked[:-20], chunked[-20:]) == [b"200 OK"]


def test_requests_follow_on_its_connection(server: Running) -> None:
    assert statuses(server, request(H2C) + request(b"") + request(WEBSOCKET), answers=3) == [b"200 OK"] * 3
    many = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h\r\n\r\n" * 200
    assert statuses(server, many, answers=200) == [b"200 OK"] * 200  # in one block, and not by recursion


def test_it_says_at_most_one_line(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        statuses(server, request(H2C))
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
    assert "pip install" not in caplog.text


def test_headers_of_such_a_request_have_their_limits(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + H2C + b"x-long: " + b"y" * 40_000)
        assert b" 431 " in connection.recv(65_536)


def test_a_tunnel_is_refused(server: Running) -> None:
    assert statuses(server, b"CONNECT other:443 HTTP/1.1\r\nhost: other\r\n\r\n") == [b"400 Bad Request"]


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")
def test_javas_own_client(server: Running, tmp_path: Path) -> None:
    source = tmp_path / "Client.java"
    source.write_text(JAVA)
    said = subprocess.run(
        ["java", source, server.url, BODY.decode()], capture_output=True, text=True, timeout=120, check=False
    )
    answers = said.stdout.splitlines()
    assert [answer.split()[0] for answer in answers] == ["200"] * 3, said
    assert json.loads(answers[0].split(" ", 1)[1])["data"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_asked_for_http_2(server: Running) -> None:
    header = ["-H", "Content-Type: application/json"]
    command = ["curl", "-s", "--http2", f"{server.url}/v1/embeddings", *header, "-d", BODY.decode()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(said.stdout)["data"]


# -- codings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked", b"chunked, chunked"])
def test_another_transfer_coding_is_not_implemented(server: Running, coding: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request(b"transfer-encoding: " + coding + b"\r\n", PIECES))
        got = b""
        while part := connection.recv(65_536):  # to the end: what follows cannot be told from the body
            got += part
    assert got.startswith(b"HTTP/1.1 501") or (b"chunked, chunked" in coding and got.startswith(b"HTTP/1.1 400"))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/files", "/v1/batches"])
def test_a_compressed_body_is_refused_by_name(server: Running, coding: str, path: str) -> None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    answer = server.client.post(path, content=b"\x1f\x8b", headers=headers)
    assert answer.status_code == 415
    assert coding in answer.json()["error"]["message"]
    plain = server.client.post("/v1/embeddings", content=BODY, headers={**headers, "content-encoding": "identity"})
    assert plain.status_code == 200


# -- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/embeddings/", "//v1/embeddings", "/v1/embeddings//", "//"])
def test_slashes_around_a_path_change_nothing(server: Running, path: str) -> None:
    content = {"inputs": "a text"} if path == "//" else {"input": "a text"}
    answer = server.client.post(server.url + path, json=content)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/livez", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready", "/ready/", "/health/", "/"],
)
def test_probes_by_their_usual_names(path: str) -> None:
    settings = ServerSettings(EngineConfig("embed", engine=ENGINE), keys=read_keys(None, "k1"))
    with running(settings) as server:  # a probe has no key
        path = server.url + path
        assert server.client.get(path).status_code == server.client.head(path).status_code == 200
        server.host.draining = True
        answer = server.client.get(path)
        alive = path.endswith(("/healthz", "/livez", "/v2/health/live", "/health/"))
        assert answer.status_code == (200 if alive else 503)
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
        server.host.draining = False


def test_a_path_of_another_route_needs_its_key_in_every_spelling() -> None:
    with running(ServerSettings(EngineConfig("embed", engine=ENGINE), keys=read_keys(None, "k1"))) as server:
        for path in ("/metrics", "/metrics/", "//metrics", "/v1/models/", "/healthz/../metrics"):
            assert server.client.get(server.url + path).status_code in (401, 404), path
        for path in ("/", "//", "/embed"):
            assert server.client.post(server.url + path, json={"inputs": "a text"}).status_code == 401


# -- hosts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),  # a page has a name, or is on this server
        ("models.example.com", 200),
        ("evil.com", 400),
        ("evil.com:8000", 400),
        ("localhost.evil.com", 400),
        ("evil-localhost", 400),
        ("example.com", 400),
        ("127.0.0.1.nip.io", 400),
        ("", 400),
    ],
)
def test_hosts_that_are_not_allowed_are_refused(host: str, status: int) -> None:
    settings = ServerSettings(EngineConfig("embed", engine=ENGINE), allowed_hosts=("localhost", "*.example.com"))
    with running(settings) as server:
        for path in ("/ready", "/v1/models", "/dashboard", "/none"):
            answer = server.client.get(path, headers={"host": host})
            assert answer.status_code == (404 if path == "/none" and status == 200 else status)
        assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"


def test_one_of_two_hosts_that_is_not_allowed_is_enough_to_refuse() -> None:
    settings = ServerSettings(EngineConfig("embed", engine=ENGINE), allowed_hosts=("localhost",))
    with running(settings) as server:
        assert statuses(server, b"GET /ready HTTP/1.1\r\nhost: localhost\r\nhost: evil.com\r\n\r\n") == [
            b"400 Bad Request"
        ]
        assert statuses(server, b"GET /ready HTTP/1.0\r\n\r\n") == [b"200 OK"]  # a load balancer; no browser


@pytest.mark.parametrize("name", ["http://a", "a:80", "a*b", "", "*.", ".", "a b"])
def test_a_name_that_is_no_host_is_refused_at_the_start(name: str) -> None:
    with (
        pytest.raises(ValueError, match="is not a host name"),
        running(ServerSettings(EngineConfig("embed", engine=ENGINE), allowed_hosts=(name,))),
    ):
        pass


# -- doubled keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/embeddings", '{"input": "a", "input": "b"}', "input"),
        ("/v1/embeddings", '{"input": "a", "in\\u0070ut" : "b"}', "input"),
        ("/v1/embeddings", '{"input": "a", "model": null,\n"model"\t:null}', "model"),
        ("/generate", '{"prompts": ["x"], "nothing": null, "nothing": null}', "nothing"),
        ("/v1/batches", '{"input_file_id": "a", "endpoint": "b", "metadata": {"k": "1", "k": "2"}}', "k"),
        ("/v1/batches", '{"input_file_id": "a", "endpoint": "b", "endpoint": "c"}', "endpoint"),
        ("/tokenize", '{"prompt": "a", "prompt": "b"}', "prompt"),
    ],
)
def test_a_key_given_twice_is_refused_by_name(server: Running, path: str, body: str, key: str) -> None:
    answer = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("doubled_key", key)
    assert repr(key) in error["message"]


def test_the_same_key_in_two_objects_is_none() -> None:
    settings = ServerSettings(EngineConfig(task="generate", engine="tests.integration.serving.engines:Talker"))
    messages = [{"role": "user", "content": 'a: b, "role": c'}] * 2
    with running(settings) as server:
        assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 200
        doubled = json.dumps({"messages": messages}).replace('"role": "user"', '"role": "system", "role": "user"', 1)
        answer = server.client.post(
            "/v1/chat/completions", content=doubled, headers={"content-type": "application/json"}
        )
        assert answer.json()["error"]["param"] == "role"


def test_texts_full_of_quotes_and_colons_are_taken(server: Running) -> None:
    for text in ('{"a": 1, "a": 2}', '"":":"', "\\", "a:b:c", '":', '\U0001f600":'):
        content = json.dumps({"input": [text, text]}).encode()
        answer = server.client.post("/v1/embeddings", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


def test_a_line_of_a_batch_with_a_key_given_twice_is_named(server: Running) -> None:
    good = '{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a: \\"b\\": c"}}'
    lines = [
        good,
        good.replace('"custom_id": "a"', '"custom_id": "b", "custom_id": "c"'),
        good.replace('"body": {', '"body": {"input": "x", ').replace('"a"', '"d"'),
    ]
    file = server.client.post(
        "/v1/files", files={"file": ("in.jsonl", "\n".join(lines).encode())}, data={"purpose": "batch"}
    ).json()["id"]
    batch = server.post("/v1/batches", {"input_file_id": file, "endpoint": "/v1/embeddings"}).json()["id"]

    def state() -> dict[str, Any]:
        found: dict[str, Any] = server.client.get(f"/v1/batches/{batch}").json()
        return found

    until(lambda: state()["status"] == "failed")
    found = [(error["line"], error["code"], error["param"]) for error in state()["errors"]["data"]]
    assert found == [(2, "doubled_key", "custom_id"), (3, "doubled_key", "input")]


# -- refused values -----------------------------------------------------------------------------------------------


def test_what_is_cut_from_a_refused_value_is_marked(server: Running) -> None:
    for body in ({"prompt_name": "q" * 300}, {"q" * 300: 1}, {"model": "m" * 300}):
        message = server.post("/v1/embeddings", {"input": "x", **body}).json()["error"]["message"]
        assert "…" in message and "(300 characters)" in message
        assert len(message) < 1_000


# -- the log and connections --------------------------------------------------------------------------------------


def test_the_access_log_names_the_client_and_its_key(caplog: pytest.LogCaptureFixture) -> None:
    keys = read_keys(None, "k1")
    settings = ServerSettings(EngineConfig("embed", engine=ENGINE), keys=keys)
    with caplog.at_level(logging.INFO, "headrace.access"), running(settings) as server:
        server.post("/v1/embeddings", {"input": "x"}, headers={"authorization": "Bearer k1"})
        server.client.get("/metrics", headers={"authorization": "Bearer k1"})
        server.post("/v1/embeddings", {"input": "x"})
    facts = [record.__dict__["facts"] for record in caplog.records if record.name == "headrace.access"]
    assert [(fact["client"], fact["key"], fact["status"]) for fact in facts] == [
        ("127.0.0.1", keys[0].name, 200),
        ("127.0.0.1", keys[0].name, 200),
        ("127.0.0.1", None, 401),
    ]


def test_an_idle_connection_is_kept_longer_than_clients_keep_it(server: Running) -> None:
    assert ServeLimits().keep_alive_s >= 60  # httpx: 5 s; pooled balancers: 60 s
    assert server.server.config.timeout_keep_alive == ServeLimits().keep_alive_s


def test_keep_alive_is_obeyed() -> None:
    with running(ServerSettings(EngineConfig("embed", engine=ENGINE), limits=ServeLimits(keep_alive_s=1))) as server:
        with connect(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            got = b""
            while part := connection.recv(65_536):
                got += part
        assert got.startswith(b"HTTP/1.1 200")
