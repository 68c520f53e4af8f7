"""A batch's input file is looked through before anything of it is computed, as OpenAI does."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.io.storage.files import look_at
from headrace.io.storage.lines import line_blocks, parse_object
from headrace.openai_protocol import batch_error
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import HEAVY_BYTES, check_values

MOST_ERRORS = 100
"""More are not looked for: a file with so many wants mending as a whole."""


@dataclass(frozen=True, slots=True)
class LineRules:
    """What each line must be."""

    url: str
    """The batch's endpoint."""
    model: str
    """The one that is served; a line may name none."""
    max_line_bytes: int
    """What a request may have over HTTP."""


@dataclass(slots=True)
class ValidatedFile:
    """What a file holds."""

    requests: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    """As OpenAI's batches have them: code, message, line (from 1 on), param."""

    def refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        """Note what is wrong with a line, or with the file as a whole."""
        self.errors.append(batch_error(code, message, line, param))


def look_through(path: Path, rules: LineRules, stopped: Callable[[], bool]) -> ValidatedFile:
    """Every line of a batch file, in bounded memory: 8 bytes are kept of each. Blocks; ends early when `stopped`.

    Raises:
        ConfigError, JobError, OSError: the file cannot be read.
    """
    found = ValidatedFile()
    digests = array("Q")
    for number, line in _lines(path):
        if stopped() or len(found.errors) >= MOST_ERRORS:
            return found
        found.requests += 1
        row = _checked(line, number, rules, found)
        if row is not None:
            digests.append(_digest(row["custom_id"]))
    if not found.requests:
        found.refuse(None, "empty_file", "the input file holds no request")
    _refuse_doubles(path, rules, digests, found)
    found.errors.sort(key=lambda error: error["line"] or 0)
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1 on."""
    number = 0
    for lines, _ in line_blocks(look_at(path)):
        for line in lines:
            number += 1
            if line and not line.isspace():
                yield number, line


def _checked(line: bytes, number: int, rules: LineRules, found: ValidatedFile) -> Mapping[str, Any] | None:
    """The request on a line; None for one that is refused."""
    if len(line) > rules.max_line_bytes:
        found.refuse(number, "line_too_long", f"the line is longer than the {rules.max_line_bytes:,} bytes allowed")
        return None
    try:
        if len(line) > HEAVY_BYTES:
            check_values(line)
    except ApiError as error:
        found.refuse(number, "too_many", error.detail.replace("the body", "the line"))
        return None
    try:
        row = parse_object(line)
    except (ValueError, TypeError, RecursionError):
        found.refuse(number, "invalid_json_line", "the line is no JSON object")
        return None
    problem = _problem(row, rules)
    if problem is not None:
        found.refuse(number, *problem)
        return None
    return row


def _problem(row: Mapping[str, Any], rules: LineRules) -> tuple[str, str, str] | None:
    """Code, message and field of what is wrong with a request."""
    identity, body = row.get("custom_id"), row.get("body")
    if not isinstance(identity, str) or not identity or not _is_unicode(identity):
        return "invalid_custom_id", f"custom_id is {identity!r:.80}: it must be a text", "custom_id"
    if row.get("method") != "POST":
        return "invalid_method", f"method is {row.get('method')!r:.80}: it must be POST", "method"
    if row.get("url") != rules.url:
        return "mismatched_url", f"url is {row.get('url')!r:.80}: the batch's endpoint is {rules.url}", "url"
    if not isinstance(body, dict):
        return "invalid_body", f"body is of type {type(body).__name__}: it must be an object", "body"
    model = body.get("model")
    if model is not None and model != rules.model:
        return "model_not_found", f"there is no model {model!r:.200}; this server has {rules.model!r}", "body.model"
    return None


def _is_unicode(text: str) -> bool:
    """Whether it can be written: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(identity: str) -> int:
    raw = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little")


def _refuse_doubles(path: Path, rules: LineRules, digests: array[int], found: ValidatedFile) -> None:
    """Name the lines whose `custom_id` came before. The file is read again only where two digests are equal."""
    ordered = np.sort(np.frombuffer(digests, np.uint64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return
    first: dict[str, int] = {}
    for number, line in _lines(path):
        if len(found.errors) >= MOST_ERRORS:
            return
        row = _checked(line, number, rules, ValidatedFile())
        if row is None or _digest(row["custom_id"]) not in suspects:
            continue
        before = first.setdefault(row["custom_id"], number)
        if before != number:
            message = f"custom_id {row['custom_id']!r:.200} is that of line {before} too; each must be given once"
            found.refuse(number, "duplicate_custom_id", message, "custom_id")
