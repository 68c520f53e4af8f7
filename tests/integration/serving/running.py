"""A server in a thread of this process, on a real socket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.waiting import until

from headrace.app.servers.server import ServerSettings, build
from headrace.serving.http.server import DrainingServer
from headrace.serving.state import ServerState


@dataclass
class Running:
    """A server under test."""

    url: str
    host: ServerState
    server: DrainingServer
    engine: Any
    thread: int
    grpc: str = ""
    """Where it serves gRPC."""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)


@contextlib.contextmanager
def running(settings: ServerSettings, *, grpc: bool = False) -> Iterator[Running]:
    """Serve while the body runs."""
    app, host = build(settings)
    over_grpc = None
    if grpc:
        from headrace.serving.http.over_grpc import GrpcAddress

        over_grpc = GrpcAddress("127.0.0.1", 0)
    server = DrainingServer(app, host, {"host": "127.0.0.1", "port": 0, "log_level": "warning"}, grpc=over_grpc)
    listed: list[str] = []
    on_ready = lambda _, routes: listed.extend(routes)  # noqa: E731
    thread = threading.Thread(target=server.run_app, args=(on_ready,), name="server-under-test")
    try:
        thread.start()
        until(lambda: listed or not thread.is_alive(), 240)
        port = server.servers[0].sockets[0].getsockname()[1]
        assert host.loaded is not None
        engine, also = host.loaded.engine, listed[-1].removeprefix("grpc://") if grpc else ""
        state = Running(f"http://127.0.0.1:{port}", host, server, engine, thread.ident or 0, also)
        with state.client:
            yield state
    finally:
        server.should_exit = True
        thread.join(240)
        assert not thread.is_alive()
