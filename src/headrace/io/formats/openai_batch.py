"""OpenAI's batch files: requests in (`custom_id`, `method`, `url`, `body`), responses and errors out.

The format is that of https://platform.openai.com/docs/guides/batch, which `vllm run-batch` reads and writes too.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError, DeadlineExceededError, JobError, ProcessTimeoutError, misspelt, nearest
from headrace.io.base import Chunk
from headrace.io.formats.dead_letters import dead_letter, encode_dead_letters
from headrace.io.formats.strict_json import OnNan, StrictJson, json_default
from headrace.io.formats.writer import LineWriter
from headrace.io.storage.files import InputFile
from headrace.io.storage.rows import FileFormat, full_lines, line_blocks, line_chunks, object_of, parse_object
from headrace.openai_protocol import chat_completion, completion, embeddings
from headrace.records import Failed, Json, JsonObject, Ok, Record
from headrace.wording import shown

_TIMEOUTS = frozenset({ProcessTimeoutError.__name__, DeadlineExceededError.__name__})
LINE_FIELDS = ("custom_id", "method", "url", "body")
"""The fields of a request in a batch file; each line has all of them."""
EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCORE = "/v1/score"
RERANK = "/v1/rerank"
CLASSIFY = "/classify"
SERVER_ONLY = frozenset({SCORE, RERANK, CLASSIFY})
"""URLs whose answers only a server's Batch API makes."""


class Answers(tuple[object, ...]):  # noqa: SLOT001 - a tuple's subclass cannot have slots with names
    """The outputs of one request, one per input."""

    truncated: tuple[int, ...] = ()
    """Indices of truncated inputs."""
    n: int = 1
    """Outputs in a row for each prompt of completions."""


def recognized(file: InputFile) -> OpenAIFormat | None:
    """The reader of a batch file; None if the first line of the file is no batch request.

    Raises:
        ConfigError: its URL is not supported.
    """
    url = _batch_url(file)
    return None if url is None else OpenAIFormat(url)


def _batch_url(file: InputFile) -> str | None:
    try:
        for lines, _ in itertools.islice(line_blocks(file), 4):
            for line in full_lines(lines)[:1]:
                row = parse_object(line)
                return str(row["url"]) if row.keys() >= set(LINE_FIELDS) else None
    except (ValueError, TypeError, RecursionError, JobError):
        pass  # the reader of its format reports the error
    return None


def url_of(source: object) -> str | None:
    """The URL of a source's requests, if it reads batch files."""
    return next((form.url for form in getattr(source, "formats", ()) if isinstance(form, OpenAIFormat)), None)


