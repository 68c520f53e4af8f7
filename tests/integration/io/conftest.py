"""A real S3 server on loopback, and a way to it on which calls fail and come late."""

from __future__ import annotations

import http.client
import logging
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

Fault = Callable[[int], str]
"""The number of a call to what becomes of it: "", "refused", "dropped", "cut", "lost", or "late"."""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """Host and port of the server."""
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


class FaultyWay(ThreadingHTTPServer):
    """A proxy before a server."""

    def __init__(self, host: str, port: int, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = (host, port)
        self._fault = fault
        self._lock = threading.Lock()
        self._calls = 0
        self.seen: list[str] = []

    def next_fault(self) -> str:
        """What becomes of the next call."""
        with self._lock:
            self._calls += 1
            kind = self._fault(self._calls)
            self.seen += [kind] if kind else []
            return kind

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may hang up too."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self.forward
        raise AttributeError(name)

    def forward(self) -> None:
        way = cast("FaultyWay", cast("socketserver.BaseServer", self.server))
        kind = way.next_fault()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = kind in ("dropped", "lost", "cut")
        if kind == "dropped":
            return
        if kind == "refused":
            self.send_response(503, "Slow Down")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind == "late":
            time.sleep(1.0)
        upstream = http.client.HTTPConnection(*way.upstream, timeout=20)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if kind == "lost":  # the call has come through; only its answer has not
            return
        self.send_response(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if kind == "cut" else content)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@contextmanager
def faulty_way(host: str, port: int, fault: Fault) -> Iterator[FaultyWay]:
    """The proxy, running."""
    way = FaultyWay(host, port, fault)
    thread = threading.Thread(target=way.serve_forever, name="proxy", daemon=True)
    thread.start()
    try:
        yield way
    finally:
        way.shutdown()
        way.server_close()
        thread.join()


@pytest.fixture
def use_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Any]]:
    """Points S3 at a host and port, and gives its file system."""
    s3fs = pytest.importorskip("s3fs")

    def use(host: str, port: int) -> Any:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem(use_listings_cache=False)

    yield use
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(s3_server: tuple[str, int], use_s3: Callable[[str, int], Any]) -> Any:
    """The file system, with an empty bucket named `rows`."""
    store = use_s3(*s3_server)
    if store.exists("rows"):
        store.rm("rows", recursive=True)
    store.mkdir("rows")
    return store
