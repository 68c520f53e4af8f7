"""What happens in a server as counters and gauges for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, RequestDone, StepDone

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PrometheusListener:
    """A listener that counts, and the page that tells the counts.

    Args:
        now: gauges by name, asked for when the page is made.
    """

    def __init__(self, now: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        counter, registry = Counter, self._registry
        self._requests = counter("headrace_requests", "Requests answered.", ("route", "status"), registry=registry)
        self._request_s = Histogram(
            "headrace_request_seconds", "From a request to its answer.", ("route",), buckets=_SECONDS, registry=registry
        )
        self._batches = counter("headrace_batches", "Batches, by why they were closed.", ("reason",), registry=registry)
        self._batch_s = Histogram(
            "headrace_batch_seconds", "Batches or steps in the engine.", buckets=_SECONDS, registry=registry
        )
        self._records = counter("headrace_records", "Records that left the engine.", ("result",), registry=registry)
        self._stepped = counter(
            "headrace_stepped_records",
            "Records in each step, added up: the work of a step-wise engine.",
            registry=registry,
        )
        self._cost = counter("headrace_batch_cost", "Cost of all batches.", registry=registry)
        self._padded = counter("headrace_batch_padded_cost", "The same with padding.", registry=registry)
        self._starved = counter("headrace_starved_seconds", "A slot stood free.", registry=registry)
        self._splits = counter("headrace_batch_splits", "Failed batches run again in halves.", registry=registry)
        self._by_kind: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        registry.register(_Gauges(now))

    def __call__(self, event: Event) -> None:
        """Count an event."""
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
            case BatchDone():
                self._batch_s.observe(event.duration_s)
                self._left(event.size - event.failed, event.failed)
            case StepDone():
                self._batch_s.observe(event.duration_s)
                self._stepped.inc(event.size)
                self._starved.inc(event.starved_s)
                self._left(event.finished - event.failed, event.failed)
            case BatchSplit():
                self._splits.inc()
            case _:
                pass

    def _of(self, route: str, status: int) -> tuple[Counter, Histogram]:
        """The two that count a kind of request; looking them up by their labels would take longer than counting."""
        found = self._by_kind.get((route, status))
        if found is None:
            found = self._requests.labels(route, str(status)), self._request_s.labels(route)
            self._by_kind[route, status] = found
        return found

    def _left(self, good: int, failed: int) -> None:
        self._records.labels("ok").inc(good)
        self._records.labels("failed").inc(failed)

    def render(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, now: Callable[[], Mapping[str, float]]) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """One gauge for each name."""
        for name, value in self._now().items():
            yield GaugeMetricFamily(f"headrace_{name}", name.replace("_", " ").capitalize() + ".", value)


def merged(pages: Mapping[str, bytes], label: str) -> bytes:
    """Pages of several servers as one: each sample says whose it is, and a gauge how many there are.

    Args:
        pages: in Prometheus' text format, by the label's value.
        label: its name; `headrace_{label}s` is the gauge.
    """
    families: dict[str, Metric] = {}
    for whose, page in pages.items():
        for family in text_string_to_metric_families(page.decode("utf-8")):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, label: whose}))
    there = GaugeMetricFamily(f"headrace_{label}s", f"{label.capitalize()}s that answered.", len(pages))
    registry = CollectorRegistry()
    registry.register(_Fixed([there, *families.values()]))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """What there is."""
        return iter(self._families)
