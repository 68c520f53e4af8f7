"""The FastAPI app: routes and middleware around a model that lives as long as the app's lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from headrace.openai_protocol import error_body
from headrace.serving.errors import ApiError, invalid
from headrace.serving.http.direct import DirectRoute
from headrace.serving.http.docs_page import documents_page
from headrace.serving.http.middleware import RequestMiddleware, error_response
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.routes import generation as generation_routes
from headrace.serving.routes import images as image_routes
from headrace.serving.routes import pairs as pair_routes
from headrace.serving.routes import status as status_routes
from headrace.serving.routes import text as text_routes
from headrace.serving.service import Service
from headrace.serving.state import ServerState

logger = logging.getLogger("headrace")

# The routes of each task. /generate is for every task whose records are single texts.
_ROUTES: dict[str, Callable[[ServerState], APIRouter]] = {
    "generate": generation_routes.router,
    "embed": text_routes.embedding_router,
    "classify": text_routes.classify_router,
    "zero-shot": text_routes.classify_router,
    "score": pair_routes.router,
    "image-classify": image_routes.classify_router,
    "image-embed": image_routes.embedding_router,
}


_NO_TEXTS = frozenset({"score", "image-classify", "image-embed"})


class Background(Protocol):
    """What lives beside a service."""

    def claimed(self) -> contextlib.AbstractContextManager[None]:
        """Taken before the model is loaded, and held to the very end."""
        ...

    def running(self, service: Service) -> contextlib.AbstractAsyncContextManager[None]:
        """What runs while the service does, and ends before it."""
        ...


def create_app(
    host: ServerState,
    make_service: Callable[[], Service],
    task: str,
    *,
    version: str = "",
    routers: Sequence[APIRouter] = (),
    background: Background | None = None,
) -> FastAPI:
    """An app that makes its service when it starts and closes it when it ends.

    Args:
        host: what the routes share.
        make_service: loads the model; called on a thread, as it blocks.
        task: of the model: it decides which routes there are.
        version: Headrace's, in the documents.
        routers: further routes.
        background: what else lives as long as the service.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with background.claimed() if background is not None else contextlib.nullcontext():
            service = await asyncio.to_thread(make_service)
            await service.start()
            host.draining = host.dead = False
            try:
                async with background.running(service) if background is not None else contextlib.nullcontext():
                    host.loaded = service
                    yield
                    host.draining = True
            finally:
                host.loaded = None
                await service.stop(host.limits.drain_s)

    app = FastAPI(
        title="Headrace",
        version=version,
        summary="Many callers, one batcher, one model.",
        lifespan=lifespan,
        redirect_slashes=False,  # to an address that may be another behind a proxy
        # The framework's pages load their scripts from elsewhere, into a browser that may hold a key.
        docs_url=None,
        redoc_url=None,
    )
    known = [status_routes.router(host, task)]
    if task not in _NO_TEXTS:
        known.insert(0, text_routes.generate_router(host))
    if task in _ROUTES:
        known.insert(0, _ROUTES[task](host))  # routes are looked through in order, for each request
    documents = APIRouter()
    documents.add_api_route("/docs", lambda: documents_page(app.openapi()), include_in_schema=False)
    for router in (*known, *routers, documents):
        app.router.routes.extend(router.routes)  # an included router would be one more layer around each request
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(Exception, _unexpected)
    direct = {route.path: route for router in known for route in router.routes if isinstance(route, DirectRoute)}
    app.add_middleware(RequestMiddleware, host=host, direct=direct)
    return app


async def _http_error(request: Request, error: Exception) -> JsonReply:
    if isinstance(error, ApiError):
        return error_response(error)
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = _allowed(request)
        message = f"{request.url.path} takes {' and '.join(allowed)}, not {request.method}"
        return JsonReply(error_body(405, message, "method_not_allowed"), 405, {"Allow": ", ".join(allowed)})
    status, message = error.status_code, str(error.detail)
    if status == 404:
        message = f"there is no route {request.url.path!r:.200} on this server; /docs lists those that there are"
    body = error_body(status, message, HTTPStatus(status).name.lower())
    return JsonReply(body, status, error.headers)


def _allowed(request: Request) -> list[str]:
    """The methods of all routes with this path; the framework names those of the first."""
    methods: set[str] = set()
    for route in request.app.router.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def _bad_request(_: Request, error: Exception) -> JsonReply:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid(error))


async def _unexpected(request: Request, error: Exception) -> JsonReply:  # the server logs it too, with its trace
    identity = request.scope["headrace_request_id"]
    logger.error("request %s failed: %s", identity, type(error).__name__)
    body = error_body(500, f"the server failed on this request; its log says why, at {identity}", "internal_error")
    # The error goes on to uvicorn, which closes the connection.
    return JsonReply(body, 500, {"X-Request-ID": identity, "Connection": "close"})
