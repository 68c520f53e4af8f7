"""JSON routes that bypass FastAPI's dependency handling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from headrace.serving.errors import ApiError, ClientGoneError, ErrorShape, as_openai, invalid
from headrace.serving.protocol.requests import HEAVY_BYTES, RequestFields, check_doubled, check_values

_parsing = ThreadPoolExecutor(1, "headrace-parse")
"""One thread for long bodies: several would hold Python's lock in turn, and a model asks for it before each kernel."""


class DirectRoute(APIRoute):
    """A route of `async def endpoint(body: Model, request: Request) -> Response`.

    `body: bytes` takes the body as it is, of any type; without `body`, the request has none.

    It appears in the API documentation like any other route. FastAPI would resolve dependencies, open exit stacks and
    parse the body twice: a server answers 1.4 times as many small requests this way as through Starlette's router, and
    1.9 times as many as by FastAPI's own route (`python -m benchmarks.serving routes`).

    Args:
        path: may have parameters, which are in `request.path_params`.
        endpoint: see above; the annotation of `body` is the model to parse.
        options: passed to `APIRoute`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[RequestFields] | type[bytes] | None = get_type_hints(endpoint).get("body")
        self._answer = endpoint
        self.app = self.serve
        self.shape: ErrorShape = as_openai
        """How errors are told."""
        self.any_type = False
        """Whether a JSON body may have another content type."""
        self.others: list[DirectRoute] = []
        """Routes of other protocols with the same path, for bodies with their required fields."""
        model = self._model
        self._fields = model if model is not None and issubclass(model, RequestFields) else RequestFields
        self._required = {name for name, one in self._fields.model_fields.items() if one.is_required()}

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: the request is invalid.
            ClientGoneError: the client disconnected before the body was complete.
        """
        if self._model is None:
            response = await self._answer(request=Request(scope, receive))
        else:
            raw = await read_body(receive)
            scope["route"] = route = self._meant(raw) if self.others else self
            body = await route._read(raw, scope)
            del raw  # it may be long, and the answer may take long
            response = await route._answer(body, Request(scope, receive))
        await response(scope, receive, send)

    async def check(self, raw: bytes, scope: Scope) -> None:
        """Check what a body tells without the model. Raises ApiError: it is invalid."""
        await (self._meant(raw) if self.others else self)._read(raw, scope)

    def _meant(self, raw: bytes) -> DirectRoute:
        """Which route of this path a body is for: the one most of whose required fields it has, and none is missing."""
        routes = (self, *self.others)
        found = [
            one for one in routes if one._required and all(b'"%b"' % name.encode() in raw for name in one._required)
        ]
        if len(found) > 1:  # perhaps one has the name of a field as a value
            try:
                content = json.loads(raw)
            except (ValueError, RecursionError):
                return self
            found = [one for one in found if isinstance(content, dict) and one._required <= content.keys()]
        return max(found, key=lambda one: len(one._required), default=self)

    async def _read(self, raw: bytes, scope: Scope) -> RequestFields | bytes:
        if self._model is bytes:
            check_type(scope["headers"], any_type=True)
            return raw
        check_type(scope["headers"], any_type=self.any_type)
        if len(raw) <= HEAVY_BYTES:
            return self._parse(raw)
        return await asyncio.get_running_loop().run_in_executor(_parsing, self._parse_heavy, raw)

    def _parse_heavy(self, raw: bytes) -> RequestFields:
        check_values(raw)
        return self._parse(raw)

    def _parse(self, raw: bytes) -> RequestFields:
        try:
            body: RequestFields = self._fields.__pydantic_validator__.validate_json(raw)
        except ValidationError as error:
            if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
                raise invalid(error, self._fields.model_fields) from None
            # pydantic's parser is stricter than JSON: json.loads also accepts an escaped lone surrogate.
            try:
                body = self._fields.model_validate(loaded(raw))
            except ValidationError as refused:
                raise invalid(refused, self._fields.model_fields) from None
        check_doubled(raw, len(body.model_fields_set))
        if body.model_extra:
            body.refuse_unknown()
        return body


class DirectRoutes:
    """Finds the direct route of a request.

    Args:
        routes: in the order in which they are matched.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._exact: dict[tuple[str, str], DirectRoute] = {}
        self._patterns: list[DirectRoute] = []
        for route in routes:
            if not isinstance(route, DirectRoute):
                continue
            if route.param_convertors:
                self._patterns.append(route)
                continue
            for method in route.methods or ():
                first = self._exact.setdefault((method, route.path), route)
                if first is not route:
                    first.others.append(route)

    def find(self, method: str, path: str) -> tuple[DirectRoute, Mapping[str, str]] | None:
        """The route and the parameters in its path, if there is one."""
        if (route := self._exact.get((method, path))) is not None:
            return route, {}
        for route in self._patterns:
            if method in (route.methods or ()) and (match := route.path_regex.match(path)) is not None:
                return route, match.groupdict()
        return None


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


def loaded(raw: bytes) -> object:
    """The JSON value of a body. Raises ApiError: 400 if it has none."""
    if not raw:
        raise ApiError(400, "the request has no body", code="missing")
    try:
        found: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be parsed"
        raise ApiError(400, f"the body is not valid JSON: {why}", code="json_invalid") from None
    return found


def check_type(headers: list[tuple[bytes, bytes]], *, any_type: bool = False) -> None:
    """Raise 400 unless the content type is JSON, which a browser sends across origins only after a CORS preflight.

    A request without the header `Origin` is not a web page's: it may leave out the type, or have any with `any_type`.
    """
    kind, of_page = b"", False
    for name, value in headers:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
                return
        elif name == b"origin":
            of_page = True
    if of_page or (kind and not any_type):
        raise ApiError(400, "the body must be JSON: send Content-Type: application/json", code="not_json")
