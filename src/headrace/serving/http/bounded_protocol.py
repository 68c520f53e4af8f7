"""uvicorn's HTTP protocol with a bound on headers: on their size, and on the time a connection may take over them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.openai_protocol import error_body
from headrace.serving.http.request_id import new_id
from headrace.serving.limits import ServeLimits

_SLICE = 16 * 1024


def _answer(status: bytes, message: str, code: str) -> bytes:
    """A whole response for what never becomes a request, after which the connection is closed."""
    body = json.dumps(error_body(int(status.split()[0]), message, code)).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\n"
    return head % (status, new_id().encode()) + b"content-length: %d\r\n\r\n" % len(body) + body


class BoundedProtocol(HttpToolsProtocol):
    """Counts the bytes of headers, and waits for no request for ever."""

    limits: ServeLimits
    """Set on a subclass: uvicorn makes one object for each connection, and knows nothing of limits."""
    _header_bytes = 0
    _in_headers = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.limits.body_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Parse what came, no more at once than a header may be too long by."""
        for start in range(0, len(data), _SLICE):
            if self.transport.is_closing() or self.parser is None:
                return
            part = data[start : start + _SLICE]
            super().data_received(part)
            if self._in_headers:
                self._header_bytes += len(part)
                if self._header_bytes > self.limits.max_header_bytes:
                    self._refuse(
                        b"431 Request Header Fields Too Large", "the request headers are too long", "headers_too_long"
                    )
                    return
        if self._in_headers and self._timer is None:  # few come in pieces: the others need no timer
            self._timer = self.loop.call_later(self.limits.body_timeout_s, self._too_slow)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._done_with_headers()
        self._in_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._done_with_headers()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of every other error."""
        self._refuse(b"400 Bad Request", msg, "invalid_http")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._done_with_headers()
        super().connection_lost(exc)

    def _done_with_headers(self) -> None:
        self._in_headers = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes, message: str, code: str) -> None:
        self.transport.write(_answer(status, message, code))
        self.transport.close()

    def _too_slow(self) -> None:
        self.transport.close()


def protocol_options(limits: ServeLimits) -> dict[str, Any]:
    """What `uvicorn.Config` is told about connections."""
    protocol = type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
    return {"http": protocol, "ws": "none", "loop": "uvloop"}
