"""Dead letters: what became of the records that could not be processed, one JSON line each."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.records import Failed


def encode_failures(failures: Sequence[Failed]) -> bytes:
    """Dead letters, one line each: position, id, reason, message, attempts and the record as it was read."""
    return encode_letters(letter(failed) for failed in failures)


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


def encode_letters(letters: Iterable[Mapping[str, Any]]) -> bytes:
    """Dead letters as lines, whatever the records hold."""
    # ASCII, so that a lone surrogate, which JSON can spell and UTF-8 cannot, does not fail the failure's own report.
    return "".join([json.dumps(row, default=_plain) + "\n" for row in letters]).encode()


def _plain(value: Any) -> Any:
    """Whatever a row may hold: a record's own failure must never fail for what the record is."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    return value.tolist() if hasattr(value, "tolist") else str(value)
