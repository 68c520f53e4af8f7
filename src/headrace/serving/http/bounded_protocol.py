"""uvicorn's HTTP protocol, with limits on headers, and answers for clients that close their half of a connection."""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import TYPE_CHECKING, Literal, TypedDict

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.openai_protocol import error_body
from headrace.serving.http.request_id import new_id
from headrace.serving.limits import ServeLimits

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_SLICE = 16 * 1024
_CONTINUE = b"HTTP/1.1 100"
"""How an answer begins that has no body, and after which the whole request is sent."""
_OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})
"""Headers, and words of `Connection`, that ask for another protocol."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients skip it. The system of a client that has left altogether answers it by a reset, which the next one meets."""
_PROBE_S, _LONGEST_PROBE_S = 1.0, 5.0
"""Seconds to the second probe, and at most to another: each takes twice as long as the one before."""
_DROPPED = 4
"""The most that is read of a body after its answer, as a multiple of the longest that is accepted."""


def _answer(status: bytes, message: str, code: str) -> bytes:
    """A complete response to an invalid request. The connection is closed after it."""
    body = json.dumps(error_body(int(status.split()[0]), message, code)).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\n"
    return head % (status, new_id().encode()) + b"content-length: %d\r\n\r\n" % len(body) + body


class BoundedProtocol(HttpToolsProtocol):
    """Limits the size of headers and the wait for a request. A wish for another protocol is ignored.

    A client that closes its half of the connection after its request is answered all the same. After an answer that
    came before the end of the body, the rest is read and dropped: most clients read no answer before they have sent
    everything, and closing the connection meanwhile would reset it and lose the answer.
    """

    limits: ServeLimits
    """Set on a subclass, because uvicorn creates the protocol of each connection."""
    _may_drop: int | None = None
    """How many bytes are still read and dropped before the connection is closed; None while it serves."""
    _header_bytes = 0
    _in_headers = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._shown = _RequestTransport(self)
        self._timer = self.loop.call_later(self.limits.body_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Parse data in slices, so that headers cannot exceed their limit by more than one slice."""
        if self._may_drop is not None:
            self._may_drop -= len(data)
            if self._may_drop < 0:
                self.transport.close()
            return
        for start in range(0, len(data), _SLICE):
            if self.transport.is_closing() or self.parser is None:
                return
            part = data[start : start + _SLICE]
            self._unset_keepalive_if_required()
            self._parse(part)
            if self._in_headers:
                self._header_bytes += len(part)
                if self._header_bytes > self.limits.max_header_bytes:
                    self._refuse(
                        b"431 Request Header Fields Too Large", "the request headers are too long", "headers_too_long"
                    )
                    return
        if self._in_headers and self._timer is None:  # most headers arrive at once and need no timer
            self._timer = self.loop.call_later(self.limits.body_timeout_s, self._too_slow)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which stops at a wish for another protocol, such as HTTP/2, and leaves the body unread.

        A server may ignore such a wish: another parser goes on after it, as if it was not there.
        """
        try:
            while True:
                try:
                    return self.parser.feed_data(data)
                except httptools.HttpParserUpgrade as stop:
                    if self.parser.get_method() == b"CONNECT":
                        raise httptools.HttpParserInvalidMethodError("the server is no proxy") from None
                    data = self.without_upgrade() + data[stop.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    # As uvicorn: a pipelined request after the last one of a connection spoils no answer.
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_message_begin(self) -> None:
        """Start to count the headers of a request."""
        super().on_message_begin()
        self._done_with_headers()
        self._in_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._done_with_headers()
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            cycle, scope = self.cycle, self.cycle.scope
            cycle.transport = self._shown  # type: ignore[assignment] # it calls nothing else
            cycle.__class__ = _UnchunkedCycle if scope["http_version"] == "1.0" else _Cycle
            # Older releases of uvicorn look for "connection: close" while they send.
            cycle.keep_alive = cycle.keep_alive and self.parser.should_keep_alive()
            # Weak: with a strong one, each request would stay until the garbage collector comes.
            scope["headrace_cycle"] = weakref.ref(cycle)  # type: ignore[typeddict-unknown-key]
            if scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):  # an app that mounts ours has its own
                scope["path"] = "/ready"

    def on_message_complete(self) -> None:
        """End the body, unless the parser has stopped before it."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def without_upgrade(self) -> bytes:
        """The head of the request that was just read, without the wish for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP in the format of every other error."""
        self._refuse(b"400 Bad Request", msg, "invalid_http")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection, for the answers to requests that arrived whole.

        Over TLS, the other half closes too, and a client of HTTP/1.0 understands no probe.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if self._may_drop is not None or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if self.scheme == "https" or cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._probe(_PROBE_S)
        return True

    def _probe(self, again_s: float) -> None:
        """Find out whether a client that sends no more has left. Answers that are sent piece by piece tell it too."""
        if self.transport.is_closing():
            return
        if not self.pipeline and not self.cycle.response_started:
            self.transport.write(_PROBE)
        self._timer = self.loop.call_later(again_s, self._probe, min(2 * again_s, _LONGEST_PROBE_S))

    def connection_lost(self, exc: Exception | None) -> None:
        self._done_with_headers()
        super().connection_lost(exc)

    def _done_with_headers(self) -> None:
        self._in_headers = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes, message: str, code: str) -> None:
        self._shown.flush()
        self.transport.write(_answer(status, message, code))
        self._drop_rest()

    def close_after_answer(self) -> None:
        """Close the connection; if the body is still coming, when the client has closed it, or has had enough time."""
        cycle: RequestResponseCycle = self.cycle
        if cycle.more_body and cycle.response_complete:
            self._drop_rest()
        else:
            self.transport.close()
            self._flush_in_time()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is idle, or whose last answer is not read."""
        super().timeout_keep_alive_handler()
        self._flush_in_time()

    def _flush_in_time(self, before: int = 0) -> None:
        """Break off if as many bytes of the last answer are unread as `before`; look again later if fewer are."""
        left = self.transport.get_write_buffer_size()
        if left and left == before:
            self.transport.abort()
        elif left:
            self.loop.call_later(self.limits.write_timeout_s, self._flush_in_time, left)

    def _drop_rest(self) -> None:
        if self._may_drop is not None or self.transport.is_closing():
            return
        self._may_drop = _DROPPED * max(self.limits.max_body_bytes, self.limits.max_file_bytes)
        self.parser = None  # type: ignore[assignment] # as uvicorn, when a connection has ended
        self._done_with_headers()
        self._timer = self.loop.call_later(self.limits.body_timeout_s, self._too_slow)
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self.flow.resume_reading()

    def _too_slow(self) -> None:
        self.transport.close()


class _Cycle(RequestResponseCycle):
    """One request and its answer. It takes uvicorn's place, which the object already is, so it has no fields."""

    transport: _RequestTransport  # type: ignore[assignment]

    def send_whole(self, head: bytes, body: bytes) -> bool:
        """As `SendWhole` says, with what uvicorn does at the end of an answer."""
        if self.response_started or self.disconnected or not self.keep_alive or self.flow.write_paused:
            return False
        if self.scope["method"] == "HEAD":
            return False
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        default = b"".join([b"%b: %b\r\n" % one for one in self.default_headers])
        first = b"HTTP/1.1 200 OK\r\n%b%bcontent-length: %d\r\n\r\n" % (default, head, len(body))
        self.transport.writelines((first, body))
        self.message_event.set()
        self.on_response()
        return True

    def break_off(self) -> None:
        """Close the connection of a client that does not read its answer: what waits for it would stay for ever."""
        self.disconnected = True
        self.transport.abort()


class _UnchunkedCycle(_Cycle):
    """Ends an answer of unknown length by closing the connection: HTTP/1.0 knows no chunks."""

    async def send(self, message: ASGISendEvent) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _RequestTransport:
    """A connection as its requests see it: the head of an answer waits for the body, and both are written at once.

    Writing costs about as much as anything else that a small request takes.
    """

    __slots__ = ("_head", "_protocol", "abort", "is_closing", "writelines")

    def __init__(self, protocol: BoundedProtocol) -> None:
        transport = protocol.transport
        self.abort, self.is_closing, self.writelines = transport.abort, transport.is_closing, transport.writelines
        self._protocol = protocol
        self._head = b""

    def write(self, data: bytes | memoryview) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._protocol.transport.writelines((head, data))
        elif data[:5] == b"HTTP/" and data[:12] != _CONTINUE:
            self._head = bytes(data)
            self._protocol.loop.call_soon(self.flush)  # where the body comes later
        else:
            self._protocol.transport.write(data)

    def flush(self) -> None:
        """Write a head that still waits."""
        if self._head and not self.is_closing():
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._protocol.close_after_answer()


class ProtocolOptions(TypedDict):
    """Options of `uvicorn.Config`."""

    http: type[asyncio.Protocol]
    ws: Literal["none"]
    loop: Literal["uvloop"]
    timeout_keep_alive: int


def protocol_options(limits: ServeLimits) -> ProtocolOptions:
    """The connection options of `uvicorn.Config`."""
    protocol = type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
    return {"http": protocol, "ws": "none", "loop": "uvloop", "timeout_keep_alive": limits.keep_alive_s}
