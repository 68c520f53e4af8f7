"""What traces jobs and servers: the plugins of the group `headrace.exporters` whose names begin with `trace.`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, cast

from headrace.app.jobs.describe import remove_logins
from headrace.app.jobs.plan import Plan
from headrace.errors import ConfigError
from headrace.events import Event
from headrace.plugins import known, load
from headrace.serving.tracing import RequestTracing

T = TypeVar("T")

logger = logging.getLogger("headrace")


class JobTracing(contextlib.AbstractContextManager["JobTracing"], Protocol):
    """A listener that traces one job, and ends with it."""

    def __call__(self, event: Event) -> None: ...


class ServerTracing(RequestTracing, Protocol):
    """Traces the requests of a server, and their batches."""

    def batches(self, process: Callable[[list[T]], Sequence[object]]) -> Callable[[list[object]], Sequence[object]]: ...


class TracingExporter(Protocol):
    """An object of the class that a package registers as `trace.NAME`. Each method returns None where it is off."""

    def job(self, began: float, output: str, model: str, task: str) -> JobTracing | None:
        """What traces a job that began at `began`, on the events' clock."""
        ...

    def server(self) -> ServerTracing | None:
        """What traces the requests of a server."""
        ...


def job_spans(plan: Plan, began: float) -> contextlib.AbstractContextManager[JobTracing | None]:
    """The listener that traces a job which began at `began`; a context manager of None for no spans."""
    config = plan.settings.config
    task = config.task or ""
    engine = config.engine if isinstance(config.engine, str) else None
    model = remove_logins(config.label or engine or task)
    output = remove_logins(plan.output.target)
    on = (spans for one in _exporters() if (spans := one.job(began, output, model, task)) is not None)
    return next(on, None) or contextlib.nullcontext()


def server_spans() -> ServerTracing | None:
    """What traces the requests of a server; None for no spans."""
    return next((spans for one in _exporters() if (spans := one.server()) is not None), None)


def _exporters() -> Iterator[TracingExporter]:
    """Those that can be used: a broken one costs a warning and itself."""
    for name in known("exporters"):
        if name.startswith("trace."):
            try:
                yield cast("TracingExporter", load("exporters", name, type)())
            except ConfigError as error:
                logger.warning("headrace: spans are off: %s", error)
