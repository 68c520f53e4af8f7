"""OpenTelemetry as a plugin: whether its own environment variables ask for spans, and where these go."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from headrace.observe.exporters.otel import JobSpans, ServerSpans, Tracing

logger = logging.getLogger("headrace")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def wanted_exporters(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the exporters of spans that OpenTelemetry's variables ask for; empty for no spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    named = environment.get("OTEL_TRACES_EXPORTER", "")
    if not named.strip() and any(environment.get(name, "").strip() for name in _ENDPOINTS):
        named = "otlp"
    names = dict.fromkeys(stripped for name in named.split(",") if (stripped := name.strip()))
    return () if "none" in names else tuple(names)


def find_tracing() -> Tracing | None:
    """Where spans go; None for none.

    A program that has set a tracer provider gets them there. Otherwise the environment decides.
    """
    module = sys.modules.get("opentelemetry.trace")
    if module is not None and not isinstance(given := module.get_tracer_provider(), module.ProxyTracerProvider):
        from headrace.observe.exporters.otel import Tracing

        return Tracing(given, version("headrace"))
    exporters = wanted_exporters(os.environ)
    return _own(exporters) if exporters else None


@functools.cache
def _own(exporters: tuple[str, ...]) -> Tracing | None:
    """The process's own provider, as the environment describes it."""
    try:
        from headrace.observe.exporters.otel_export import make_tracing
    except ModuleNotFoundError as error:
        logger.warning(
            "headrace: the environment asks for OpenTelemetry, but %s is not installed; spans are off: "
            'pip install "headrace[otel]"', error.name,
        )  # fmt: skip
        return None
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name, "").strip())), "http/protobuf")
    return make_tracing(exporters, protocol, version("headrace"))


class OpenTelemetry:
    """Spans of jobs and servers, where OpenTelemetry's environment variables or a tracer provider ask for them."""

    extra: ClassVar[str] = "otel"

    def job(self, began: float, output: str, model: str, task: str) -> JobSpans | None:
        """The listener that traces a job which began at `began`, on the events' clock; None for no spans."""
        if (tracing := find_tracing()) is None:
            return None
        from headrace.observe.exporters.otel import JobSpans

        return JobSpans(tracing, began, output, model, task)

    def server(self) -> ServerSpans | None:
        """What traces the requests of a server; None for no spans."""
        if (tracing := find_tracing()) is None:
            return None
        from headrace.observe.exporters.otel import ServerSpans

        return ServerSpans(tracing)
