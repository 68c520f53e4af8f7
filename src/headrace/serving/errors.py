"""Errors in the OpenAI format, and the HTTP status of each Headrace error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import TypeAlias

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineOutOfMemoryError,
    NotRunningError,
    ProcessTimeoutError,
    QueueFullError,
    RecordError,
    StoppedError,
    misspelt,
)
from headrace.openai_protocol import error_body
from headrace.records import JsonObject
from headrace.wording import spelled

logger = logging.getLogger("headrace")


class ApiError(HTTPException):
    """An error response: `{"error": {"message", "type", "param", "code"}}`.

    Args:
        message: one line for a person, without internals of the server.
        code: a short stable identifier for programs.
        param: the field the error is about.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        headers = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        message = spelled(message, "flags")  # as the command that started the server names settings
        super().__init__(status, message, headers=headers)
        self.body = error_body(status, message, code, param)

    @property
    def param(self) -> str | None:
        """The field the error is about."""
        found: str | None = self.body["error"]["param"]
        return found

    @property
    def message(self) -> str:
        """What is wrong, with the field's name."""
        return self.detail if self.param is None or self.param in self.detail else f"{self.param}: {self.detail}"


ErrorShape: TypeAlias = Callable[[ApiError], tuple[int, JsonObject]]
"""Gives the status and the body by which a protocol tells an error."""


def as_openai(error: ApiError) -> tuple[int, JsonObject]:
    """The error as OpenAI's API tells it."""
    return error.status_code, error.body


def told_as(field: str) -> ErrorShape:
    """The shape of errors that are a message in this field."""
    return lambda error: (error.status_code, {field: error.message})


def invalid(error: ValidationError | RequestValidationError, known: Collection[str] = ()) -> ApiError:
    """The first validation error of a request as a 400.

    Args:
        known: the body's fields. An unknown one may be the missing one, misspelt.
    """
    first = _first(error)
    # The location of a JSON syntax error is a position in the text, not a field.
    location = () if first["type"] == "json_invalid" else first["loc"]
    field = ".".join(str(part) for part in location if part not in ("body", "query", "path"))
    message = f"{field}: {first['msg']}" if field else first["msg"]
    if known and first["type"] == "missing" and len(location) == 1 and isinstance(error, ValidationError):
        body = error.errors(include_url=False, include_context=False)[0]["input"]
        message += misspelt(body, known) if isinstance(body, dict) else ""
    return ApiError(400, message, code=first["type"], param=field or None)


def _first(error: ValidationError | RequestValidationError) -> ErrorDetails:
    if isinstance(error, ValidationError):
        return error.errors(include_url=False, include_context=False, include_input=False)[0]
    first: ErrorDetails = error.errors()[0]
    return first


class ClientGoneError(Exception):
    """The client has disconnected."""


def api_error(error: BaseException, param: str | None = None, request_id: str = "") -> ApiError:
    """Convert an error of the batcher or the engine to a response. Unexpected errors are logged, not shown.

    Args:
        param: the field that holds the records, if the error does not name one.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecordError):
        return ApiError(400, one_line(error), code=error.code, param=error.param or param)
    if isinstance(error, QueueFullError):
        return ApiError(429, "the server is overloaded", code="overloaded", retry_after_s=1)
    if isinstance(error, DeadlineExceededError):  # the client's own timeout, not a server failure
        return ApiError(408, "the request timed out", code="deadline_exceeded")
    if isinstance(error, ProcessTimeoutError):
        return ApiError(504, "the model exceeded its time limit on this request", code="engine")
    if isinstance(error, (StoppedError, NotRunningError)):
        return ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the model has failed; the server is about to restart", code="engine", retry_after_s=10)
    if isinstance(error, EngineOutOfMemoryError):
        logger.error("request %s failed: %s", request_id, one_line(error))
        message = "the device has no memory for this request: make it shorter, or try again later"
        return ApiError(503, message, code="out_of_memory", param=param, retry_after_s=10)
    logger.error("request %s failed: %s: %s", request_id, type(error).__name__, error, exc_info=error)
    return ApiError(500, f"the model failed; see the server log for request {request_id}", code="engine")


def one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split())
