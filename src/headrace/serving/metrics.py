"""Metrics that are read from the server's state when Prometheus scrapes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.engines.capabilities import PREFIX_CACHING
from headrace.pool.pool import ModelPool
from headrace.serving.auth import Keys
from headrace.serving.batches.batch import ENDED
from headrace.serving.batches.store import Batches
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


def families(state: ServerState, bulk: Callable[[], BulkState | None]) -> Iterator[Metric]:
    """All metric families that are not updated by events."""
    service = state.loaded
    yield _gauge("ready", "Whether the server accepts requests.", float(state.ready))
    yield from _of_keys(state.keys)
    if service is not None:
        yield from _of_service(service)
    bulk_state = bulk()
    if bulk_state is not None:
        yield from _of_batches(bulk_state)


def families_of_pool(state: ServerState, pool: ModelPool, bulk: Callable[[], BulkState | None]) -> Iterator[Metric]:
    """The metric families of a server of several models that no single model has."""
    yield from families(state, bulk)
    loads = CounterMetricFamily("headrace_model_loads", "Times that a model was loaded.", labels=("model",))
    failed = CounterMetricFamily("headrace_model_failed_loads", "Loads of a model that failed.", labels=("model",))
    waits = CounterMetricFamily(
        "headrace_model_wait_seconds", "Time that requests waited for a model to be loaded.", labels=("model",)
    )
    loaded = GaugeMetricFamily("headrace_model_loaded", "Whether a model is loaded.", labels=("model",))
    for name, stats in pool.stats().items():
        loads.add_metric((name,), stats.loads)
        failed.add_metric((name,), stats.failed_loads)
        waits.add_metric((name,), stats.wait_s)
        loaded.add_metric((name,), float(stats.phase == "loaded"))
    yield from (loads, failed, waits, loaded)


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
    yield _counter("refused_records", "Records refused with 429 or 408 on arrival.", admission.refused)
    yield _counter("cancelled_records", "Records whose client disconnected before the answer.", service.cancelled)
    yield _counter("prompt_tokens", "Input tokens of answered records.", service.tokens.prompt)
    yield _counter("generation_tokens", "Generated tokens.", service.tokens.generated)
    if (caching := PREFIX_CACHING.of(service.engine)) is not None:
        cache = caching.prefix_cache_stats()
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.hits)
        yield _counter("prompt_tokens_computed", "Prompt tokens that the model computed.", cache.computed)
    yield _counter("busy_seconds", "Time the engine was busy.", stats.busy_time_s)
    waits = stats.queue_times
    buckets = [(_bound(bound), count) for bound, count in waits.cumulative if bound > 1e-4]
    yield HistogramMetricFamily(
        "headrace_queue_time_seconds", "Time records waited for their batch.", buckets, waits.total_s
    )


def _of_keys(keys: Keys) -> Iterator[Metric]:
    if not keys.required:
        return
    requests = CounterMetricFamily("headrace_key_requests", "Requests of a key.", labels=("key",))
    refused = CounterMetricFamily("headrace_key_refused", "Requests refused by a key's own limits.", labels=("key",))
    running = GaugeMetricFamily("headrace_key_requests_running", "Requests of a key in progress.", labels=("key",))
    for name, use in keys.use().items():
        requests.add_metric((name,), use.requests)
        refused.add_metric((name,), use.refused)
        running.add_metric((name,), use.running)
    yield from (requests, refused, running)


def _of_batches(bulk: BulkState) -> Iterator[Metric]:
    open_batches = GaugeMetricFamily(
        "headrace_bulk_batches", "Batches of the Batch API, by status.", labels=("status",)
    )
    for status, count in bulk.batches.counts().items():
        open_batches.add_metric((status,), count)
    ended = CounterMetricFamily("headrace_bulk_batches_ended", "Batches that have ended.", labels=("status",))
    for status in ENDED:
        ended.add_metric((status,), bulk.batches.ended[status])
    yield from (open_batches, ended)
    yield _counter("bulk_records", "Batch inputs answered.", bulk.records)
    yield _gauge("bulk_records_waiting", "Batch inputs waiting for a gap between online requests.", bulk.waiting)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"headrace_{name}", about, value)


def _bound(seconds: float) -> str:
    return "+Inf" if math.isinf(seconds) else f"{seconds:g}"
