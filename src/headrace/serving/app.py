"""The FastAPI app: routes, middleware and the lifespan that loads and closes the model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.concurrency.daemon_thread import on_daemon_thread
from headrace.engines.tasks import task_named
from headrace.serving.errors import ApiError, invalid
from headrace.serving.http.direct import DirectRoute, DirectRoutes
from headrace.serving.http.docs_page import documents_page
from headrace.serving.http.middleware import RequestMiddleware, error_response, path_of
from headrace.serving.http.request_id import HEADERS, new_id
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocols import routers_of, shape_of, tasks_by_path
from headrace.serving.routes import dashboard as dashboard_routes
from headrace.serving.routes import status as status_routes
from headrace.serving.routes.batches import disk_error
from headrace.serving.service import Service
from headrace.serving.state import ServerState
from headrace.wording import shown

logger = logging.getLogger("headrace")

_OF_BATCHES = re.compile(r"/v1/(files|batches|messages/batches)(/|$)")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a server does beside answering requests, such as the Batch API."""

    routers: Sequence[APIRouter] = ()
    claimed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """A lock: acquired before the model is loaded, released when the server ends."""
    running: Callable[..., AbstractAsyncContextManager[None]] = contextlib.nullcontext
    """Runs while the service that it gets does, and ends before it; without one, while a pool loads models."""


ALONE = Beside()


def create_app(
    state: ServerState,
    make_service: Callable[[], Service],
    task: str,
    *,
    version: str = "",
    beside: Beside = ALONE,
) -> FastAPI:
    """Build an app that creates its service at startup and closes it at shutdown.

    Args:
        make_service: loads the model. Called on a thread because it blocks.
        task: the model's task. It decides which routes exist.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.begun = True
        with beside.claimed():
            # A load that hangs holds up no other, and one that ends after shutdown began is closed.
            service = await on_daemon_thread(make_service, lambda late: late.engine.close())
            await service.start()
            state.draining = state.dead = False
            before = state.ended
            try:
                async with beside.running(service):
                    state.loaded = service
                    yield
                    state.draining = True
            finally:
                state.ended, state.loaded = before + service.counted, None
                await service.end_batches(state.limits.drain_s)
                state.ended = before + service.counted  # with the last records; a closed engine has no figures
                await service.stop(state.limits.drain_s)
                if state.tracing is not None:
                    await asyncio.to_thread(state.tracing.flush)

    app = bare_app("Dynamic batching for one model.", version, lifespan)
    app.state.tasks_by_path = functools.cache(functools.partial(tasks_by_path, state))
    known = list(routers_of(state, task_named(task)))
    status, watching = status_routes.model_routes(state, task), dashboard_routes.server_router(state)
    for router in (*known, status, watching, *beside.routers):
        app.router.routes.extend(router.routes)  # include_router would add a layer to each request
    app.add_api_route("/docs", lambda: documents_page(app.openapi()), include_in_schema=False)
    direct = app.state.direct = DirectRoutes(route for router in known for route in router.routes)
    app.add_middleware(RequestMiddleware, state=state, direct=direct)
    return app


class _ErrorLayer(ServerErrorMiddleware):
    """Starlette's outermost layer. It hands on `send` as it is, so that an answer can go to the connection at once."""

    ours: ASGIApp
    """The first layer below FastAPI's own, which tell its telemetry, which is off, and answer for a parent's limit."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As Starlette, where `RequestMiddleware` tells whether the answer has begun."""
        try:
            await self.ours(scope, receive, send)
        except Exception as error:
            if "headrace_begun" in scope:
                raise
            if isinstance(error, HTTPException):  # the body is over the limit of the app that mounts this one
                await (await _http_error(Request(scope), error))(scope, receive, send)
                return
            failure = error

            async def failed(*_: object) -> None:
                raise failure

            await ServerErrorMiddleware(failed, self.handler, self.debug)(scope, receive, send)


