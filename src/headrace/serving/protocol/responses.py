"""Answers as bytes, made once: what a route returns is not looked through again."""

from __future__ import annotations

import base64
import json
from array import array
from sys import byteorder
from typing import Any

import orjson
from fastapi import Response


class JsonReply(Response):
    """A JSON body: arrays become lists, and a number that JSON has no word for, such as NaN, null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """`content` as JSON."""
        try:
            return orjson.dumps(content, default=plain, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits: both may come in as JSON
            return json.dumps(content, separators=(",", ":"), default=plain).encode()


def plain(value: Any) -> Any:
    """An array or a number of NumPy's as what JSON knows.

    Raises:
        TypeError: it is neither.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an output of type {type(value).__name__} is no JSON")


def as_base64(vector: Any) -> str:
    """A vector's float32 numbers, little-endian, in base64: how OpenAI's client asks for them."""
    if hasattr(vector, "astype"):
        return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
