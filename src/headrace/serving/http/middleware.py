"""The outermost layer of the app: checks keys, sizes and timeouts before a request is parsed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Generator, Hashable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.events import RequestDone
from headrace.serving.admission.controller import AdmissionController
from headrace.serving.auth import KeyAccount
from headrace.serving.errors import ApiError, ClientGoneError, ErrorShape, as_openai
from headrace.serving.http.direct import DirectRoute, DirectRoutes
from headrace.serving.http.request_id import HEADERS, request_id
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.responses import JsonReply, whole_sender
from headrace.serving.state import ServerState
from headrace.serving.tracing import RequestTrace
from headrace.wording import shown

OPEN_PATHS = frozenset({"/health", "/ready", "/dashboard"})
"""Answered without a key: load balancers and supervisors have none, and the dashboard's page asks for it."""
EVENTS = "/dashboard/events"
"""Lasts as long as there is a viewer. It is not counted."""
OBSERVING = frozenset({"/metrics", "/report", "/dashboard/state", EVENTS})
"""Also answered while the server loads or drains. They use up no limit of their key, and a drain waits for none."""
UPLOADS = "/v1/files"
_PROBES = {
    "/healthz": "/health",
    "/livez": "/health",
    "/v2/health/live": "/health",
    "/readyz": "/ready",
    "/ping": "/ready",
    "/v2/health/ready": "/ready",
}
"""Other usual names of routes: of Kubernetes, SageMaker and the Open Inference Protocol."""
_SILENT_S = 1.0
"""How long a body may take to arrive before only what has arrived counts."""
_IDS = b"".join(name + b": %b\r\n" for name in HEADERS)
CLIENT_GONE = 499
"""nginx's status for a client that disconnected. It appears only in metrics."""


_access = logging.getLogger("headrace.access")


def _log(identity: str, scope: Scope, done: RequestDone) -> None:
    """Log one request, if anyone wants to know. The route is named rather than the path, which a client may choose."""
    if not identity or not _access.isEnabledFor(logging.INFO):
        return
    client = scope.get("client")
    facts: dict[str, object] = {
        "request_id": identity,
        "client": client[0] if client else None,
        "key": scope.get("headrace_caller"),
        "method": done.method,
        "route": done.route,
        "status": done.status,
        "ms": round(done.duration_s * 1e3, 1),
    }
    _access.info("%s ms", " ".join(str(fact) for fact in facts.values() if fact is not None), extra={"facts": facts})


def _canonical(scope: Scope) -> Scope:
    """The request with the usual spelling of its path: without slashes at its end and doubled ones at its start."""
    given = path_of(scope)
    route = "/" + given.strip("/") if given.endswith("/") or given.startswith("//") else given
    route = _PROBES.get(route, route)
    return scope if route == given else {**scope, "path": scope.get("root_path", "") + route}


