"""Strict JSON encoding, without NaN and infinity, which JSON lacks."""

from __future__ import annotations

import base64
import datetime
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from headrace.errors import attempted
from headrace.wording import spelled

OnNan: TypeAlias = Literal["null", "error"]
"""How to write NaN and infinities: as null, or as an error of the record."""


class StrictJson:
    """Encodes values as JSON.

    Args:
        default: converts a value of another type; raises TypeError if it cannot be written.
    """

    def __init__(
        self,
        default: Callable[[object], object],
        on_nan: OnNan = "null",
        *,
        compact: bool = True,
        ascii_only: bool = False,
    ) -> None:
        self._default = default
        self._on_nan = on_nan
        self.encode = json.JSONEncoder(
            ensure_ascii=ascii_only,
            separators=(",", ":") if compact else None,
            default=default,
            allow_nan=False,
        ).encode
        """Encodes values without NaN and infinities; raises ValueError for others."""
        self.nulled = 0
        """Numbers written as null so far."""

    def dump(self, value: object) -> str:
        """The value as JSON.

        Raises:
            TypeError, ValueError, RecursionError: it cannot be written; with `on_nan="error"` also for NaN.
        """
        try:
            return self.encode(value)
        except ValueError:
            before = self.nulled
            plain = self._without_nan(value)
            if self.nulled == before:
                raise  # for example a circular reference
            if self._on_nan == "error":
                self.nulled = before
                raise _nan_error() from None
            return self.encode(plain)

    def count_nulled(self, numbers: int) -> None:
        """Count numbers that a caller has written as null.

        Raises:
            ValueError: there are some, and `on_nan` is "error".
        """
        if numbers and self._on_nan == "error":
            raise _nan_error()
        self.nulled += numbers

    def text(self, value: object) -> str | None:
        """The value as a text: itself if it is one, null as None, and others as JSON, if that is no text in quotes.

        Raises:
            TypeError, ValueError, RecursionError: see `dump`.
        """
        if value is None or isinstance(value, str):
            return value
        text = self.dump(value)
        if text == "null":
            return None
        return str(json.loads(text)) if text.startswith('"') else text

    def _without_nan(self, value: object) -> object:
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            self.nulled += 1
            return None
        if isinstance(value, dict):
            return {self._key(key): self._without_nan(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._without_nan(inner) for inner in value]
        if isinstance(value, (str, int)) or value is None:
            return value
        return self._without_nan(self._default(value))

    def _key(self, key: object) -> object:
        if not isinstance(key, float) or math.isfinite(key):
            return key
        self.nulled += 1
        return str(key)


def _nan_error() -> ValueError:
    return ValueError(spelled("it holds NaN or an infinity, which JSON lacks; ``on_nan=null`` writes null"))


def json_default(value: object) -> object:
    """The replacement for a plain value without a JSON type: arrays become lists; dates, times and UUIDs text.

    Raises:
        TypeError: there is none.
    """
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind == "M":
        return _moment_text(str(value))
    if hasattr(value, "tolist") and kind != "m":
        return value.tolist()
    raise TypeError(
        f"an output of type {type(value).__name__} cannot be written as JSON; make a text or numbers of it, or write "
        "to a .parquet file"
    )


def _moment_text(text: str) -> str:
    """NumPy's text of a moment, with as many digits as Python writes: none, six, or nine if it has nanoseconds."""
    whole, _, digits = text.partition(".")
    if not digits.strip("0"):
        return whole
    digits = digits.ljust(9, "0")
    return f"{whole}.{digits[:6]}" if digits.endswith("000") and len(digits) == 9 else f"{whole}.{digits}"


def own_text(value: object) -> object:
    """The text of a value; bytes as in dead letters.

    Raises:
        TypeError: its class has none but that of every object, with an address.
    """
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if getattr(value, "ndim", None):
        return json_default(value)
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        way_out = spelled("make one with a function (``prepare``)")
        raise TypeError(f"a value of type {type(value).__name__} has no text; {way_out}")
    return str(value)


def depth(value: object, limit: int) -> int:
    """How deep dicts and lists are nested in a value: 0 for a plain one, at most `limit`."""
    nested, deepest = (list, tuple, Mapping), 0
    level = [value] if isinstance(value, nested) and value else []
    while level and deepest < limit:
        deepest += 1
        inner = (inside for item in level for inside in (item.values() if isinstance(item, Mapping) else item))
        # A value may contain the same value many times, or itself. Skip plain values, as there may be very many.
        level = list({id(inside): inside for inside in inner if isinstance(inside, nested) and inside}.values())
    return deepest


def dump_any(value: object, default: Callable[[object], object]) -> str:
    """A value of whatever kind as ASCII JSON, even if deeply nested, circular, or with methods that raise."""
    out: list[str] = []
    inside: set[int] = set()
    stack: list[tuple[str, Any]] = [("value", value)]
    while stack:
        kind, item = stack.pop()
        if kind == "text":
            out.append(item)
        elif kind == "leave":
            inside.discard(item)
        elif not isinstance(item, (Mapping, list, tuple)):
            stack.append(_scalar(item, default))
        elif id(item) in inside:
            out.append('"(refers to itself)"')
        else:
            inside.add(id(item))
            stack += [("leave", id(item)), *reversed(_opened(item))]
    return "".join(out)


def _opened(item: Mapping[object, object] | Sequence[object]) -> list[tuple[str, object]]:
    """The tokens of a dict or list, its values not yet written."""
    if isinstance(item, Mapping):
        pairs = [[("text", json.dumps(safe_text(key)) + ": "), ("value", inner)] for key, inner in item.items()]
        opening, closing = "{", "}"
    else:
        pairs = [[("value", inner)] for inner in item]
        opening, closing = "[", "]"
    tokens: list[tuple[str, object]] = [("text", opening)]
    for number, pair in enumerate(pairs):
        tokens += [("text", ", "), *pair] if number else pair
    return [*tokens, ("text", closing)]


def _scalar(item: object, default: Callable[[object], object]) -> tuple[str, object]:
    if isinstance(item, float) and not math.isfinite(item):
        return "text", "null"
    if item is None or isinstance(item, (str, bool, float)):
        return "text", json.dumps(item)
    if isinstance(item, int):  # of more than 4,300 digits, Python makes no text
        digits = attempted(int.__repr__, item)
        return "text", digits if isinstance(digits, str) else json.dumps(safe_text(item))
    found = attempted(default, item)  # whose methods may raise anything, and something must be written
    return ("text", json.dumps(safe_text(item))) if isinstance(found, BaseException) else ("value", found)


def safe_text(item: object) -> str:
    """The text of any object, even if its methods raise."""
    text = attempted(str, item)
    return f"(a {type(item).__name__} that cannot be shown)" if isinstance(text, BaseException) else text
