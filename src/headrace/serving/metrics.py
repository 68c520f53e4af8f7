"""Metrics that are read from the server's state when Prometheus scrapes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.pool.model import ModelStats
from headrace.pool.pool import ModelPool
from headrace.serving.auth import KeyUsage
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


T = TypeVar("T")
Labelled: TypeAlias = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, Callable[[T], float]]
"""Kind, name, description and value of a family with a label."""

_OF_MODELS: tuple[Labelled[ModelStats], ...] = (
    (CounterMetricFamily, "model_loads", "Times that a model was loaded.", lambda of: of.loads),
    (CounterMetricFamily, "model_failed_loads", "Loads of a model that failed.", lambda of: of.failed_loads),
    (
        CounterMetricFamily,
        "model_wait_seconds",
        "Time that requests waited for a model to be loaded.",
        lambda of: of.wait_s,
    ),
    (GaugeMetricFamily, "model_loaded", "Whether a model is loaded.", lambda of: of.phase == "loaded"),
)
_OF_KEYS: tuple[Labelled[KeyUsage], ...] = (
    (CounterMetricFamily, "key_requests", "Requests of a key.", lambda of: of.requests),
    (CounterMetricFamily, "key_refused", "Requests refused by a key's own limits.", lambda of: of.refused),
    (GaugeMetricFamily, "key_requests_running", "Requests of a key in progress.", lambda of: of.running),
)
_OPEN_BATCHES: tuple[Labelled[int], ...] = (
    (GaugeMetricFamily, "bulk_batches", "Batches of the Batch API, by status.", float),
)
_ENDED_BATCHES: tuple[Labelled[int], ...] = (
    (CounterMetricFamily, "bulk_batches_ended", "Batches that have ended.", float),
)


def families(state: ServerState, bulk: Callable[[], BulkState | None]) -> Iterator[Metric]:
    """All metric families that are not updated by events."""
    yield _gauge("ready", "Whether the server accepts requests.", float(state.ready))
    if state.keys.required:
        yield from _labelled("key", state.keys.use(), _OF_KEYS)
    if state.loaded is not None:
        yield from _of_service(state.loaded)
    if not state.parts:
        yield from _of_counters(state.counted)
    bulk_state = bulk()
    if bulk_state is not None:
        yield from _of_batches(bulk_state)


def families_of_pool(state: ServerState, pool: ModelPool, bulk: Callable[[], BulkState | None]) -> Iterator[Metric]:
    """The metric families of a server of several models that no single model has."""
    yield from families(state, bulk)
    yield from _labelled("model", pool.stats(), _OF_MODELS)


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
    yield from _labelled("status", bulk.batches.counts(), _OPEN_BATCHES)
    yield from _labelled("status", ended, _ENDED_BATCHES)
    yield _counter("bulk_records", "Batch inputs answered.", bulk.records)
    yield _gauge("bulk_records_waiting", "Batch inputs waiting for a gap between online requests.", bulk.waiting)


def _labelled(label: str, values: Mapping[str, T], table: Sequence[Labelled[T]]) -> Iterator[Metric]:
    """Families with a sample for each of these values."""
    for kind, name, about, of in table:
        family = kind(f"headrace_{name}", about, labels=(label,))
        for whose, value in values.items():
            family.add_metric((whose,), float(of(value)))
        yield family


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"headrace_{name}", about, value)
