"""Sends spans to the exporters that OpenTelemetry's environment variables name, without ever holding up the work."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import entry_points

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from headrace.errors import text_of, tried
from headrace.observe.exporters.otel import Tracing

logger = logging.getLogger("headrace")

_GROUP = "opentelemetry_traces_exporter"
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class _Watched(SpanExporter):
    """Says once that spans cannot be sent, and once that they can be again."""

    def __init__(self, name: str, inner: SpanExporter) -> None:
        self._name = name
        self._inner = inner
        self.failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - an exporter's own code may raise anything
            logger.debug("headrace: %s raised %s", self._name, text_of(error))
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed != self.failing:
            self.failing = failed
            said = "cannot be sent, and are dropped" if failed else "are sent again"
            logger.warning("headrace: OpenTelemetry spans %s (exporter %s)", said, self._name)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def make_tracing(names: Sequence[str], protocol: str, version: str) -> Tracing | None:
    """A provider that sends to these exporters on its own thread; None if one of them cannot be used.

    Args:
        names: of exporters, as in OTEL_TRACES_EXPORTER.
        protocol: of "otlp".
    """
    watched = tried(lambda: [_Watched(name, _exporter(name, protocol)) for name in names])
    if isinstance(watched, Exception):  # its own code may raise anything about its settings
        logger.warning("headrace: OpenTelemetry spans are off: %s", text_of(watched))
        return None
    resource = Resource.create()
    if not os.environ.get("OTEL_SERVICE_NAME") and str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "headrace"}))
    # Its hook at exit would wait for a collector that is gone; whoever ends a job or server flushes.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in watched:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    # It repeats every failed try; `_Watched` says it once.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    return Tracing(provider, version, lambda: any(exporter.failing for exporter in watched))


def _exporter(name: str, protocol: str) -> SpanExporter:
    entry = _OTLP.get(protocol, protocol) if name == "otlp" else name
    found = list(entry_points(group=_GROUP, name=entry))
    if not found:
        known = ", ".join(sorted({"none", "otlp", *(one.name for one in entry_points(group=_GROUP))}))
        asked = f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}" if name == "otlp" else f"OTEL_TRACES_EXPORTER={name}"
        raise ValueError(f"{asked} names no installed exporter; installed: {known}")
    exporter: SpanExporter = found[0].load()()
    return exporter
