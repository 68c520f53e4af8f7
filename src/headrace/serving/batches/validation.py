"""Validates the input file of a batch before it runs, like OpenAI."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.engines.choosing.served import ANY_NAME, is_nameless
from headrace.errors import ConfigError, misspelt
from headrace.io.formats.openai_batch import LINE_FIELDS
from headrace.io.storage.files import look_at
from headrace.io.storage.rows import check_is_text, line_blocks, parse_object
from headrace.openai_protocol import batch_error
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import HEAVY_BYTES, check_doubled, check_values
from headrace.serving.state import no_such_model
from headrace.wording import shown, spelled

_HEAD = 64
"""Bytes that tell a file of another kind."""
MOST_ERRORS = 100
"""Validation stops after this many errors."""


@dataclass(frozen=True, slots=True)
class LineRules:
    """Requirements for each line."""

    url: str
    """The batch's endpoint."""
    models: Sequence[str]
    """The names of the models that have the endpoint."""
    max_line_bytes: int
    """The same limit as for an HTTP request body."""
    forbidden: frozenset[str] = frozenset()
    """Those that the batch's key may not use."""
    named: bool = False
    """Whether each line must name its model."""
    several: bool = False
    """Whether the server has several models, for this endpoint or others."""


@dataclass(slots=True)
class ValidatedFile:
    requests: int = 0
    errors: list[JsonObject] = field(default_factory=list)
    """In OpenAI's format: code, message, line (1-based), param."""

    def refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        """Add an error of a line, or of the whole file."""
        self.errors.append(batch_error(code, spelled(message, "flags"), line, param))


def validate(path: Path, rules: LineRules, stopped: Callable[[], bool]) -> ValidatedFile:
    """Validate every line of a batch file, with 8 bytes of memory per line. Blocks; ends early if `stopped()`.

    Raises:
        ConfigError, JobError, OSError: the file cannot be read.
    """
    found = ValidatedFile()
    digests = array("Q")
    with path.open("rb") as file:
        start = file.read(_HEAD)
    try:
        check_is_text(start, look_at(path))
    except ConfigError as error:
        what = str(error).removeprefix(str(path)).partition(";")[0].partition(":")[0]  # without a job's way out
        found.refuse(None, "invalid_file", f"the input file{what}: send JSON Lines in UTF-8")
        return found
    for number, line in _lines(path):
        if stopped() or len(found.errors) >= MOST_ERRORS:
            return found
        found.requests += 1
        identity = _check(line, number, rules, found)
        if identity is not None:
            digests.append(_digest(identity))
    if not found.requests:
        found.refuse(None, "empty_file", "the input file contains no requests")
    _refuse_duplicates(path, rules, digests, found)
    found.errors.sort(key=_line_of)
    return found


def _line_of(error: JsonObject) -> int:
    line = error["line"]
    return line if isinstance(line, int) else 0


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    for lines, _ in line_blocks(look_at(path)):
        for line in lines:
            number += 1
            if line and not line.isspace():
                yield number, line


def _check(line: bytes, number: int, rules: LineRules, found: ValidatedFile) -> str | None:
    """The custom_id of the request on a line; None if the line is refused."""
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
        found.refuse(number, "invalid_json_line", "the line is not a JSON object")
        return None
    try:
        body = row.get("body")
        check_doubled(line, len(row) + (len(body) if isinstance(body, dict) else 0))
    except ApiError as error:
        found.refuse(number, error.body["error"]["code"], error.detail, error.body["error"]["param"])
        return None
    problem = _problem(row, rules)
    if problem is not None:
        code, message, field = problem
        if field not in row:
            message += misspelt(row, LINE_FIELDS)
        found.refuse(number, code, message, field)
        return None
    return str(row["custom_id"])


def _problem(row: Mapping[str, object], rules: LineRules) -> tuple[str, str, str] | None:
    """Code, message and field of the first error of a request; None if it is valid."""
    identity, body = row.get("custom_id"), row.get("body")
    if not isinstance(identity, str) or not identity or not _is_unicode(identity):
        return "invalid_custom_id", f"custom_id is {shown(identity, 80)}: it must be a non-empty string", "custom_id"
    if row.get("method") != "POST":
        return "invalid_method", f"method is {shown(row.get('method'), 80)}: it must be POST", "method"
    if row.get("url") != rules.url:
        return "mismatched_url", f"url is {shown(row.get('url'), 80)}: the batch's endpoint is {rules.url}", "url"
    if not isinstance(body, dict):
        return "invalid_body", f"body is of type {type(body).__name__}: it must be an object", "body"
    if unknown := [name for name in row if name not in LINE_FIELDS]:
        return "unknown_field", f"unknown field {shown(unknown[0])}; known: {', '.join(LINE_FIELDS)}", unknown[0]
    return problem_of_model(body, rules)


def problem_of_model(body: Mapping[str, object], rules: LineRules) -> tuple[str, str, str] | None:
    """Code, message and field of what is wrong with the model of a request; None if it is right."""
    model = body.get("model")
    if model is None:
        if not rules.named:
            return None
        known = ", ".join(map(repr, rules.models))
        message = f"model is missing; {rules.url} has {known}{misspelt(body, ('model',))}"
        return "missing_model", message, "body.model"
    nameless = not rules.named and is_nameless(model)
    if model not in rules.models and ANY_NAME not in rules.models and not nameless:
        return "model_not_found", no_such_model(model, rules.models, several=rules.several), "body.model"
    if model in rules.forbidden:
        return "model_not_allowed", f"this API key may not use model {model!r}", "body.model"
    return None


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(identity: str) -> int:
    raw = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little")


def _refuse_duplicates(path: Path, rules: LineRules, digests: array[int], found: ValidatedFile) -> None:
    """Refuse lines with a repeated `custom_id`. The file is read again only if two digests are equal."""
    ordered = np.sort(np.frombuffer(digests, np.uint64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return
    first: dict[str, int] = {}
    for number, line in _lines(path):
        if len(found.errors) >= MOST_ERRORS:
            return
        identity = _check(line, number, rules, ValidatedFile())
        if identity is None or _digest(identity) not in suspects:
            continue
        before = first.setdefault(identity, number)
        if before != number:
            message = f"custom_id {shown(identity, 200)} is already used on line {before}; each must be unique"
            found.refuse(number, "duplicate_custom_id", message, "custom_id")