class _App(FastAPI):
    """An app whose answers may go to the connection at once."""

    def build_middleware_stack(self) -> ASGIApp:
        """As FastAPI, less what wraps `send`, unless layers were added that may answer by themselves."""
        whole = super().build_middleware_stack()
        if len(self.user_middleware) > 1 or getattr(self, "max_body_size", None) is not None:
            return whole
        assert isinstance(whole, ServerErrorMiddleware)
        layer = _ErrorLayer(whole.app, whole.handler, whole.debug)
        layer.ours = layer.app
        while not isinstance(layer.ours, RequestMiddleware):
            layer.ours = layer.ours.app  # type: ignore[attr-defined] # each layer has one
        return layer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As FastAPI, without the steps of its telemetry, which is off."""
        if scope["type"] != "http" or self.middleware_stack is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        if self.root_path:
            scope["root_path"] = self.root_path
        await self.middleware_stack(scope, receive, send)


def bare_app(summary: str, version: str, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """An app with error handlers and without routes."""
    app = _App(
        title="Headrace",
        version=version,
        summary=summary,
        lifespan=lifespan,
        redirect_slashes=False,  # behind a proxy, the redirect may name the wrong address
        # FastAPI's own pages load scripts from a CDN into a browser that may hold an API key.
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # Headrace has its own
    )
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors in the format of the path's API, or in OpenAI's."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(Exception, _unexpected)


async def _http_error(request: Request, error: Exception) -> JsonReply:
    path = path_of(request.scope)
    shape = shape_of(path)
    if isinstance(error, ApiError):
        return error_response(error, shape)
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, OSError):  # FastAPI takes a full temporary folder for a wrong body
        return error_response(disk_error(error.__cause__, "this upload in its temporary folder"))
    status, message = error.status_code, str(error.detail)
    if status in (404, 405):
        return error_response(no_route(request.scope, [request.app]), shape)
    told = ApiError(status, message, code=HTTPStatus(status).name.lower())
    told.headers = {**(error.headers or {}), **(told.headers or {})}
    return error_response(told, shape)


def no_route(scope: Scope, apps: Sequence[FastAPI]) -> ApiError:
    """The error of a server, which has the routes of these apps, about a path or a method that it does not have."""
    path, (app, *_) = path_of(scope), apps
    if (allowed := _allowed(scope, apps)) and scope["method"] not in allowed:
        message = f"{path} accepts {' and '.join(allowed)}, not {scope['method']}"
        refused = ApiError(405, message, code="method_not_allowed")
        refused.headers = {"Allow": ", ".join(allowed)}
        return refused
    way_out = "/docs lists all routes"
    has_batches = any(getattr(route, "path", "") == "/v1/batches" for route in app.router.routes)
    if _OF_BATCHES.match(path) and not has_batches:
        way_out = "the Batch API needs ``headrace serve state=DIR``"
    elif hasattr(app.state, "tasks_by_path") and (tasks := app.state.tasks_by_path().get(path)):
        way_out = f"it is of servers with {' or '.join(f'``task={name}``' for name in tasks)}"
    return ApiError(404, f"there is no route {shown(path, 200)} on this server; {way_out}", code="not_found")


def _allowed(scope: Scope, apps: Sequence[FastAPI]) -> list[str]:
    """The methods of all routes with this path. Starlette names only those of the first."""
    methods: set[str] = set()
    for route in (route for app in apps for route in app.router.routes):
        if route.matches(scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def _bad_request(_: Request, error: Exception) -> JsonReply:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid(error))


async def _unexpected(request: Request, error: Exception) -> JsonReply:
    identity = request.scope.get("headrace_request_id") or new_id()  # of a layer that was added
    logger.error("request %s failed: %s", identity, type(error).__name__)
    message = f"internal server error; see the server log for request {identity}"
    route = request.scope.get("route")
    shape = route.shape if isinstance(route, DirectRoute) else shape_of(path_of(request.scope))
    status, body = shape(ApiError(500, message, code="internal_error"))
    # Where it waited for its model, the app of all models tells the ids.
    ids = {} if "headrace_waited_s" in request.scope else {name.decode(): identity for name in HEADERS}
    # The error is raised again for uvicorn, which logs its traceback and closes the connection.
    return JsonReply(body, status, {**ids, "Connection": "close"})
