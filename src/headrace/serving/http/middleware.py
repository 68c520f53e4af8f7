"""The outermost layer of the app: keys, sizes and times are checked here, before a request is parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from typing import Any

from headrace.events import RequestDone
from headrace.serving.auth import KeyAccount, Keys
from headrace.serving.errors import ApiError, ClientGoneError
from headrace.serving.http.direct import DirectRoute, Message, Receive, Send
from headrace.serving.http.request_id import HEADER, request_id
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.state import ServerState

App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key: load balancers and supervisors have none, and they tell nothing."""
METRICS = "/metrics"
"""Told to whoever has a key, while the server drains too: that is when they are looked at."""
UPLOADS = "/v1/files"
CLIENT_GONE = 499
"""nginx's number for a client that closed the connection; nobody receives it, counters show it."""


class RequestMiddleware:
    """ASGI middleware around all routes.

    Args:
        app: what is inside.
        host: the server's state.
        direct: routes by path that are called from here, past all other layers.
    """

    def __init__(self, app: App, host: ServerState, direct: Mapping[str, DirectRoute]) -> None:
        self._app = app
        self._host = host
        self._direct = direct

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500
        method = scope["method"]
        identity = scope["headrace_request_id"] = request_id(scope["headers"])
        if method == "HEAD":  # what GET would answer, less its body
            scope = {**scope, "method": "GET", "headrace_head": True}

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, identity.encode())]
            elif method == "HEAD" and "body" in message:
                message["body"] = b""
            await send(message)

        try:
            await self._serve(scope, receive, tell)
        except ApiError as error:
            await error_response(error)(scope, receive, tell)
        except ClientGoneError:
            status = CLIENT_GONE
        finally:
            now = time.monotonic()
            route = getattr(scope.get("route"), "path", "other")
            self._host.listener(RequestDone(route, method, status, now - began, now))

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        keys: Keys = self._host.keys
        account = keys.account(scope["headers"])
        if path == METRICS:
            await self._app(scope, receive, send)
            return
        host = self._host
        host.admit()
        host.under_way += 1
        try:
            await self._admitted(path, account, scope, receive, send)
        finally:
            host.under_way -= 1

    async def _admitted(
        self, path: str, account: KeyAccount | None, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        upload = path == UPLOADS
        limits = self._host.limits
        body = _Body(receive, limits, limits.max_file_bytes if upload else limits.max_body_bytes, steady=upload)
        app = self._app
        route = self._direct.get(path)
        if route is not None and scope["method"] == "POST":
            scope["route"], app = route, route.serve
        body.check_length(scope["headers"])
        if account is None:
            await app(scope, body.receive, send)
            return
        self._host.keys.enter(account)
        scope["headrace_caller"] = account.settings.name
        scope["headrace_tenant"] = account.tenant
        try:
            await app(scope, body.receive, send)
        finally:
            account.leave()


class _Body:
    """A request's body on its way in.

    Args:
        receive: the server's.
        limits: how long it may take.
        most: bytes it may have.
        steady: the time counts from block to block, not for the whole.
    """

    def __init__(self, receive: Receive, limits: ServeLimits, most: int, *, steady: bool) -> None:
        self._receive = receive
        self._most = most
        self._got = 0
        self._timeout_s = limits.body_timeout_s
        self._steady = steady
        self._ends = 0.0
        self._complete = False

    def check_length(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise 413 for a body that says itself that it is too long."""
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._most:
                raise self._too_long()

    async def receive(self) -> Message:
        """The next part.

        Raises:
            ApiError: 413, too long; 408, too slow.
        """
        if self._complete:
            return await self._receive()
        coming = self._receive().__await__()
        try:
            first = next(coming)
        except StopIteration as here:  # nearly always: it came with the headers, there is nothing to time
            message: Message = here.value
        else:
            message = await self._in_time(_Rest(coming, first))
        self._got += len(message.get("body", b""))
        if self._got > self._most:
            raise self._too_long()
        self._complete = not message.get("more_body", False)
        return message

    async def _in_time(self, coming: _Rest) -> Message:
        if self._steady or not self._ends:
            self._ends = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._ends):
                return await coming
        except TimeoutError:
            raise ApiError(
                408, f"the request's body did not arrive within {self._timeout_s:g} s", code="slow_body"
            ) from None

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the request is longer than the {self._most:,} bytes allowed", code="too_long")


class _Rest:
    """The rest of an awaitable that was begun: it wants its task to wait for `first`, which the task is yet to hear."""

    def __init__(self, coming: Generator[Any, Any, Message], first: Any) -> None:
        self._coming = coming
        self._first = first

    def __await__(self) -> Generator[Any, Any, Message]:
        asked = self._first
        try:
            while True:
                try:
                    yield asked
                except BaseException as error:  # noqa: BLE001 - handed on, as `await` would
                    asked = self._coming.throw(error)
                else:
                    asked = next(self._coming)
        except StopIteration as here:
            return here.value  # type: ignore[no-any-return]


def error_response(error: ApiError) -> JsonReply:
    """The response that an error is."""
    # What is left of the body is not read: the connection cannot be used again. Nor is one to a server that stops.
    unread = error.body["error"]["code"] in ("slow_body", "not_ready") or error.status_code == 413
    close = {"Connection": "close"} if unread else {}
    return JsonReply(error.body, error.status_code, {**(error.headers or {}), **close})
