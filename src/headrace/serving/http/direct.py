"""JSON routes that bypass FastAPI's dependency handling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from headrace.serving.errors import ApiError, ClientGoneError, invalid
from headrace.serving.protocol.requests import HEAVY_BYTES, RequestFields, check_doubled, check_values


class DirectRoute(APIRoute):
    """A POST route of `async def endpoint(body: Model, request: Request) -> Response`.

    It appears in the API documentation like any other route. FastAPI would resolve dependencies, open exit stacks and
    parse the body twice: a server answers 1.4 times as many small requests this way as through Starlette's router, and
    1.9 times as many as by FastAPI's own route (`python -m benchmarks.serving routes`).

    Args:
        path: has no parameters.
        endpoint: see above; the annotation of `body` is the model to parse.
        options: passed to `APIRoute`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[RequestFields] = get_type_hints(endpoint)["body"]
        self._answer = endpoint
        self.app = self.serve

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: the request is invalid.
            ClientGoneError: the client disconnected before the body was complete.
        """
        raw = await read_body(receive)
        _check_type(scope["headers"])
        body = self._parse(raw) if len(raw) <= HEAVY_BYTES else await asyncio.to_thread(self._parse_heavy, raw)
        del raw  # it may be long, and the answer may take long
        response = await self._answer(body, Request(scope, receive))
        await response(scope, receive, send)

    def _parse_heavy(self, raw: bytes) -> RequestFields:
        check_values(raw)
        return self._parse(raw)

    def _parse(self, raw: bytes) -> RequestFields:
        if not raw:
            raise ApiError(400, "the request has no body", code="missing")
        body = self._validated(raw)
        check_doubled(raw, len(body.model_fields_set))
        if body.model_extra:
            body.refuse_unknown()
        return body

    def _validated(self, raw: bytes) -> RequestFields:
        try:
            body: RequestFields = self._model.__pydantic_validator__.validate_json(raw)
        except ValidationError as error:
            if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
                raise invalid(error, self._model.model_fields) from None
        else:
            return body
        # pydantic's parser is stricter than JSON: json.loads also accepts an escaped lone surrogate.
        try:
            return self._model.model_validate(json.loads(raw))
        except ValidationError as error:
            raise invalid(error, self._model.model_fields) from None
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be parsed"
            raise ApiError(400, f"the body is not valid JSON: {why}", code="json_invalid") from None


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request; raises ClientGoneError if the client disconnects before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client disconnected before the request was complete")
        part = message.get("body", b"")
        if not message.get("more_body"):
            return b"".join((*parts, part)) if parts else bytes(part)
        parts.append(part)


def _check_type(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise 400 unless the content type is JSON, which a browser sends across origins only after a CORS preflight."""
    for name, value in headers:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
                return
            break
    raise ApiError(400, "the body must be JSON: send Content-Type: application/json", code="not_json")
