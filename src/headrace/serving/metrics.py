"""Metrics that are read from the server's state when Prometheus scrapes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.pool.pool import ModelPool
from headrace.serving.batches.batch import ENDED
from headrace.serving.batches.store import Batches
from headrace.serving.counted import ServiceCounts
from headrace.serving.service import Service
from headrace.serving.state import ServerState


@dataclass(frozen=True, slots=True)
class BulkState:
    """The state of the Batch API."""

    batches: Batches
    records: int
    """Inputs answered."""
    waiting: int
    """Inputs that wait for a gap between online requests."""


def families(state: ServerState, bulk: BulkState | None, pool: ModelPool | None = None) -> Iterator[Metric]:
    """All metric families that are not updated by events; for several models, those that no single model has.

    Args:
        bulk: None if there is no Batch API now.
        pool: loads the models, if there are several.
    """
    yield _gauge("ready", "Whether the server accepts requests.", float(state.ready))
    if state.keys.required:
        keys = state.keys.use().items()
        yield _counter("key_requests", "Requests of a key.", {name: of.requests for name, of in keys}, "key")
        refused = {name: of.refused for name, of in keys}
        yield _counter("key_refused", "Requests refused by a key's own limits.", refused, "key")
        running = {name: of.running for name, of in keys}
        yield _gauge("key_requests_running", "Requests of a key in progress.", running, "key")
    if state.loaded is not None:
        yield from _of_service(state.loaded)
    if not state.parts:
        yield from _of_counters(state.counted)
    if bulk is not None:
        yield from _of_batches(bulk)
    if pool is not None:
        yield from _of_pool(pool)


def _of_service(service: Service) -> Iterator[Metric]:
    stats, admission = service.stats, service.admission
    model = GaugeMetricFamily("headrace_model_info", "The served model.", labels=("model", "task"))
    model.add_metric((service.name, service.task), 1)
    yield model
    yield _gauge("accepted_records", "Records accepted and not yet answered.", admission.requests)
    yield _gauge("accepted_cost", "Their estimated cost.", admission.cost)
    yield _gauge("waiting_records", "Records waiting for a batch.", stats.waiting)
    yield _gauge("waiting_cost", "Their cost.", stats.waiting_cost)
    yield _gauge("in_flight_records", "Records in the engine.", stats.in_flight)


def _of_counters(counted: ServiceCounts) -> Iterator[Metric]:
    yield _counter("refused_records", "Records refused with 429 or 408 on arrival.", counted.refused)
    yield _counter("cancelled_records", "Records whose client disconnected before the answer.", counted.cancelled)
    yield _counter("prompt_tokens", "Input tokens of answered records.", counted.prompt_tokens)
    yield _counter("generation_tokens", "Generated tokens.", counted.generated_tokens)
    if (cache := counted.cache) is not None:
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.hits)
        yield _counter("prompt_tokens_computed", "Prompt tokens that the model computed.", cache.computed)
    yield _counter("busy_seconds", "Time the engine was busy.", counted.stats.busy_time_s)
    waits = counted.stats.queue_times
    told = ((bound, count) for bound, count in waits.cumulative if bound > 1e-4)
    buckets = [("+Inf" if math.isinf(bound) else f"{bound:g}", count) for bound, count in told]
    yield HistogramMetricFamily(
        "headrace_queue_time_seconds", "Time records waited for their batch.", buckets, waits.total_s
    )


def _of_batches(bulk: BulkState) -> Iterator[Metric]:
    ended: dict[str, int] = {status: bulk.batches.ended[status] for status in ENDED}
    yield _gauge("bulk_batches", "Batches of the Batch API, by status.", bulk.batches.counts(), "status")
    yield _counter("bulk_batches_ended", "Batches that have ended.", ended, "status")
    yield _counter("bulk_records", "Batch inputs answered.", bulk.records)
    yield _gauge("bulk_records_waiting", "Batch inputs waiting for a gap between online requests.", bulk.waiting)


def _of_pool(pool: ModelPool) -> Iterator[Metric]:
    models = pool.stats().items()
    yield _counter("model_loads", "Times that a model was loaded.", {name: of.loads for name, of in models}, "model")
    failed = {name: of.failed_loads for name, of in models}
    yield _counter("model_failed_loads", "Loads of a model that failed.", failed, "model")
    waits = {name: of.wait_s for name, of in models}
    yield _counter("model_wait_seconds", "Time that requests waited for a model to be loaded.", waits, "model")
    loaded = {name: of.phase == "loaded" for name, of in models}
    yield _gauge("model_loaded", "Whether a model is loaded.", loaded, "model")


def _gauge(name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"headrace_{name}", about, labels=(label,) if label else ()), value)


def _counter(name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"headrace_{name}", about, labels=(label,) if label else ()), value)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]) -> Metric:
    """The family with this value, or with one for each name."""
    for name, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric(() if name is None else (name,), float(one))
    return family
