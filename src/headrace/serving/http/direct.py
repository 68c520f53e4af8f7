"""Routes that take JSON and are answered without a framework in between: parsed once, called, replied to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from headrace.serving.errors import ApiError, ClientGoneError, invalid
from headrace.serving.protocol.requests import HEAVY_BYTES, check_values

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class DirectRoute(APIRoute):
    """A POST route of `async def endpoint(body: Model, request: Request) -> Response`.

    It is described in the documents as any other. FastAPI would resolve its dependencies, open exit stacks around it
    and parse its body twice, which together takes longer than all that batching does for a small request.

    Args:
        path: without parameters.
        endpoint: see above; `body` is the model that is parsed.
        options: as `APIRoute` takes them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[BaseModel] = get_type_hints(endpoint)["body"]
        self._answer: Callable[[Any, Request], Awaitable[Response]] = endpoint
        self.app = self.serve

    async def serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: what is wrong with it.
            ClientGoneError: it never came as a whole.
        """
        raw = await _body(receive)
        _check_type(scope["headers"])
        body = self._parse(raw) if len(raw) <= HEAVY_BYTES else await asyncio.to_thread(self._parse_heavy, raw)
        response = await self._answer(body, Request(scope, receive))
        await response(scope, receive, send)

    def _parse_heavy(self, raw: bytes) -> Any:
        check_values(raw)
        return self._parse(raw)

    def _parse(self, raw: bytes) -> Any:
        if not raw:
            raise ApiError(400, "the request has no body", code="missing")
        body = self._validated(raw)
        if body.model_extra:
            body.refuse_unknown()
        return body

    def _validated(self, raw: bytes) -> Any:
        try:
            return self._model.__pydantic_validator__.validate_json(raw)
        except ValidationError as error:
            if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
                raise invalid(error) from None
        # Stricter than JSON: half of a surrogate pair may be escaped in it, which Python's own parser takes.
        try:
            return self._model.model_validate(json.loads(raw))
        except ValidationError as error:
            raise invalid(error) from None
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
            raise ApiError(400, f"the body is no JSON: {why}", code="json_invalid") from None


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection before its request was there")
        part = message.get("body", b"")
        if not message.get("more_body"):
            return b"".join((*parts, part)) if parts else bytes(part)
        parts.append(part)


def _check_type(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise 400 unless the body is said to be JSON: a page elsewhere cannot make a browser say that unasked."""
    for name, value in headers:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
                return
            break
    raise ApiError(400, "the body must be JSON: send Content-Type: application/json", code="not_json")
