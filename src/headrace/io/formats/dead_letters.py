"""Dead letters: what became of the records that could not be processed, one JSON line each."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.io.formats.strict_json import StrictJson, depth, dump_any
from headrace.records import Failed

_DEEPEST = 64
"""A record that is nested deeper is kept as the text of its JSON: readers of JSON have limits of their own."""


def letter(failed: Failed) -> dict[str, Any]:
    """One dead letter."""
    return {
        "position": failed.record.position,
        "id": failed.record.id,
        "reason": failed.reason,
        "message": failed.message,
        "attempts": failed.attempts,
        "record": failed.record.data,
    }


def encode_failures(failures: Sequence[Failed]) -> bytes:
    """Dead letters, one line each: position, id, reason, message, attempts and the record as it was read."""
    return encode_letters(letter(failed) for failed in failures)


def encode_letters(letters: Iterable[Mapping[str, Any]]) -> bytes:
    """Dead letters as lines, whatever the records hold; NaN and infinities become null."""
    return "".join([_line(row) + "\n" for row in letters]).encode()


def _line(row: Mapping[str, Any]) -> str:
    # ASCII, so that a lone surrogate, which JSON can spell and UTF-8 cannot, does not fail the failure's own report.
    try:
        line = _JSON.dump(row)
        if line.count("[") + line.count("{") <= _DEEPEST or depth(row["record"], _DEEPEST) < _DEEPEST:
            return line
    except BaseException:  # noqa: BLE001 - a record's own failure must never fail for what the record is
        if depth(row["record"], _DEEPEST) < _DEEPEST:
            return dump_any(row, _plain)
    return dump_any({**row, "record": dump_any(row["record"], _plain)}, _plain)


def _plain(value: Any) -> Any:
    """What a value becomes that JSON has no type for."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


_JSON = StrictJson(_plain, compact=False, ascii_only=True)
