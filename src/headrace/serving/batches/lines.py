"""The lines of a batch as engine records. Each body is validated like the same request over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from headrace.engines.base import Engine, Placed, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import RecordError
from headrace.io.formats.openai_batch import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, RERANK, SCORE, Answers
from headrace.serving.errors import ApiError, invalid
from headrace.serving.protocol.bodies import MakeBody, labels_body, ranking_body, score_body
from headrace.serving.protocol.pairs import RerankRequest, ScoreRequest
from headrace.serving.protocol.requests import (
    BaseRequest,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    texts_of,
    texts_or_ids,
)
from headrace.serving.protocol.vectors import VectorNumbers, vector_format
from headrace.serving.service import RequestAnswers as Outputs
from headrace.serving.state import ServerState


@dataclass(frozen=True, slots=True)
class _Inputs:
    values: Sequence[object]
    may_cut: bool = True
    """Whether they may be truncated."""
    format_output: Callable[[VectorNumbers], object] | None = None
    n: int = 1
    make_body: MakeBody | None = None


@dataclass(frozen=True, slots=True)
class PreparedLine:
    """The prepared inputs of one line."""

    parts: Sequence[Prepared[object]]
    format_output: Callable[[VectorNumbers], object] | None = None
    """Formats each output, which must then be a vector. None leaves outputs unchanged."""
    n: int = 1
    """Parts in a row for each prompt."""
    make_body: MakeBody | None = None
    """Makes one body of all outputs; None for outputs that the writer of the file puts into a body."""

    def answers(self, outputs: Sequence[Any]) -> Answers:
        """The output of the line. Raises RecordError: an output cannot be formatted as the line asks."""
        truncated = tuple(index for index, part in enumerate(self.parts) if part.truncated)
        if self.make_body is not None:
            return Answers([self.make_body(Outputs(outputs, sum(part.cost for part in self.parts), truncated))])
        try:
            answers = Answers(outputs if self.format_output is None else map(self.format_output, outputs))
        except ApiError as error:
            raise _record_error(error) from error
        answers.truncated = truncated
        answers.n = self.n
        return answers


class RequestLines:
    """An engine that prepares request bodies for `url`. It does not run them.

    Args:
        engine: the server's engine. It is not closed with this object.
        url: the endpoint of all lines.
    """

    def __init__(self, engine: Engine, url: str, state: ServerState) -> None:
        self._engine = engine
        self._state = state
        readers: Mapping[str, tuple[str, type[BaseRequest], Callable[[object], _Inputs]]] = {
            EMBEDDINGS: ("input", EmbeddingRequest, self._embedding),
            COMPLETIONS: ("prompt", CompletionRequest, self._completion),
            CHAT: ("messages", ChatRequest, self._chat),
            SCORE: ("text_2", ScoreRequest, self._score),
            RERANK: ("documents", RerankRequest, self._rerank),
            CLASSIFY: ("input", ClassifyRequest, self._classify),
        }
        self._param, request, self._read = readers[url]
        self._fields = request.model_fields
        self.profile = profile_of(engine)

    def describe(self) -> Mapping[str, object]:
        return self._engine.describe()

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[PreparedLine] | Exception]:
        """A `PreparedLine` for each body, or its error."""
        return [
            self._prepare(value.request, value.place) if isinstance(value, Placed) else self._prepare(value)
            for value in inputs
        ]

    def close(self) -> None:
        """Do nothing: the server closes its engine."""

    def _prepare(self, body: object, place: int | str | None = None) -> Prepared[PreparedLine] | Exception:
        try:
            inputs = self._read(body)
        except ValidationError as error:
            return _record_error(invalid(error, self._fields))
        except ApiError as error:
            return _record_error(error)
        values = inputs.values
        if place is not None:
            values = [Placed(value, f"{place}/{number}") for number, value in enumerate(values)]
        parts: list[Prepared[object]] = []
        for part in self._engine.prepare(values):
            if isinstance(part, Exception):
                if isinstance(part, RecordError):
                    part.param = part.param or self._param
                return part
            if part.truncated and not inputs.may_cut:
                return RecordError(
                    "a text is too long for the model; shorten it, or leave out truncate",
                    code="too_long",
                    param=self._param,
                )
            parts.append(part)
        return Prepared(
            PreparedLine(parts, inputs.format_output, inputs.n, inputs.make_body),
            sum(part.cost for part in parts),
            any(part.truncated for part in parts),
        )

    def _embedding(self, body: object) -> _Inputs:
        request = EmbeddingRequest.model_validate(body)
        request.refuse_unknown()
        _refuse_timeout(request)
        service = self._state.service
        texts = request.inputs(service.profile.prompt_names)
        self._state.check_texts(texts, "input")
        return _Inputs(texts, request.may_cut(service.longest), vector_format(request, service))

    def _completion(self, body: object) -> _Inputs:
        request = CompletionRequest.model_validate(body)
        _refuse_stream(request)
        _refuse_timeout(request)
        prompts = texts_or_ids(request.prompt)
        self._state.check_prompts(prompts)
        self._state.check_choices(len(prompts), request.choices)
        values = [record for prompt in prompts for record in request.records(prompt=prompt)]
        return _Inputs(self._state.service.model.given(request.model, values), n=request.choices)

    def _chat(self, body: object) -> _Inputs:
        request = ChatRequest.model_validate(body)
        _refuse_stream(request)
        _refuse_timeout(request)
        self._state.check_messages(request.messages)
        self._state.check_choices(1, request.choices)
        values = request.records(messages=request.messages)
        return _Inputs(self._state.service.model.given(request.model, values), n=request.choices)

    def _score(self, body: object) -> _Inputs:
        request = ScoreRequest.model_validate(body)
        request.refuse_unknown()
        _refuse_timeout(request)
        pairs = request.pairs()
        self._state.check_pairs(pairs, "text_1", "text_2")
        return _Inputs(pairs, request.may_cut(self._state.service.longest), make_body=score_body)

    def _rerank(self, body: object) -> _Inputs:
        request = RerankRequest.model_validate(body)
        request.refuse_unknown()
        _refuse_timeout(request)
        texts = request.listed()
        request.check_chunks(splits=self._state.service.profile.splits)
        pairs = [(request.query, text) for text in texts]
        self._state.check_pairs(pairs, "query", "documents")
        return _Inputs(pairs, request.may_cut(self._state.service.longest), make_body=partial(ranking_body, request))

    def _classify(self, body: object) -> _Inputs:
        request = ClassifyRequest.model_validate(body)
        request.refuse_unknown()
        _refuse_timeout(request)
        texts = texts_of(request.input)
        self._state.check_texts(texts, "input")
        return _Inputs(texts, request.may_cut(self._state.service.longest), make_body=labels_body)


def _record_error(error: ApiError) -> RecordError:
    """Convert the response to a request into the error of a line."""
    detail = error.body["error"]
    return RecordError(error.detail, code=detail["code"], param=detail["param"])


def _refuse_stream(request: CompletionRequest | ChatRequest) -> None:
    if request.stream:
        raise ApiError(400, "stream is true: batches do not support streaming", code="bad_stream", param="stream")


def _refuse_timeout(request: BaseRequest) -> None:
    if request.timeout is not None:
        message = "timeout is not supported on a line; set completion_window for the batch"
        raise ApiError(400, message, code="bad_timeout", param="timeout")
