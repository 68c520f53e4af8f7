"""A server's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, RequestDone, StepDone, StreamChunkSent
from headrace.observe.accounting.timeline import Cause

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = tuple(float(2**power) for power in range(13))


class PrometheusListener:
    """An event listener with a metrics page; docs/serving.md describes each metric.

    Args:
        now: returns metrics that are kept elsewhere; called when the page is rendered.
    """

    def __init__(self, now: Callable[[], Iterable[Metric]], version: str) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"headrace_{name}", help_, labels, registry=registry)

        def histogram(name: str, help_: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"headrace_{name}", help_, labels, buckets=buckets, registry=registry)

        self._requests = counter("requests", "Requests answered, by route and status.", "route", "status")
        self._request_s = histogram(
            "request_duration_seconds", "Time from a request to the end of its response.", "route"
        )
        self._first_s = histogram(
            "time_to_first_token_seconds", "Time from a request to the first token of its stream."
        )
        self._between_s = histogram("inter_token_latency_seconds", "Time between two tokens of a stream.")
        self._batches = counter("batches", "Batches sent to the engine, by close reason.", "reason")
        self._batch_s = histogram("batch_duration_seconds", "Time of a batch, or a step, in the engine.")
        self._batch_size = histogram("batch_size", "Records in a batch, or in a step.", buckets=_SIZES)
        self._records = counter("records", "Records that left the engine, by result.", "result")
        self._stepped = counter("stepped_records", "Total records over all steps.")
        self._cost = counter("batch_cost", "Total cost of batches in the engine's unit: tokens for text.")
        self._padded = counter("batch_padded_cost", "Total cost of batches, padding included.")
        self._starved = counter("starved_seconds", "Time that the engine waited for input.")
        self._splits = counter("batch_splits", "Failed batches that were split and retried.")
        self._by_kind: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._good, self._failed = self._records.labels("ok"), self._records.labels("failed")
        Gauge("headrace_build_info", "Headrace's version.", ("version",), registry=registry).labels(version).set(1)
        registry.register(_Pulled(now))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

    def __call__(self, event: Event) -> None:
        match event:
            case RequestDone():
                counter, histogram = self._of(event.route, event.status)
                counter.inc()
                histogram.observe(event.duration_s)
            case BatchFormed():
                self._batches.labels(event.reason).inc()
                self._cost.inc(event.cost)
                self._padded.inc(event.padded_cost)
                self._starved.inc(event.starved_s)
                self._batch_size.observe(event.size)
            case BatchDone():
                self._batch_s.observe(event.duration_s)
                self._left(event.size - event.failed, event.failed)
            case StepDone():
                self._batch_s.observe(event.duration_s)
                self._batch_size.observe(event.size)
                self._stepped.inc(event.size)
                self._starved.inc(event.starved_s)
                self._left(event.finished - event.failed, event.failed)
            case StreamChunkSent():
                (self._first_s if event.first else self._between_s).observe(event.wait_s)
            case BatchSplit():
                self._splits.inc()

    def _of(self, route: str, status: int) -> tuple[Counter, Histogram]:
        """The metrics of a route and status, cached because looking them up by label is slow."""
        found = self._by_kind.get((route, status))
        if found is None:
            found = self._requests.labels(route, str(status)), self._request_s.labels(route)
            self._by_kind[route, status] = found
        return found

    def _left(self, good: int, failed: int) -> None:
        self._good.inc(good)
        self._failed.inc(failed)

    def render(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)


def device_seconds(seconds: Mapping[Cause, float]) -> Metric:
    """The seconds of a server's device, by cause."""
    family = CounterMetricFamily(
        "headrace_device_seconds", "Time of the device, by what it went into.", labels=("cause",)
    )
    for cause, spent in seconds.items():
        family.add_metric((cause,), spent)
    return family


class _Pulled(Collector):
    def __init__(self, now: Callable[[], Iterable[Metric]]) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        return self._now()


def merge_pages(pages: Mapping[str, bytes], label: str) -> bytes:
    """Merge the pages of several servers: each sample without the label gets it, and a gauge counts the servers.

    Args:
        pages: in Prometheus' text format, by label value; "" is a page of none of them.
        label: the label's name; the gauge is `headrace_{label}s`.
    """
    families: dict[str, Metric] = {}
    for whose, page in pages.items():
        for family in text_string_to_metric_families(page.decode("utf-8")):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={label: whose, **sample.labels}))
    there = GaugeMetricFamily(f"headrace_{label}s", f"{label.capitalize()}s that answered.", len(pages.keys() - {""}))
    registry = CollectorRegistry()
    registry.register(_Pulled(lambda: [there, *families.values()]))
    return generate_latest(registry)