class RequestMiddleware:
    """ASGI middleware around all routes.

    Args:
        direct: routes that are called directly, bypassing all other layers.
        shapes: routes within `app` that say how errors are told.
    """

    def __init__(
        self, app: ASGIApp, state: ServerState, direct: DirectRoutes, shapes: Sequence[DirectRoutes] = ()
    ) -> None:
        self._app = app
        self._state = state
        self._direct = direct
        self._shapes = (direct, *shapes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = scope
        scope.setdefault("headrace_began", time.monotonic())
        method = scope["method"]
        inner = "headrace_request_id" in scope  # the app of one of several models: the outer app answers for the id
        scope = _canonical(scope)
        identity = scope["headrace_request_id"] = (
            scope["headrace_request_id"] if inner else request_id(scope["headers"])
        )
        if method == "HEAD":  # answered like GET, without the body
            scope = {**scope, "method": "GET", "headrace_head": True}

        span = self._begin_span(scope)
        answer = _AnswerSender(send, None if inner else identity, is_head=method == "HEAD")
        status = None
        try:
            await self._serve(scope, receive, answer.send)
        except ApiError as error:
            await error_response(error, self._shape(scope))(scope, receive, answer.send)
        except ClientGoneError:
            status = CLIENT_GONE
            if (cycle := scope.get("headrace_cycle", lambda: None)()) is not None:
                cycle.break_off()
        finally:
            if answer.status:
                asked["headrace_begun"] = True
            status = status or answer.status or 500
            asked["headrace_done"] = done = scope.get("headrace_done") or self._done(scope, method, status)
            if done.route != EVENTS:
                self._state.listener(done)
                _log("" if inner else identity, scope, done)
            _end_span(span, done)

    def _done(self, scope: Scope, method: str, status: int) -> RequestDone:
        now, route = time.monotonic(), getattr(scope.get("route"), "path", "other")
        took_s, waited_s = now - scope["headrace_began"], scope.get("headrace_waited_s", 0.0)
        return RequestDone(route, method, status, took_s, now, self._state.name, waited_s)

    def _shape(self, scope: Scope) -> ErrorShape:
        """How an error of this request is told: before its route is called, as the protocol of its path tells it."""
        route = scope.get("route")
        for routes in self._shapes:
            if isinstance(route, DirectRoute):
                break
            found = routes.find(scope["method"], path_of(scope))
            route = None if found is None else found[0]
        return route.shape if isinstance(route, DirectRoute) else as_openai

    def _begin_span(self, scope: Scope) -> RequestTrace | None:
        tracing = self._state.tracing
        if tracing is None or scope["method"] != "POST" or "headrace_span" in scope:
            return None
        span = scope["headrace_span"] = tracing.begin("POST", scope["headers"], scope["headrace_request_id"])
        return span

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        headers = scope["headers"]
        state.hosts.check(headers)
        path = path_of(scope)
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        account = state.keys.account(headers)
        if account is not None:
            scope["headrace_caller"] = account.settings.name
            scope["headrace_tenant"] = account.tenant
        if path in OBSERVING:
            await self._app(scope, receive, send)
            return
        state.admit()
        body = self._body(path, account, scope, receive)
        app = self._app
        if (found := self._direct.find(scope["method"], path)) is not None:
            route, scope["path_params"] = found
            scope["route"], app = route, route.serve
        if account is not None:
            state.keys.enter(account)
        state.in_progress += 1
        try:
            body.check_headers(headers)
            await app(scope, body.receive, send)
        finally:
            state.in_progress -= 1
            body.release()
            if account is not None:
                account.leave()

    def _body(self, path: str, account: KeyAccount | None, scope: Scope, receive: Receive) -> _Body:
        limits = self._state.limits
        if path == UPLOADS:  # it is written to disk
            return _Body(receive, limits, (limits.max_file_bytes, "max_file_bytes"), per_block=True)
        body = _Body(receive, limits, (limits.max_body_bytes, "``max_body_bytes``"), per_block=False)
        if "headrace_counted" not in scope:
            scope["headrace_counted"] = True
            body.count(self._state.bodies, account.settings.name if account else (scope.get("client") or ("",))[0])
        return body


def path_of(scope: Scope) -> str:
    """The path below the one that the app is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _end_span(span: RequestTrace | None, done: RequestDone) -> None:
    if span is not None:
        span.end(done.route, done.status)


class _AnswerSender:
    """Sends the answer to one request, with the id of the request.

    Args:
        identity: the id to tell; None where another layer tells it.
        is_head: the answer goes without its body.
    """

    __slots__ = ("_identity", "_is_head", "_send", "status")

    def __init__(self, send: Send, identity: str | None, *, is_head: bool) -> None:
        self._send = send
        self._identity = None if identity is None else identity.encode()
        self._is_head = is_head
        self.status = 0
        """The status of the answer; 0 until it has begun."""

    async def send(self, message: Message) -> None:
        """As ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._identity is not None:
                ids = ((name, self._identity) for name in HEADERS)
                message["headers"] = [*message.get("headers", ()), *ids]
        elif self._is_head and "body" in message:
            message["body"] = b""
        await self._send(message)

    def send_whole(self, head: bytes, body: bytes) -> bool:
        """As `SendWhole`."""
        if (whole := whole_sender(self._send)) is None:
            return False
        if self._identity is not None:
            head += _IDS % (self._identity, self._identity)
        if done := whole(head, body):
            self.status = 200
        return done


class _Body:
    """Receives a request body within limits of size and time.

    Args:
        most: maximum size in bytes, and the name of this limit.
        per_block: the timeout applies to each block, not to the whole body.
    """

    __slots__ = (
        "_complete",
        "_counted",
        "_counter",
        "_deadline",
        "_held_until",
        "_limit",
        "_max_bytes",
        "_per_block",
        "_receive",
        "_received",
        "_timeout_s",
        "_who",
    )

    def __init__(self, receive: Receive, limits: ServeLimits, most: tuple[int, str], *, per_block: bool) -> None:
        self._receive = receive
        self._max_bytes, self._limit = most
        self._received = 0
        self._timeout_s = limits.body_timeout_s
        self._per_block = per_block
        self._deadline = 0.0
        self._complete = False
        self._counter: AdmissionController | None = None
        self._who: Hashable = None
        self._counted = 0
        self._held_until = 0.0

    def count(self, counter: AdmissionController, who: Hashable) -> None:
        """Count the body's bytes there, from its headers until `release`."""
        self._counter, self._who = counter, who

    def release(self) -> None:
        if self._counter is not None and self._counted:
            self._counter.release(1, self._counted, done=self._complete)
            self._counted = 0

    def check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuse a body by its headers, or count its length.

        Raises:
            ApiError: 413 for one that is too long, 415 for one that is compressed, 429 if there is no room for so much
                now, 501 for another transfer coding.
        """
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                if int(value) > self._max_bytes:
                    raise self._too_long()
                self._hold(int(value))
            elif name == b"content-encoding":
                _refuse_coding(
                    value, b"identity", 415, "Content-Encoding", "send the body as it is, without the header"
                )
            elif name == b"transfer-encoding":
                _refuse_coding(value, b"chunked", 501, "Transfer-Encoding", "only chunked is known, once")

    def _hold(self, size: int) -> None:
        """Count this many bytes, if they are more than before."""
        if self._counter is not None and size > self._counted:
            self.release()
            self._counter.reserve(1, size, math.inf, self._who)
            self._counted = size

    def _hold_arrived(self) -> None:
        """Hold no more than twice what has arrived: a client that announces a long body and is silent blocks nobody."""
        less = self._counted - max(2 * self._received, 1)
        if self._counter is not None and less > 0:
            self._counter.lower(less)
            self._counted -= less

    async def receive(self) -> Message:
        """Receive the next message. Raises ApiError: 413 for a body that is too long, 408 for one that is too slow."""
        if self._complete:
            return await self._receive()
        coming = self._receive().__await__()
        try:
            first = next(coming)
        except StopIteration as stop:  # usual: the body came with the headers, no timer is needed
            message: Message = stop.value
        else:
            message = await self._in_time(_RestOfAwaitable(coming, first))
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise self._too_long()
        if self._received > self._counted:  # no Content-Length
            self._hold(min(2 * self._received, self._max_bytes))
        self._complete = not message.get("more_body", False)
        return message

    async def _in_time(self, coming: _RestOfAwaitable) -> Message:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._per_block or not self._deadline:
            self._deadline = now + self._timeout_s
            self._held_until = now + _SILENT_S
        silent = loop.call_at(self._held_until, self._hold_arrived) if self._counted else None
        try:
            async with asyncio.timeout_at(self._deadline):
                return await coming
        except TimeoutError:
            message = f"the request's body did not arrive within {self._timeout_s:g} s (body_timeout_s); send it faster"
            raise ApiError(408, message, code="slow_body") from None
        finally:
            if silent is not None:
                silent.cancel()

    def _too_long(self) -> ApiError:
        message = f"the request is longer than the {self._max_bytes:,} bytes allowed ({self._limit})"
        return ApiError(413, message, code="too_long")


class _RestOfAwaitable:
    """The rest of an awaitable that was already started and has yielded `first`."""

    def __init__(self, coming: Generator[object, None, Message], first: object) -> None:
        self._coming = coming
        self._first = first

    def __await__(self) -> Generator[object, None, Message]:
        yielded = self._first
        try:
            while True:
                try:
                    yield yielded
                except BaseException as error:  # noqa: BLE001 - passed on, as `await` does
                    yielded = self._coming.throw(error)
                else:
                    yielded = next(self._coming)
        except StopIteration as stop:
            message: Message = stop.value
            return message


def _refuse_coding(value: bytes, known: bytes, status: int, header: str, way_out: str) -> None:
    if value.strip().lower() not in (known, b""):
        message = f"{header} is {shown(value.decode('latin-1'), 80)}: {way_out}"
        raise ApiError(status, message, code="unsupported_encoding", param=header)


def error_response(error: ApiError, shape: ErrorShape = as_openai) -> JsonReply:
    """The response to an error, as a protocol tells it."""
    # The rest of the body is not read, so the connection cannot be reused. A stopping server keeps none either.
    unread = error.body["error"]["code"] in ("slow_body", "not_ready") or error.status_code in (413, 501)
    close = {"Connection": "close"} if unread else {}
    status, body = shape(error)
    return JsonReply(body, status, {**(error.headers or {}), **close})
