"""A server of several models: the `model` of a request chooses the app that answers it, and a pool loads it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from headrace.engines.choosing.served import OLLAMA_TAG, ServedModel, is_nameless
from headrace.errors import ConfigError, EngineError, HeadraceError, StoppedError
from headrace.pool.pool import ModelPool
from headrace.records import Json, JsonObject
from headrace.serving.admission.waiting import disconnected
from headrace.serving.app import ALONE, Beside, bare_app, no_route
from headrace.serving.errors import ApiError, ClientGoneError, one_line
from headrace.serving.http.direct import DirectRoutes, check_type, loaded, read_body
from headrace.serving.http.docs_page import documents_page
from headrace.serving.http.middleware import RequestMiddleware, error_response, path_of
from headrace.serving.protocol.requests import HEAVY_BYTES, MOST_TIMEOUT_S, check_doubled, check_values
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocols import shape_of, tasks_by_path
from headrace.serving.routes import dashboard as dashboard_routes
from headrace.serving.routes.status import described, probed
from headrace.serving.routes.status import router as status_router
from headrace.serving.service import Service
from headrace.serving.state import ServerState, no_such_model
from headrace.wording import shown

logger = logging.getLogger("headrace")

_OF_ALL = frozenset({"/v2", "/api/tags", "/api/ps", "/api/version"})
"""Routes of models that describe their server."""


@dataclass(frozen=True, slots=True)
class ModelApp:
    """One model of the server."""

    served: ServedModel
    """Its names in requests; the first is the name in the pool."""
    task: str
    app: FastAPI
    """Answers the requests of this model. Its lifespan loads and closes the model."""
    state: ServerState
    """The state of `app`."""
    keys: frozenset[str] | None = None
    """Names of the API keys that may use it; None for all."""
    paths: frozenset[str] = field(init=False)
    """Its routes that take a request body."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in requests."""
        return self.served.names

    @property
    def direct(self) -> DirectRoutes:
        found: DirectRoutes = self.app.state.direct
        return found

    def __post_init__(self) -> None:
        found = (route for route in self.app.routes if "POST" in (getattr(route, "methods", None) or ()))
        object.__setattr__(self, "paths", frozenset(getattr(route, "path", "") for route in found))

    async def load(self) -> AsyncIterator[Service]:
        """What runs the model while it is loaded, for `ModelPool.add`."""
        async with self.app.router.lifespan_context(self.app):
            yield self.state.service