class OpenAIFormat(FileFormat):
    """The requests of a batch file: {id: custom_id, url, model, body, text}.

    `text` is an embedding request's input. A request that is not POST, has no `custom_id` or `body`, or has another
    URL than the first of its file, is a `Failed` at its position.

    Raises:
        ConfigError: the URL is not supported.
    """

    name = "openai"

    def __init__(self, url: str) -> None:
        if url not in _BODIES:
            raise ConfigError(f"the batch file asks for {url!r}; known: {', '.join(_BODIES)}")
        self.url = url
        self._checks_body = True
        self._model: str | None = None

    def leave_bodies(self, model: str) -> None:
        """Do not check fields of bodies; the engine does. A body without a model uses `model`."""
        self._checks_body = False
        self._model = model

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 requests per chunk."""
        return line_chunks(file, base, next_todo, self._request)

    def _request(self, position: int, line: bytes) -> Record | Failed:
        found = object_of(position, line)
        if isinstance(found, Failed):
            return found
        row: Mapping[str, Json] = found.data
        identity = row.get("custom_id")
        problem = _problem(row, self.url)
        if not problem and self._checks_body and self.url == EMBEDDINGS:
            problem = _unknown_field(row["body"])  # a generator refuses its own
        if problem:
            return Failed(
                Record(position, identity if isinstance(identity, str) else position, row),
                "RecordError",
                problem,
                code="invalid_value",
                has_id=isinstance(identity, str),
            )
        data = {
            "id": identity,
            "url": row["url"],
            "model": row["body"].get("model") or self._model,
            "body": row["body"],
        }
        if row["url"] == EMBEDDINGS:
            given = row["body"].get("input")
            # Many clients send a list of one text; a record has one vector.
            data["text"] = given[0] if isinstance(given, list) and len(given) == 1 else given
        return Record(position, position, data)


def _problem(row: Mapping[str, object], url: str) -> str:
    """The problem with a request; empty if valid."""
    problem = _wrong_field(row, url)
    if problem and any(name not in row for name in LINE_FIELDS):
        problem += misspelt(row, LINE_FIELDS)
    return problem


def _wrong_field(row: Mapping[str, object], url: str) -> str:
    if not isinstance(row.get("custom_id"), str) or not row["custom_id"]:
        return f"custom_id is {row.get('custom_id')!r}: it must be a text"
    if row.get("method") != "POST":
        return f"method is {row.get('method')!r}: it must be POST"
    if row.get("url") != url:
        return f"url is {row.get('url')!r}: this file's first request asks {url}, and one job has one task"
    if not isinstance(row.get("body"), dict):
        return f"body is of type {type(row.get('body')).__name__}, not an object"
    return ""


def _unknown_field(body: Mapping[str, object]) -> str:
    """The unsupported field of an embedding request; empty if none."""
    given = body.get("input")
    if isinstance(given, list) and len(given) != 1:
        return f"input is a list of {len(given)}: a line of a file has one text; use one line for each"
    for name, value in body.items():
        if name in ("input", "model", "user") or value is None or (name, value) == ("encoding_format", "float"):
            continue
        if name == "encoding_format":
            return f"encoding_format is {shown(value, 40)}: the answers to a file are numbers, 'float'"
        if name == "dimensions":
            return f"dimensions is {shown(value, 40)}: lines cannot choose; set truncate_dim for the whole job"
        missing = "" if "input" in body else "input is missing; "
        known = ("input", "model", "user", "encoding_format")
        return f"{missing}unknown field {shown(name)}; known: {', '.join(known)}{nearest(name[:60], known)}"
    return ""


class OpenAIWriter(LineWriter):
    """One response per line as in OpenAI's batch output; dead letters as in its error file.

    A response names the model as its request did: the record's kept column `model`.

    Args:
        url: the requests' URL, which determines the shape of a response's body.
        on_nan: what NaN and infinities become.
        clock: Unix time in seconds, written as `created`.
    """

    suffix = ".jsonl"

    def __init__(self, url: str, on_nan: OnNan = "null", clock: Callable[[], float] = time.time) -> None:
        super().__init__(StrictJson(json_default, on_nan))
        self._body = _BODIES[url]
        self.batch = ""
        """Distinguishes the ids of these responses from those of other files."""
        self._has_created = url in (COMPLETIONS, CHAT, SCORE)
        self._clock = clock

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        return "".join([self._json.dump(self._response(ok)) + "\n" for ok in outcomes]).encode()

    def _response(self, ok: Ok) -> JsonObject:
        # The same in every run of the batch.
        number = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.batch} {ok.record.position}".lstrip()).hex
        created = {"created": int(self._clock())} if self._has_created else {}
        body = {"id": number, **created, "model": (ok.record.data or {}).get("model"), **self._body(ok)}
        response = {"status_code": 200, "request_id": number, "body": body}
        return {"id": f"batch_req_{number}", "custom_id": ok.record.id, "response": response, "error": None}

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        return encode_dead_letters(_error(failed) for failed in failures)


def _error(failed: Failed) -> JsonObject:
    """A dead letter as a line of an error file, with its fields beside OpenAI's."""
    kind, code = "invalid_request_error", failed.code
    if code is None:  # the request is valid: use the codes of the server's routes
        kind = "timeout_error" if failed.reason in _TIMEOUTS else "server_error"
        code = "engine"
    error = {"message": failed.message, "type": kind, "param": failed.param, "code": code}
    return {**dead_letter(failed), "custom_id": failed.record.id, "response": None, "error": error}


def _outputs(ok: Ok) -> Sequence[Any]:
    return ok.output if isinstance(ok.output, Answers) else (ok.output,)


def _embedding(ok: Ok) -> JsonObject:
    vectors = (vector.tolist() if hasattr(vector, "tolist") else vector for vector in _outputs(ok))
    return embeddings(vectors, ok.cost, getattr(ok.output, "truncated", ()))


def _completion(ok: Ok) -> JsonObject:
    return completion(_outputs(ok), getattr(ok.output, "n", 1))


def _chat(ok: Ok) -> JsonObject:
    return chat_completion(_outputs(ok))


def _server_body(ok: Ok) -> JsonObject:
    """A body that the server has made."""
    (body,) = _outputs(ok)
    return dict(body)


_BODIES: Mapping[str, Callable[[Ok], JsonObject]] = {
    EMBEDDINGS: _embedding,
    COMPLETIONS: _completion,
    CHAT: _chat,
    SCORE: _server_body,
    RERANK: _server_body,
    CLASSIFY: _server_body,
}
