"""`/dashboard` and what it shows, and `/report`: where the time of the device goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from headrace.serving.admission.waiting import disconnected
from headrace.serving.errors import ApiError
from headrace.serving.live import LiveState, Observed
from headrace.serving.routes.streams import UNBUFFERED
from headrace.serving.state import ServerState

_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    UNBUFFERED,
]
_FRESH = {"Cache-Control": "no-store"}


def server_router(state: ServerState) -> APIRouter:
    """The routes of a server; none for a model whose server is observed as a whole."""
    if state.observed is None:
        return APIRouter()
    return router(state.observed, state.keys.check_metrics, lambda: state.ready, state.limits.write_timeout_s)


def refusing_router() -> APIRouter:
    """The same routes of a server with replicas: each says that it has none, and what to use."""
    routes = APIRouter(tags=["status"])

    async def refuse() -> None:
        """A server with replicas has no dashboard and no report."""
        message = (
            "a server with replicas has no dashboard and no report: GET /metrics has the counters of all replicas, and "
            "deploy/grafana-dashboard.json draws them"
        )
        raise ApiError(501, message, code="not_on_ray")

    for path in ("/dashboard", "/dashboard/state", "/dashboard/events", "/report"):
        routes.add_api_route(path, refuse, include_in_schema=False)
    return routes


def router(
    observed: Observed,
    check: Callable[[Iterable[tuple[bytes, bytes]]], None],
    going: Callable[[], bool],
    timeout_s: float,
) -> APIRouter:
    """The routes.

    Args:
        check: raises an ApiError for the headers of a request that may not see it.
        going: whether there will be more to see.
        timeout_s: within which a viewer reads what it is sent.
    """
    routes = APIRouter(tags=["status"])
    live = LiveState(observed, going)

    @routes.get("/dashboard", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def dashboard() -> Response:
        """A page that shows what happens now. It asks for the API key, if there is one."""
        return Response(observed.page.content, media_type="text/html", headers=dict(observed.page.headers))

    @routes.get("/dashboard/state", response_class=Response, responses={200: {"content": {"application/json": {}}}})
    async def present(request: Request) -> Response:
        """What happens now, as `headrace top` reads it. If any admin key exists, only admin keys may read it."""
        check(request.scope["headers"])
        return Response(await live.latest(), media_type="application/json", headers=_FRESH)

    @routes.get("/dashboard/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def events(request: Request) -> Response:
        """The same as server-sent events, one a second."""
        check(request.scope["headers"])
        return _Feed(live, timeout_s)

    @routes.get("/report", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def report(request: Request) -> Response:
        """One HTML page of where the time went: for a server, in this hour and the last one."""
        check(request.scope["headers"])
        return Response(await live.report(), media_type="text/html", headers=_FRESH)

    return routes


class _Feed(Response):
    """Sends each frame to one viewer until the viewer leaves or the server stops."""

    def __init__(self, live: LiveState, timeout_s: float) -> None:
        super().__init__()
        self._live = live
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.enter()
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
            frame: bytes | None = b"" if scope.get("headrace_head") else await self._live.latest()
            while frame and not leaving.done():
                async with asyncio.timeout(self._timeout_s):
                    await send({"type": "http.response.body", "body": b"data: " + frame + b"\n\n", "more_body": True})
                frame = await self._live.next()
            async with asyncio.timeout(self._timeout_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            pass  # it reads nothing: the same as one that has left
        finally:
            leaving.cancel()
            self._live.leave()
