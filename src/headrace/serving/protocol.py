"""uvicorn's HTTP protocol with a bound on headers: on their size, and on the time a connection may take over them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.serving.errors import error_body
from headrace.serving.limits import ServeLimits

_BODY = json.dumps(error_body(431, "the request headers are too long", "headers_too_long")).encode()
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: " + str(len(_BODY)).encode() + b"\r\n\r\n" + _BODY
)
_SLICE = 16 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Counts what comes between the first byte of a request and the end of its headers."""

    limits: ServeLimits
    """Set on a subclass: uvicorn makes one object for each connection, and knows nothing of limits."""
    _header_bytes = 0
    _in_headers = False
    _timer: asyncio.TimerHandle | None = None

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
                    self.transport.write(_TOO_LARGE)
                    self.transport.close()
                    return
        if self._in_headers and self._timer is None:  # few come in pieces: the others need no timer
            self._timer = self.loop.call_later(self.limits.body_timeout_s, self._too_slow)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._done_with_headers()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._done_with_headers()
        super().connection_lost(exc)

    def _done_with_headers(self) -> None:
        self._in_headers = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self.transport.close()


def protocol_options(limits: ServeLimits) -> dict[str, Any]:
    """What `uvicorn.Config` is told about connections."""
    protocol = type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
    return {"http": protocol, "ws": "none", "loop": "uvloop"}
