"""OpenAI's batch files: requests in (`custom_id`, `method`, `url`, `body`), responses and errors out.

The format is that of https://platform.openai.com/docs/guides/batch, which `vllm run-batch` reads and writes too.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import JobError
from headrace.io.base import Chunk
from headrace.io.files import CHUNK_ROWS, InputFile, share, todo
from headrace.io.lines import failed_line, full_lines, line_blocks, parse_object
from headrace.records import Failed, Ok, Record

_FIELDS = frozenset({"custom_id", "method", "url", "body"})
EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_URLS = (EMBEDDINGS, COMPLETIONS, CHAT)


def is_batch_file(file: InputFile) -> bool:
    """Whether the first line is a request of a batch."""
    try:
        for lines, _ in itertools.islice(line_blocks(file), 4):
            for line in full_lines(lines)[:1]:
                return parse_object(line).keys() >= _FIELDS
    except (ValueError, TypeError, RecursionError, JobError):
        pass  # whatever it is, the reader of its format will say
    return False


class OpenAIFormat:
    """The requests of a batch file: {id: custom_id, url, body, text}.

    `text` is an embedding request's input. A request that is not POST, has no `custom_id` or `body`, or asks for
    another URL than the three that are known, is a `Failed` at its position.
    """

    name = "openai"

    def count(self, file: InputFile) -> int | None:  # noqa: ARG002 - the seam's shape
        """Unknown without reading it all."""
        return None

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """At most 512 requests a chunk."""
        begin = base
        for block, size in line_blocks(file):
            lines = full_lines(block)
            rows = len(lines)
            for start in range(0, rows, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, rows)
                wanted = todo(base + start, base + stop, next_todo)
                outcomes = [_parse(lines[position - base], position) for position in wanted]
                yield Chunk(
                    [outcome for outcome in outcomes if isinstance(outcome, Record)],
                    [outcome for outcome in outcomes if isinstance(outcome, Failed)],
                    share(size, start, stop, rows),
                )
            if not rows:
                yield Chunk((), (), size)
            base += rows
        return base - begin


def _parse(line: bytes, position: int) -> Record | Failed:
    try:
        row = parse_object(line)
    except (ValueError, TypeError, RecursionError) as error:
        return failed_line(position, line, error)
    identity = row.get("custom_id")
    problem = _problem(row)
    if problem:
        return Failed(
            Record(position, identity if isinstance(identity, str) else position, row), "RecordError", problem
        )
    data = {"id": identity, "url": row["url"], "body": row["body"]}
    if row["url"] == EMBEDDINGS:
        given = row["body"].get("input")
        # A list of one text is what many clients send; one vector is what a record has.
        data["text"] = given[0] if isinstance(given, list) and len(given) == 1 else given
    return Record(position, position, data)


def _problem(row: Mapping[str, Any]) -> str:
    """What is wrong with a request; empty if nothing is."""
    if not isinstance(row.get("custom_id"), str) or not row["custom_id"]:
        return f"custom_id is {row.get('custom_id')!r}: it must be a text"
    if row.get("method") != "POST":
        return f"method is {row.get('method')!r}: it must be POST"
    if row.get("url") not in _URLS:
        return f"url is {row.get('url')!r}; known: {', '.join(_URLS)}"
    if not isinstance(row.get("body"), dict):
        return f"body is of type {type(row.get('body')).__name__}, not an object"
    return ""


class OpenAIWriter:
    """One response per line, as OpenAI's batch output has them; dead letters as its error file has them.

    Args:
        model: the name in the responses.
        url: of the requests: it decides the shape of a response's body.
    """

    suffix = ".jsonl"

    def __init__(self, model: str, url: str) -> None:
        self._model = model
        self._body = _BODIES[url]

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The lines of one part.

        Raises:
            TypeError: an output that is neither JSON nor an array.
        """
        return "".join([_line(self._response(ok)) for ok in outcomes]).encode()

    def _response(self, ok: Ok) -> dict[str, Any]:
        number = _number(ok.record.position)
        body = {"id": f"{number}", "model": self._model, **self._body(ok.output)}
        response = {"status_code": 200, "request_id": number, "body": body}
        return {"id": f"batch_req_{number}", "custom_id": ok.record.id, "response": response, "error": None}

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """The parts one behind the other."""
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(1024 * 1024):
                    target.write(block)


def encode_error(letter: dict[str, Any]) -> dict[str, Any]:
    """A dead letter as a line of an error file; its own fields stay beside OpenAI's."""
    error = {"code": letter["reason"], "message": letter["message"]}
    return {**letter, "custom_id": letter["id"], "response": None, "error": error}


def _embedding(output: Any) -> dict[str, Any]:
    vector = output.tolist() if hasattr(output, "tolist") else output
    return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector}]}


def _completion(output: Mapping[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "text": output["text"], "finish_reason": output["finish_reason"], "logprobs": None}
    return {"object": "text_completion", "choices": [choice], "usage": _usage(output)}


def _chat(output: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": output["text"]}
    choice = {"index": 0, "message": message, "finish_reason": output["finish_reason"], "logprobs": None}
    return {"object": "chat.completion", "choices": [choice], "usage": _usage(output)}


def _usage(output: Mapping[str, Any]) -> dict[str, int]:
    asked, answered = output["prompt_tokens"], output["completion_tokens"]
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


_BODIES: Mapping[str, Callable[[Any], dict[str, Any]]] = {EMBEDDINGS: _embedding, COMPLETIONS: _completion, CHAT: _chat}


def _number(position: int) -> str:
    """The same for the same record in every run, so that a merged file's bytes depend on the rows alone."""
    return uuid.uuid5(uuid.NAMESPACE_OID, str(position)).hex


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
