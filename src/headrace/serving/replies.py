"""Answers as bytes, made once: what a route returns is not looked through again."""

from __future__ import annotations

import base64
import json
from array import array
from sys import byteorder
from typing import Any

from fastapi import Response


class JsonReply(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """`content` as JSON; arrays as lists."""
        return _encode(content).encode()


def plain(value: Any) -> Any:
    """An array or a number of NumPy's as what JSON knows.

    Raises:
        TypeError: it is neither.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an output of type {type(value).__name__} is no JSON")


# Without ensure_ascii=False: half of a surrogate pair, which JSON may carry in, can go out again.
_encode = json.JSONEncoder(separators=(",", ":"), default=plain).encode


def as_base64(vector: Any) -> str:
    """A vector's float32 numbers, little-endian, in base64: how OpenAI's client asks for them."""
    numbers = array("f", vector.tolist() if hasattr(vector, "tolist") else vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
