"""Errors as OpenAI's clients know them, and what each of Headrace's own means to a caller over HTTP."""

from __future__ import annotations

import logging
import math
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from headrace.errors import (
    DeadlineExceededError,
    EngineDeadError,
    NotRunningError,
    ProcessTimeoutError,
    QueueFullError,
    RecordError,
    StoppedError,
)
from headrace.openai_protocol import error_body

logger = logging.getLogger("headrace")


class ApiError(HTTPException):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}`.

    Args:
        status: of the response.
        message: one line for a person; nothing of the server's inside.
        code: a short stable word for programs.
        param: the field it is about.
        retry_after_s: when to come again, rounded up to whole seconds.
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
        super().__init__(status, message, headers=headers)
        self.body = error_body(status, message, code, param)


def invalid(error: ValidationError | RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request's fields."""
    first = _first(error)
    # A position in the text says nothing of a field.
    places = () if first["type"] == "json_invalid" else first["loc"]
    place = ".".join(str(part) for part in places if part not in ("body", "query", "path"))
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return ApiError(400, message, code=str(first["type"]), param=place or None)


def _first(error: ValidationError | RequestValidationError) -> Any:
    if isinstance(error, ValidationError):
        return error.errors(include_url=False, include_context=False, include_input=False)[0]
    return error.errors()[0]


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def api_error(error: BaseException, param: str | None = None, request_id: str = "") -> ApiError:
    """What an error of the batcher or the engine means to the caller; what is not theirs to know is logged instead.

    Args:
        error: any.
        param: the field that holds the records, where the error does not name one.
        request_id: for the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecordError):
        return ApiError(400, _line(error), code=error.code, param=error.param or param)
    if isinstance(error, QueueFullError):
        return ApiError(429, "the server has as much work waiting as it takes", code="overloaded", retry_after_s=1)
    if isinstance(error, DeadlineExceededError):  # the caller's own: no failure of the server's
        return ApiError(408, "the request was not finished in its time", code="deadline_exceeded")
    if isinstance(error, ProcessTimeoutError):
        return ApiError(504, "the model took longer over this request than it may", code="engine")
    if isinstance(error, (StoppedError, NotRunningError)):
        return ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the model cannot go on; the server is about to restart", code="engine", retry_after_s=10)
    logger.error("request %s failed: %s: %s", request_id, type(error).__name__, error, exc_info=error)
    return ApiError(500, f"the model failed on this request; the server's log says why, at {request_id}", code="engine")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
