"""The id of a request, from the client or generated. It is returned as `X-Request-ID` and logged."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable

HEADER = b"x-request-id"
HEADERS = HEADER, b"request-id"
"""Those that tell it; Anthropic's clients read the second."""
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_process = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_id() -> str:
    return f"req_{_process}{next(_numbers):08x}"


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id if it is valid, otherwise a new one."""
    for name, value in headers:
        if name == HEADER and _VALID.fullmatch(value):
            return value.decode()
    return new_id()
