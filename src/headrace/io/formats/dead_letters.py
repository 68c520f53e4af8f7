"""Dead letters: failed records, one JSON line each."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence

from headrace.errors import attempted
from headrace.io.formats.strict_json import StrictJson, depth, dump_any
from headrace.records import Failed, JoinedRow

_DEEPEST = 64
"""Records nested deeper are stored as JSON text, because JSON readers limit the depth."""

_ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>\\u[dD][89a-fA-F]..)|\\.")
"""JSON escapes: a surrogate pair, a lone surrogate, or any other."""


def dead_letter(failed: Failed) -> dict[str, object]:
    data = failed.record.data
    return {
        "position": failed.record.position,
        "id": failed.record.id,
        "reason": failed.reason,
        "message": failed.message,
        "attempts": failed.attempts,
        **({"answers": failed.answers} if failed.answers else {}),
        "record": data.read if isinstance(data, JoinedRow) else data,
    }


def encode_failures(failures: Sequence[Failed]) -> bytes:
    """Dead letters, one line each: position, id, reason, message, attempts and the record as it was read."""
    return encode_dead_letters(dead_letter(failed) for failed in failures)


def encode_dead_letters(dead_letters: Iterable[Mapping[str, object]]) -> bytes:
    """Dead letters as lines, for any records; NaN and infinities become null, lone surrogates text."""
    return "".join([_readable(row) + "\n" for row in dead_letters]).encode()


def _readable(row: Mapping[str, object]) -> str:
    """The line, with lone surrogates, which readers refuse, replaced by the text of their escape."""
    line, surrogates = _without_surrogates(_line(row))
    if not surrogates:
        return line
    message = f"{row['message']} ({surrogates} lone surrogate{'s' * (surrogates > 1)} written as text: \\uXXXX)"
    return _without_surrogates(_line({**row, "message": message}))[0]


def _without_surrogates(line: str) -> tuple[str, int]:
    """JSON in ASCII without escapes of lone surrogates, and how many there were."""
    if "\\ud" not in line:
        return line, 0
    surrogates = 0

    def escaped(match: re.Match[str]) -> str:
        nonlocal surrogates
        if match["lone"] is None:
            return match[0]
        surrogates += 1
        return "\\" + match[0]

    return _ESCAPES.sub(escaped, line), surrogates


def _line(row: Mapping[str, object]) -> str:
    # ASCII, because lone surrogates cannot be encoded in UTF-8.
    line = attempted(_JSON.dump, row)  # reporting a failure must never fail because of the record
    if isinstance(line, str) and line.count("[") + line.count("{") <= _DEEPEST:
        return line
    if depth(row["record"], _DEEPEST) < _DEEPEST:
        return line if isinstance(line, str) else dump_any(row, _plain)
    return dump_any({**row, "record": dump_any(row["record"], _plain)}, _plain)


def _plain(value: object) -> object:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


_JSON = StrictJson(_plain, compact=False, ascii_only=True)
