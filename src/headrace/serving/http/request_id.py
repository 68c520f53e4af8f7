"""The id of a request: the client's own, or one made here. It is in the response's `X-Request-ID`, and in the log."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable

HEADER = b"x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_process = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_id() -> str:
    """An id that no other request has."""
    return f"req_{_process}{next(_numbers):08x}"


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id where it is short and plain, else a new one."""
    for name, value in headers:
        if name == HEADER and _SANE.fullmatch(value):
            return value.decode()
    return new_id()
