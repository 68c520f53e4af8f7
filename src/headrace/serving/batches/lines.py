"""The lines of a batch as engine records. Each body is validated like the same request over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from headrace.engines.base import Engine, Placed, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import RecordError
from headrace.io.formats.openai_batch import Answers
from headrace.serving.errors import ApiError, invalid
from headrace.serving.protocol.asked import ENDPOINTS, Asked
from headrace.serving.protocol.requests import BaseRequest
from headrace.serving.service import RequestAnswers as Outputs
from headrace.serving.state import ServerState


@dataclass(frozen=True, slots=True)
class PreparedLine:
    """The prepared inputs of one line."""

    parts: Sequence[Prepared[object]]
    asked: Asked

    def answers(self, outputs: Sequence[Any]) -> Answers:
        """The output of the line. Raises RecordError: an output cannot be formatted as the line asks."""
        truncated, asked = tuple(index for index, part in enumerate(self.parts) if part.truncated), self.asked
        if asked.make_body is not None:
            return Answers([asked.make_body(Outputs(outputs, sum(part.cost for part in self.parts), truncated))])
        try:
            answers = Answers(map(asked.format_output, outputs))
        except ApiError as error:
            raise _record_error(error) from error
        answers.truncated = truncated
        answers.n = asked.n
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
        self._param, self._request, self._asked = ENDPOINTS[url]
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
            asked = self._read(body)
        except ValidationError as error:
            return _record_error(invalid(error, self._request.model_fields))
        except ApiError as error:
            return _record_error(error)
        values = asked.values
        if place is not None:
            values = [Placed(value, f"{place}/{number}") for number, value in enumerate(values)]
        parts: list[Prepared[object]] = []
        for part in self._engine.prepare(values):
            if isinstance(part, Exception):
                if isinstance(part, RecordError):
                    part.param = part.param or self._param
                return part
            if part.truncated and not asked.may_cut:
                return RecordError(
                    "a text is too long for the model; shorten it, or leave out truncate",
                    code="too_long",
                    param=self._param,
                )
            parts.append(part)
        return Prepared(
            PreparedLine(parts, asked),
            sum(part.cost for part in parts),
            any(part.truncated for part in parts),
        )

    def _read(self, body: object) -> Asked:
        request = self._request.model_validate(body)
        request.refuse_unknown()
        _refuse_of_lines(request)
        return self._asked(self._state, request, self._param)


def _record_error(error: ApiError) -> RecordError:
    """Convert the response to a request into the error of a line."""
    detail = error.body["error"]
    return RecordError(error.detail, code=detail["code"], param=detail["param"])


def _refuse_of_lines(request: BaseRequest) -> None:
    """Refuse what is of requests over HTTP alone."""
    if getattr(request, "stream", None):
        raise ApiError(400, "stream is true: batches do not support streaming", code="bad_stream", param="stream")
    if request.timeout is not None:
        message = "timeout is not supported on a line; set completion_window for the batch"
        raise ApiError(400, message, code="bad_timeout", param="timeout")
