"""JSON responses, encoded directly without further validation."""

from __future__ import annotations

import base64
import json
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from sys import byteorder
from typing import TypeAlias

import numpy as np
import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from headrace.io.formats.strict_json import json_default
from headrace.serving.errors import ApiError

logger = logging.getLogger("headrace")


_PLAIN = b"content-type", b"application/json"
"""The header of most answers, beside their length."""
SendWhole: TypeAlias = Callable[[bytes, bytes], bool]
"""Sends an answer with status 200 at once: lines of headers, each with its end, and the body.

The server adds the date and `content-length`. False: nothing is sent, and the answer goes message by message.
"""


def whole_sender(send: Send) -> SendWhole | None:
    """How to answer at once, where nothing that changes messages is between: a `send` of ASGI is then a method."""
    return getattr(getattr(send, "__self__", None), "send_whole", None)


class JsonReply(Response):
    """A JSON response. Arrays become lists; NaN and infinities become null."""

    media_type = "application/json"

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """As Starlette, which most answers need not go through."""
        if headers:
            super().init_headers(headers)
        else:
            length = b"%d" % len(self.body)
            self.raw_headers = [(b"content-length", length), _PLAIN]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it: in one call, unless it has another status, headers of its own or something to do afterwards."""
        headers = self.raw_headers
        is_plain = len(headers) == 2 and headers[1] is _PLAIN and self.status_code == 200 and self.background is None
        whole = whole_sender(send) if is_plain else None
        if whole is None or not whole(b"content-type: application/json\r\n", bytes(self.body)):
            await super().__call__(scope, receive, send)

    def render(self, content: object) -> bytes:
        """`content` as JSON. Raises ApiError: as `as_json`."""
        return as_json(content)


def as_json(content: object) -> bytes:
    """Encode what goes into an answer.

    Raises:
        ApiError: 500 for an output of a user's model that JSON has no word for.
    """
    try:
        return orjson.dumps(content, default=json_default, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a lone surrogate or an integer of more than 64 bits, both possible in JSON input
        pass
    try:
        return json.dumps(content, separators=(",", ":"), default=json_default).encode()
    except TypeError as error:
        message = str(error).partition(", or ")[0]  # without a job's way out
        logger.error("an answer was not sent: %s", message)
        raise ApiError(500, message, code="engine") from error


def as_base64(vector: Iterable[float]) -> str:
    """Encode a vector as base64: of its bytes if it is quantized, else of little-endian float32, as OpenAI does."""
    if isinstance(vector, np.ndarray):
        if vector.dtype.itemsize == 1:
            return base64.b64encode(vector.tobytes()).decode()
        return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
