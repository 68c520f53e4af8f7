"""The lines of a batch as engine records. Each body is validated like the same request over HTTP."""

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
from headrace.serving.protocol.vectors import Vector, vector_format
from headrace.serving.state import ServerState

_Request: TypeAlias = tuple[Sequence[object], bool, Callable[[Vector], object] | None]
"""The engine's inputs, whether they may be truncated, and how to format an output."""


@dataclass(frozen=True, slots=True)
class Line:
    """The prepared inputs of one line."""

    parts: Sequence[Prepared[object]]
    format_output: Callable[[Vector], object] | None = None
    """Formats each output, which must then be a vector. None leaves outputs unchanged."""

    def answers(self, outputs: Sequence[Any]) -> Answers:
        """The output of the line.

        Raises:
            RecordError: an output cannot be formatted as the line asks.
        """
        try:
            answers = Answers(outputs if self.format_output is None else map(self.format_output, outputs))
        except ApiError as error:
            raise _record_error(error) from error
        answers.truncated = tuple(index for index, part in enumerate(self.parts) if part.truncated)
        return answers


class Lines:
    """An engine that prepares request bodies for `url`. It does not run them.

    Args:
        engine: the server's engine. It is not closed with this object.
        url: the endpoint of all lines.
        state: holds the limits of requests.
    """

    def __init__(self, engine: AnyEngine, url: str, state: ServerState) -> None:
        self._engine = engine
        self._state = state
        self._param = {EMBEDDINGS: "input", COMPLETIONS: "prompt"}.get(url, "messages")
        self._read = {EMBEDDINGS: self._embedding, COMPLETIONS: self._completion}.get(url, self._chat)
        self.profile = profile_of(engine)

    def describe(self) -> Mapping[str, object]:
        """The engine's description."""
        return self._engine.describe()

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[Line] | Exception]:
        """A `Line` for each body, or its error."""
        return [self._prepare(body) for body in inputs]

    def close(self) -> None:
        """Do nothing: the server closes its engine."""

    def _prepare(self, body: object) -> Prepared[Line] | Exception:
        try:
            values, may_cut, format_output = self._read(body)
        except ValidationError as error:
            return _record_error(invalid(error))
        except ApiError as error:
            return _record_error(error)
        parts: list[Prepared[object]] = []
        for part in self._engine.prepare(values):
            if isinstance(part, Exception):
                if isinstance(part, RecordError):
                    part.param = part.param or self._param
                return part
            if part.truncated and not may_cut:
                return RecordError(
                    "a text is too long for the model; shorten it, or leave out truncate", code="too_long"
                )
            parts.append(part)
        return Prepared(
            Line(parts, format_output), sum(part.cost for part in parts), any(part.truncated for part in parts)
        )

    def _embedding(self, body: object) -> _Request:
        request = EmbeddingRequest.model_validate(body)
        request.refuse_unknown()
        _refuse_timeout(request)
        texts = texts_of(request.input)
        self._state.check_texts(texts, "input")
        service = self._state.service
        return texts, request.may_cut(service.longest), vector_format(request, service)

    def _completion(self, body: object) -> _Request:
        request = CompletionRequest.model_validate(body)
        _refuse_stream(request)
        _refuse_timeout(request)
        prompts = texts_of(request.prompt)
        self._state.check_texts(prompts, "prompt")
        return [request.record(prompt=prompt) for prompt in prompts], True, None

    def _chat(self, body: object) -> _Request:
        request = ChatRequest.model_validate(body)
        _refuse_stream(request)
        _refuse_timeout(request)
        self._state.check_messages(request.messages)
        return [request.record(messages=request.messages)], True, None


def _record_error(error: ApiError) -> RecordError:
    """Convert the response to a request into the error of a line."""
    detail = error.body["error"]
    return RecordError(error.detail, code=detail["code"], param=detail["param"])


def _refuse_stream(request: CompletionRequest | ChatRequest) -> None:
    if request.stream:
        raise ApiError(400, "stream is true: batches do not support streaming", code="bad_stream", param="stream")


def _refuse_timeout(request: EmbeddingRequest | CompletionRequest | ChatRequest) -> None:
    if request.timeout is not None:
        raise ApiError(
            400,
            "timeout is not supported on a line; set completion_window for the batch",
            code="bad_timeout",
            param="timeout",
        )