class ModelRouter:
    """ASGI app that gives each request to the app of its model.

    Args:
        pool: loads the models; it has one for each of `models`, by its first name.
    """

    def __init__(self, pool: ModelPool, models: Sequence[ModelApp], state: ServerState) -> None:
        self._pool = pool
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ClientGoneError: the client left while it waited for the model."""
        path = path_of(scope)
        try:
            await self._answer(path, scope, receive, send)
        except ApiError as error:
            routes = (model.direct.find(scope["method"], path) for model in self._models)
            shape = next((found[0].shape for found in routes if found is not None), shape_of(path))
            await error_response(error, shape)(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Give a request to the app of its model.

        Raises:
            ApiError: the request names no model or an unknown one, its key may not use the model, or the model cannot
                be loaded.
            ClientGoneError: the client left while it waited for the model.
        """
        named = [(model, *found) for model in self._models if (found := model.direct.find(scope["method"], path))]
        if named:
            _, route, given = named[0]
            scope["route"] = route
            if path in _OF_ALL or (given and "model" not in given):  # it is of no model, and needs none
                states = [model.state for model, _, _ in named]
                await route.serve({**scope, "path_params": given, "headrace_states": states}, receive, send)
                return
        if named and (scope["method"] == "GET" or "model" in named[0][2]):
            model = self._chosen(named[0][2].get("model"), [one for one, _, _ in named], path)
            self._check_key(model, scope)
            _, route, given = next(one for one in named if one[0] is model)
            if scope["method"] == "GET" and given:  # it describes the model, which is not loaded for it
                await route.serve({**scope, "path_params": given}, receive, send)
                return
            replay = _Replay(await read_body(receive), receive)
            await self._use(model, scope, replay, send, self._state.time_limit(scope["headers"], None))
            return
        offering = [model for model in self._models if path in model.paths]
        if not offering or scope["method"] != "POST":
            raise no_route(scope, [scope["app"], *(model.app for model in self._models)])
        body = await read_body(receive)
        fields = _fields(body) if len(body) <= HEAVY_BYTES else await asyncio.to_thread(_fields, body)
        model = self._chosen(fields.get("model"), offering, path)
        self._check_key(model, scope)
        if model.state.loaded is None:  # it is not loaded for a body that it would refuse
            for direct in (route for one, route, _ in named if one is model):
                await direct.check(body, scope)
        timeout_s = self._state.time_limit(scope["headers"], _timeout(fields))
        replay = _Replay(body, receive)
        del body, fields  # they may be long, and the answer may take long
        await self._use(model, scope, replay, send, timeout_s)

    @staticmethod
    def _check_key(model: ModelApp, scope: Scope) -> None:
        if model.keys is not None and scope.get("headrace_caller") not in model.keys:
            raise ApiError(
                403, f"this API key may not use model {model.names[0]!r}", code="model_not_allowed", param="model"
            )

    async def _use(self, model: ModelApp, scope: Scope, replay: _Replay, send: Send, timeout_s: float) -> None:
        name = model.names[0]
        using = self._pool.use(name)
        began = time.monotonic()
        await self._entered(using, name, replay.rest, timeout_s)
        waited_s = time.monotonic() - began
        inner = {**scope, "path": path_of(scope), "root_path": "", "app_root_path": "", "headrace_waited_s": waited_s}
        try:
            await model.app(inner, replay, send)
        finally:
            scope["headrace_done"] = inner.get("headrace_done")
            await using.__aexit__(None, None, None)
            if model.state.dead:
                logger.error("the engine of model %r died; the model is loaded again for the next request", name)
                self._pool.unload(name)

    async def _entered(
        self, using: AbstractAsyncContextManager[object], name: str, receive: Receive, timeout_s: float
    ) -> None:
        """Wait until the model is loaded, unless the client leaves or the request times out before."""
        entering = asyncio.ensure_future(using.__aenter__())
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({entering, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if entering.done():
                entering.result()
                return
            if leaving.done():
                raise ClientGoneError
            raise ApiError(
                503, f"model {name!r} was not loaded within {timeout_s:g} s", code="not_ready", retry_after_s=5
            )
        except StoppedError:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5) from None
        except (EngineError, ConfigError) as error:
            raise ApiError(503, one_line(error), code="model_not_loaded", retry_after_s=5) from error
        except asyncio.CancelledError:
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                await using.__aexit__(None, None, None)  # it was granted at the same moment
            raise
        finally:
            leaving.cancel()
            entering.cancel()
            await asyncio.gather(entering, leaving, return_exceptions=True)

    def _chosen(self, name: object, offering: Sequence[ModelApp], path: str) -> ModelApp:
        if len(offering) == 1 and (name is None or (is_nameless(name) and name not in self._by_name)):
            return offering[0]
        model = self.named(name, path, offering)
        if model not in offering:
            message = (
                f"model {shown(name, 200)} ({model.task}) has no route {path}; it has {', '.join(sorted(model.paths))}"
            )
            raise ApiError(404, message, code="wrong_task", param="model")
        return model

    def named(self, name: object, path: str = "", offering: Sequence[ModelApp] | None = None) -> ModelApp:
        """The model that a request to this path names, which `offering` or all have.

        Raises:
            ApiError: 400 if it names none, 404 for an unknown one.
        """
        if name is None:
            names = ", ".join(repr(model.names[0]) for model in offering or self._models)
            raise ApiError(400, f"model is missing; {path} has {names}", code="missing_model", param="model")
        model = self._by_name.get(name) if isinstance(name, str) else None
        if model is None and isinstance(name, str) and path.startswith("/api/"):
            model = self._by_name.get(name.removesuffix(OLLAMA_TAG))
        if model is None:
            message = no_such_model(name, tuple(self._by_name), several=True)
            raise ApiError(404, message, code="model_not_found", param="model")
        return model

    def entry(self, name: str) -> JsonObject:
        """What is told of a model under one of its names. Raises ApiError: 404 for an unknown one."""
        model = self.named(name)
        return {**described(name, model.task, model.served), "status": self._pool.stats()[model.names[0]].phase}


class _Replay:
    """An ASGI receive function that gives a body that was read before, then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self.rest = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self.rest()


def _fields(body: bytes) -> JsonObject:
    """The fields of a JSON object.

    Raises:
        ApiError: 400 for a body that is not a JSON object, or holds too many values.
    """
    if len(body) > HEAVY_BYTES:
        check_values(body)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:  # it is stricter than the models' apps
        content = loaded(body)
    if not isinstance(content, dict):
        raise ApiError(400, "Input should be an object", code="model_type")
    return content


def _timeout(fields: JsonObject) -> float | None:
    """The time limit that a body sets; None for none, and for one that the model's app refuses."""
    given = fields.get("timeout")
    return float(given) if isinstance(given, (int, float)) and 0 < given <= MOST_TIMEOUT_S else None


def create_pooled_app(
    pool: ModelPool,
    models: Sequence[ModelApp],
    state: ServerState,
    *,
    version: str = "",
    beside: Beside = ALONE,
) -> FastAPI:
    """Build the app that serves all models.

    Args:
        pool: has each of `models`, by its first name.
        state: of this app; each model's app has its own.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.begun = True
        with beside.claimed():
            async with pool, beside.running():
                state.draining = False
                state.serving = True
                try:
                    yield
                finally:
                    state.draining, state.serving = True, False

    app = bare_app("Dynamic batching for several models on one device.", version, lifespan)
    app.state.tasks_by_path = functools.cache(functools.partial(tasks_by_path, state))
    router = ModelRouter(pool, models, state)
    state.on_abandon = pool.turn_away
    watching = dashboard_routes.server_router(state)
    status, admin = _status_routes(models, router, state), _admin_routes(pool, router, state)
    for routes in (status, watching, admin, *beside.routers):
        app.router.routes.extend(routes.routes)
    own = app.openapi
    app.openapi = lambda: _documents(own(), models)  # type: ignore[method-assign]
    app.add_api_route("/docs", lambda: documents_page(app.openapi()), include_in_schema=False)
    app.router.routes.append(Mount("/", router))
    app.add_middleware(RequestMiddleware, state=state, direct=DirectRoutes(()), shapes=[one.direct for one in models])
    return app


def _status_routes(models: Sequence[ModelApp], router: ModelRouter, state: ServerState) -> APIRouter:
    names = [name for model in models for name in model.names]
    routes = status_router(state, lambda: list(map(router.entry, names)), router.entry)

    @routes.get("/ready/{model:path}")
    async def ready_model(model: str) -> Response:
        """Readiness of one model: 503 unless it is loaded."""
        phase = str(router.entry(model)["status"])
        return probed(phase, good=phase == "loaded")

    return routes


def _admin_routes(pool: ModelPool, router: ModelRouter, state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["models"])

    async def asked(request: Request) -> ModelApp:
        account = state.keys.account(request.scope["headers"])
        if account is not None and not account.settings.admin:
            raise ApiError(403, "loading and unloading need an admin key", code="admin_only")
        check_type(request.scope["headers"], any_type=True)
        fields = _fields(body := await request.body())
        check_doubled(body, len(fields))
        if unknown := [name for name in fields if name != "model"]:
            message = f"unknown field {shown(unknown[0])}; known: model"
            raise ApiError(400, message, code="unknown_field", param=unknown[0])
        return router.named(fields.get("model"), request.url.path)

    @routes.post("/models/load")
    async def load(request: Request) -> Response:
        """Load a model now: `{"model": NAME}`. Needs an admin key if there are keys."""
        model = await asked(request)
        try:
            async with asyncio.timeout(state.limits.timeout_s), pool.use(model.names[0]):
                pass
        except (HeadraceError, TimeoutError) as error:
            raise ApiError(
                503, one_line(error) or "it takes too long", code="model_not_loaded", retry_after_s=5
            ) from error
        return JsonReply(router.entry(model.names[0]))

    @routes.post("/models/unload")
    async def unload(request: Request) -> Response:
        """Unload a model when its requests are done: `{"model": NAME}`. Needs an admin key if there are keys."""
        model = await asked(request)
        pool.unload(model.names[0])
        return JsonReply(router.entry(model.names[0]))

    return routes


def _documents(document: dict[str, Json], models: Iterable[ModelApp]) -> dict[str, Json]:
    """The OpenAPI document with the routes of all models."""
    paths, schemas = dict(document["paths"]), dict(document.get("components", {}).get("schemas", {}))
    for model in models:
        theirs = model.app.openapi()
        for path, operations in theirs["paths"].items():
            if path in model.paths:
                paths.setdefault(path, operations)
        schemas = {**theirs.get("components", {}).get("schemas", {}), **schemas}
    return {**document, "paths": paths, "components": {"schemas": schemas}}
