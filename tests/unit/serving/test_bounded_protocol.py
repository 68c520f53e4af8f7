"""How a server writes its answers to a connection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.background import BackgroundTask
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from headrace.serving.http.bounded_protocol import protocol_options
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.responses import JsonReply

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

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    abort = close

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


def replies(status: int = 200, headers: dict[str, str] | None = None) -> App:
    """An app that answers as routes do."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await JsonReply({"a": 1}, status, headers)(scope, receive, send)

    return app


ONE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{"a":1}'


def test_an_answer_that_is_whole_is_sent_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(_: Any, message: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(RequestResponseCycle, "send", send)
    assert written(replies(), REQUEST, REQUEST) == [ONE, ONE]


def test_pipelined_requests_are_answered_in_turn() -> None:
    assert written(replies(), 3 * REQUEST) == [ONE] * 3


CLOSE = REQUEST.replace(b"host", b"connection: close\r\nhost")
OLD = REQUEST.replace(b"1.1", b"1.0")
WORD = [b"connection: close"] if b"connection: close" in b"".join(written(answers(b""), OLD)) else []
"""What uvicorn says to a client of HTTP/1.0 before it closes; older releases close without a word."""


@pytest.mark.parametrize(
    ("app", "request_", "parts"),
    [
        (replies(), OLD, [*WORD, b'{"a":1}']),
        (replies(), CLOSE, [b"connection: close", b'{"a":1}']),
        (replies(), REQUEST.replace(b"GET", b"HEAD"), [b"content-length: 7"]),
        (replies(500), REQUEST, [b"500 Internal", b'{"a":1}']),
        (replies(headers={"X-Cut": "1"}), REQUEST, [b"x-cut: 1", b'{"a":1}']),
    ],
    ids=["HTTP/1.0", "close", "HEAD", "error", "header"],
)
def test_others_are_sent_message_by_message(app: App, request_: bytes, parts: list[bytes]) -> None:
    [answer] = written(app, request_)
    assert all(part in answer for part in parts)
    assert (b'{"a":1}' in answer) == (b'{"a":1}' in parts)


def test_what_is_added_to_an_answer_after_it_is_made_counts() -> None:
    done: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reply = JsonReply({"a": 1})
        reply.headers["x-late"] = "1"
        await reply(scope, receive, send)

    async def afterwards() -> None:
        done.append("afterwards")

    async def then(scope: Any, receive: Any, send: Any) -> None:
        reply = JsonReply({"a": 1})
        reply.background = BackgroundTask(afterwards)
        await reply(scope, receive, send)

    async def typed(scope: Any, receive: Any, send: Any) -> None:
        reply = JsonReply({"a": 1})
        reply.headers["content-type"] = "application/problem+json"
        await reply(scope, receive, send)

    assert b"x-late: 1\r\n" in written(app, REQUEST)[0]
    assert b"content-type: application/problem+json\r\n" in written(typed, REQUEST)[0]
    assert written(then, REQUEST)[0].endswith(b'{"a":1}')
    assert done == ["afterwards"]


def test_a_layer_that_changes_messages_sees_them() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-layer", b"1")]
            await send(message)

        await replies()(scope, receive, changed)

    [answer] = written(app, REQUEST)
    assert b"x-layer: 1\r\n" in answer


def test_a_request_is_gone_once_the_next_one_comes() -> None:
    gone: list[bool] = []
    seen: list[Callable[[], object]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        gone.extend(cycle() is None for cycle in seen)
        seen.append(scope["headrace_cycle"])
        await replies()(scope, receive, send)

    gc.collect()
    gc.disable()
    try:
        written(app, REQUEST, REQUEST, REQUEST)
    finally:
        gc.enable()
    assert gone == [True] * 3


def test_a_connection_can_be_broken_off_from_behind_other_layers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["headrace_cycle"]().break_off()
        await send({"type": "http.response.start", "status": 200, "headers": ()})

    assert written(app, REQUEST) == []


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
