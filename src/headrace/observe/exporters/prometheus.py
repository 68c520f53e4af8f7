"""A server's Prometheus metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, RequestDone, StepDone, StreamChunkSent
from headrace.observe.accounting.timeline import Cause

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = tuple(float(2**power) for power in range(13))


class _LabelledSums:
    """A counter. prometheus_client's own takes as long for one request as all else that a server observes of it."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self._about = (f"headrace_{name}", about)
        self._labels = labels
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float, {} if labels else {(): 0.0})

    def add(self, value: float, *labels: str) -> None:
        self._values[labels] += value

    def family(self) -> Metric:
        family = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class _LabelledHistogram:
    """A histogram, likewise."""

    def __init__(self, name: str, about: str, *labels: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._about = (f"headrace_{name}", about)
        self._labels = labels
        self._bounds = bounds
        self._named = [*map(str, bounds), "+Inf"]
        self._counts: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * (len(bounds) + 2))
        """The values of all buckets, and at last the sum."""
        if not labels:
            self._counts[()]

    def add(self, value: float, *labels: str) -> None:
        counts = self._counts[labels]
        counts[bisect_left(self._bounds, value)] += 1
        counts[-1] += value

    def family(self) -> Metric:
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        for labels, (*counts, total) in self._counts.items():
            family.add_metric(labels, list(zip(self._named, accumulate(counts), strict=True)), total)
        return family


class PrometheusListener:
    """A thread-safe event listener with a metrics page; docs/serving.md describes each metric.

    Args:
        now: returns metrics that are kept elsewhere; called when the page is rendered.
    """

    def __init__(self, now: Callable[[], Iterable[Metric]], version: str) -> None:
        self._lock = threading.Lock()
        self._requests = _LabelledSums("requests", "Requests answered, by route and status.", "route", "status")
        self._request_s = _LabelledHistogram(
            "request_duration_seconds", "Time from a request to the end of its response.", "route"
        )
        self._first_s = _LabelledHistogram(
            "time_to_first_token_seconds", "Time from a request to the first token of its stream."
        )
        self._between_s = _LabelledHistogram("inter_token_latency_seconds", "Time between two tokens of a stream.")
        self._batches = _LabelledSums("batches", "Batches sent to the engine, by close reason.", "reason")
        self._batch_s = _LabelledHistogram("batch_duration_seconds", "Time of a batch, or a step, in the engine.")
        self._batch_size = _LabelledHistogram("batch_size", "Records in a batch, or in a step.", bounds=_SIZES)
        self._records = _LabelledSums("records", "Records that left the engine, by result.", "result")
        self._stepped = _LabelledSums("stepped_records", "Total records over all steps.")
        self._cost = _LabelledSums("batch_cost", "Total cost of batches in the engine's unit: tokens for text.")
        self._padded = _LabelledSums("batch_padded_cost", "Total cost of batches, padding included.")
        self._starved = _LabelledSums("starved_seconds", "Time that the engine waited for input.")
        self._splits = _LabelledSums("batch_splits", "Failed batches that were split and retried.")
        self._left(0, 0)
        self._families = [one for one in vars(self).values() if isinstance(one, _LabelledSums | _LabelledHistogram)]
        self._registry = registry = CollectorRegistry()
        registry.register(_Pulled(self._collect))
        Gauge("headrace_build_info", "Headrace's version.", ("version",), registry=registry).labels(version).set(1)
        registry.register(_Pulled(now))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case RequestDone():
                    self._requests.add(1, event.route, str(event.status))
                    self._request_s.add(event.duration_s, event.route)
                case BatchFormed():
                    self._batches.add(1, event.reason)
                    self._cost.add(event.cost)
                    self._padded.add(event.padded_cost)
                    self._starved.add(event.starved_s)
                    self._batch_size.add(event.size)
                case BatchDone():
                    self._batch_s.add(event.duration_s)
                    self._left(event.size - event.failed, event.failed)
                case StepDone():
                    self._batch_s.add(event.duration_s)
                    self._batch_size.add(event.size)
                    self._stepped.add(event.size)
                    self._starved.add(event.starved_s)
                    self._left(event.finished - event.failed, event.failed)
                case StreamChunkSent():
                    (self._first_s if event.first else self._between_s).add(event.wait_s)
                case BatchSplit():
                    self._splits.add(1)

    def _left(self, good: int, failed: int) -> None:
        self._records.add(good, "ok")
        self._records.add(failed, "failed")

    def _collect(self) -> list[Metric]:
        with self._lock:
            return [one.family() for one in self._families]

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
