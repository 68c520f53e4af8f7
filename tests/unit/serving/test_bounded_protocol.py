"""How a server writes its answers to a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from headrace.serving.http.bounded_protocol import protocol_options
from headrace.serving.limits import ServeLimits

REQUEST = b"GET /answer HTTP/1.1\r\nhost: a\r\n\r\n"
App = Callable[[Any, Any, Any], Awaitable[None]]


class Connection(asyncio.Transport):
    """Keeps what is written, in the pieces in which it is."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


def written(app: App, *requests: bytes, feeds: list[Callable[[bytes], None]] | None = None) -> list[bytes]:
    """What is written for requests that come one after the other.

    Args:
        feeds: takes the function by which more comes.
    """

    async def connected() -> list[bytes]:
        config = uvicorn.Config(app, **protocol_options(ServeLimits()), date_header=False, server_header=False)
        config.load()
        connection, state = Connection(), ServerState()
        make: Any = config.http_protocol_class
        protocol = make(config=config, server_state=state, app_state={})
        protocol.connection_made(connection)
        if feeds is not None:
            feeds.append(protocol.data_received)
        for request in requests:
            protocol.data_received(request)
            for _ in range(10):
                await asyncio.sleep(0)
        protocol.connection_lost(None)
        return connection.written

    return asyncio.run(connected())


def answers(*bodies: bytes | memoryview, headers: tuple[tuple[bytes, bytes], ...] = (), waits: bool = False) -> App:
    """An app that sends these bodies."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies, 1):
            if waits:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    return app


def test_an_answer_is_written_at_once() -> None:
    whole = written(answers(b"{}", headers=((b"content-length", b"2"),)), REQUEST, REQUEST)
    assert whole == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"] * 2


def test_the_head_of_a_stream_does_not_wait_for_its_first_piece() -> None:
    pieces = written(answers(b"HTTP/ is a word", b"b", waits=True), REQUEST)
    assert pieces[0].endswith(b"transfer-encoding: chunked\r\n\r\n")
    assert b"".join(pieces[1:]) == b"f\r\nHTTP/ is a word\r\n1\r\nb\r\n0\r\n\r\n"


def test_a_body_may_be_a_view_of_memory() -> None:
    pieces = written(answers(memoryview(b"{}"), headers=((b"content-length", b"2"),), waits=True), REQUEST)
    assert pieces == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"{}"]


def test_a_head_alone_is_written_before_the_connection_closes() -> None:
    request = REQUEST.replace(b"GET", b"HEAD").replace(b"host: a", b"host: a\r\nconnection: close")
    [head] = written(answers(b"", headers=((b"content-length", b"9"),)), request)
    assert head == b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n"


def test_an_error_comes_after_the_head_of_an_answer_that_is_under_way() -> None:
    feeds: list[Callable[[bytes], None]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": ()})
        feeds[0](b"no request\r\n\r\n")

    pieces = written(app, REQUEST, feeds=feeds)
    assert [piece[:12] for piece in pieces] == [b"HTTP/1.1 200", b"HTTP/1.1 400"]
