"""Protocols: the routes of a server, each with the shapes of requests and of answers.

A package registers a `ServerProtocol` in the group `headrace.protocols`. Its routes make records of a request, give
them to `ServerState.service`, and make an answer of the outputs. What runs the records knows no protocol.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter

from headrace.engines.custom import load_factory
from headrace.engines.declaring import Task
from headrace.engines.tasks import all_tasks
from headrace.errors import ConfigError, tried
from headrace.plugins import working
from headrace.serving.errors import ErrorShape, as_openai
from headrace.serving.http.direct import DirectRoute
from headrace.serving.state import ServerState

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProtocol:
    """The routes of one API."""

    name: str
    routers: Callable[[ServerState, Task], Iterable[APIRouter]]
    """The routes that a server of this task has; none for a task that the API does not know."""
    errors: ErrorShape = as_openai
    """Gives the status and body by which the API tells an error."""
    paths: tuple[str, ...] = ()
    """What is of this API alone, with all paths below: errors are told there as it tells them, without a route too."""
    any_type: bool = False
    """Whether bodies are JSON whatever the content type says, as of `curl -d`; not of web pages."""
    order: int = 100
    """Routes are matched in this order. The body of a request decides between those with the same path: the route is
    meant whose required fields it has."""


def for_outputs(**routers: Callable[[ServerState], APIRouter]) -> Callable[[ServerState, Task], Iterable[APIRouter]]:
    """The routes of a protocol that knows tasks by their outputs, such as `text`; none for tasks of images."""

    def chosen(state: ServerState, task: Task) -> Iterable[APIRouter]:
        return [routers[task.outputs](state)] if task.outputs in routers and not task.images else []

    return chosen


def routers_of(state: ServerState, task: Task) -> Iterator[APIRouter]:
    """All routes of a server that take records: the task's own, then those of each protocol."""
    if task.routes is not None:
        yield _own_router(state, task, task.routes)
    for protocol in _protocols():
        for router in protocol.routers(state, task):
            for route in router.routes:
                if isinstance(route, DirectRoute):
                    route.shape, route.any_type = protocol.errors, protocol.any_type
            yield router


def _own_router(state: ServerState, task: Task, routes: str | Callable[[ServerState], object]) -> APIRouter:
    def made() -> object:
        return (load_factory(routes) if isinstance(routes, str) else routes)(state)

    found = tried(made)
    if isinstance(found, APIRouter):
        return found
    if isinstance(found, Exception):
        words = str(found) if isinstance(found, ConfigError) else f"{type(found).__name__}: {found}"
        raise ConfigError(f"the routes of task {task.name!r} cannot be made: {words}") from found
    kind = type(found).__name__
    raise ConfigError(f"the routes of task {task.name!r} are a {kind}: its function must return one FastAPI APIRouter")


def shape_of(path: str) -> ErrorShape:
    """How an error about this path is told."""
    return next(
        (
            protocol.errors
            for protocol in _protocols()
            for owned in protocol.paths
            if path == owned or path.startswith(f"{owned}/")
        ),
        as_openai,
    )


@functools.cache
def _protocols() -> Sequence[ServerProtocol]:
    """All protocols in their order. One of another package that cannot be used is told, and costs only itself."""
    tell = functools.partial(logger.warning, "headrace: served without a protocol: %s")
    return sorted(working("protocols", ServerProtocol, tell).values(), key=lambda one: one.order)


def tasks_by_path(state: ServerState) -> dict[str, list[str]]:
    """The names of the tasks whose servers have each route."""
    found: dict[str, list[str]] = {}
    for task in all_tasks():
        try:
            paths = {getattr(route, "path", "") for router in routers_of(state, task) for route in router.routes}
        except ConfigError:  # told where it is served
            continue
        for path in paths:
            found.setdefault(path, []).append(task.name)
    return found
