"""The lines of a batch as an engine takes them: each body is checked as the same request is that comes over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import ValidationError

from headrace.engines.base import AnyEngine, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import RecordError
from headrace.io.formats.openai_batch import COMPLETIONS, EMBEDDINGS, Answers
from headrace.serving.errors import ApiError, invalid
from headrace.serving.protocol.requests import ChatRequest, CompletionRequest, EmbeddingRequest, texts_of
from headrace.serving.protocol.vectors import vector_format
from headrace.serving.state import ServerState

_Asked: TypeAlias = tuple[list[Any], bool, Callable[[Any], Any] | None]
"""The engine's inputs, whether they may be cut, and how an output is written."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the engine is to do for one line: once for each of its inputs."""

    parts: Sequence[Prepared[Any]]
    written: Callable[[Any], Any] | None = None
    """How each output is written; None leaves it as it is."""

    def answers(self, outputs: Sequence[Any]) -> Answers:
        """The line's output.

        Raises:
            RecordError: it cannot be written as the line asks.
        """
        try:
            answers = Answers(outputs if self.written is None else map(self.written, outputs))
        except ApiError as error:
            raise _record_error(error) from error
        answers.truncated = tuple(place for place, part in enumerate(self.parts) if part.truncated)
        return answers


class Lines:
    """An engine whose records are the bodies of requests, for `url`; it runs nothing itself.

    Args:
        engine: the server's, which is not closed with this.
        url: what all lines ask.
        host: knows what a request may have.
    """

    def __init__(self, engine: AnyEngine, url: str, host: ServerState) -> None:
        self._engine = engine
        self._host = host
        self._param = {EMBEDDINGS: "input", COMPLETIONS: "prompt"}.get(url, "messages")
        self._read = {EMBEDDINGS: self._embedding, COMPLETIONS: self._completion}.get(url, self._chat)
        self.profile = profile_of(engine)

    def describe(self) -> Mapping[str, Any]:
        """The engine's own description."""
        return self._engine.describe()

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Line] | Exception]:
        """A `Line` for each body, or what is wrong with it."""
        return [self._prepare(body) for body in inputs]

    def close(self) -> None:
        """Nothing: the server closes its engine."""

    def _prepare(self, body: Any) -> Prepared[Line] | Exception:
        try:
            values, may_cut, written = self._read(body)
        except ValidationError as error:
            return _record_error(invalid(error))
        except ApiError as error:
            return _record_error(error)
        parts: list[Prepared[Any]] = []
        for part in self._engine.prepare(values):
            if isinstance(part, Exception):
                if isinstance(part, RecordError):
                    part.param = part.param or self._param
                return part
            if part.truncated and not may_cut:
                return RecordError(
                    "a text is longer than the model takes; shorten it, or leave out truncate", code="too_long"
                )
            parts.append(part)
        return Prepared(Line(parts, written), sum(part.cost for part in parts), any(part.truncated for part in parts))

    def _embedding(self, body: Any) -> _Asked:
        asked = EmbeddingRequest.model_validate(body)
        asked.refuse_unknown()
        _refuse_timeout(asked)
        texts = texts_of(asked.input)
        self._host.check_texts(texts, "input")
        service = self._host.service
        return texts, asked.may_cut(service.longest), vector_format(asked, service)

    def _completion(self, body: Any) -> _Asked:
        asked = CompletionRequest.model_validate(body)
        _refuse_stream(asked)
        _refuse_timeout(asked)
        prompts = texts_of(asked.prompt)
        self._host.check_texts(prompts, "prompt")
        return [asked.asked(prompt=prompt) for prompt in prompts], True, None

    def _chat(self, body: Any) -> _Asked:
        asked = ChatRequest.model_validate(body)
        _refuse_stream(asked)
        _refuse_timeout(asked)
        self._host.check_messages(asked.messages)
        return [asked.asked(messages=asked.messages)], True, None


def _record_error(error: ApiError) -> RecordError:
    """The error of a line that a request over HTTP would be answered with."""
    said = error.body["error"]
    return RecordError(error.detail, code=said["code"], param=said["param"])


def _refuse_stream(asked: CompletionRequest | ChatRequest) -> None:
    if asked.stream:
        raise ApiError(400, "stream is true: the answers of a batch are whole", code="bad_stream", param="stream")


def _refuse_timeout(asked: EmbeddingRequest | CompletionRequest | ChatRequest) -> None:
    if asked.timeout is not None:
        raise ApiError(
            400, "a line takes no timeout; the batch has its completion_window", code="bad_timeout", param="timeout"
        )
