"""A way to a server on which calls fail and come late."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

Fault = Callable[[int], str]
"""The number of a call to what becomes of it: "", "refused", "dropped", "cut", "lost", or "late"."""

KINDS = ("refused", "dropped", "cut", "lost", "late")


def every_tenth(call: int) -> str:
    """One call in ten goes wrong, each kind in its turn."""
    return KINDS[call // 10 % len(KINDS)] if call % 10 == 0 else ""


class FaultyWay(ThreadingHTTPServer):
    """A proxy before a server."""

    def __init__(self, host: str, port: int, fault: Fault, late_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = (host, port)
        self.late_s = late_s
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
        way = cast("FaultyWay", self.server)
        kind = way.next_fault()
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed in the middle of a put, which a store does not take then
            self.close_connection = True
            return
        self.close_connection = kind in ("dropped", "lost", "cut")
        if kind == "dropped":
            return
        if kind == "refused":
            self.send_response(503, "Slow Down")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind == "late":
            time.sleep(way.late_s)
        upstream = http.client.HTTPConnection(*way.upstream, timeout=60)
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
def faulty_way(host: str, port: int, fault: Fault, late_s: float = 1.0) -> Iterator[FaultyWay]:
    """The proxy, running. A call that is late comes through all the same, though its client was killed meanwhile."""
    way = FaultyWay(host, port, fault, late_s)
    thread = threading.Thread(target=way.serve_forever, name="proxy", daemon=True)
    thread.start()
    try:
        yield way
    finally:
        way.shutdown()
        way.server_close()
        thread.join()
