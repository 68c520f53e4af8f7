"""What a server counts as it works, read when Prometheus asks: it costs a request nothing but an addition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.serving.auth import Keys
from headrace.serving.batches.batch import ENDED
from headrace.serving.batches.store import Batches
from headrace.serving.service import Service
from headrace.serving.state import ServerState


@dataclass(frozen=True, slots=True)
class BulkState:
    """What there is of the Batch API."""

    batches: Batches
    records: int
    """Inputs that were answered."""
    waiting: int
    """Inputs that wait for a gap between requests."""


def families(host: ServerState, bulk: Callable[[], BulkState | None]) -> Iterator[Metric]:
    """Every family of metrics that no event fills."""
    service = host.loaded
    yield _gauge("ready", "Whether requests are taken.", float(host.ready))
    yield from _of_keys(host.keys)
    if service is not None:
        yield from _of_service(service)
    state = bulk()
    if state is not None:
        yield from _of_batches(state)


def _of_service(service: Service) -> Iterator[Metric]:
    stats, gate = service.batcher.stats, service.gate
    model = GaugeMetricFamily("headrace_model_info", "The model that is served.", labels=("model", "task"))
    model.add_metric((service.name, service.task), 1)
    yield model
    yield _gauge("accepted_records", "Records accepted and not yet answered.", gate.requests)
    yield _gauge("accepted_cost", "Their estimated cost.", gate.cost)
    yield _gauge("waiting_records", "Records that wait for a batch.", stats.waiting)
    yield _gauge("waiting_cost", "Their cost.", stats.waiting_cost)
    yield _gauge("in_flight_records", "Records in the engine.", stats.in_flight)
    yield _counter("refused_records", "Records refused with 429 or 408 before any work.", gate.refused)
    yield _counter("cancelled_records", "Records whose client left before the answer.", service.cancelled)
    yield _counter("prompt_tokens", "Tokens of texts and prompts that were answered.", service.tokens.prompt)
    yield _counter("generation_tokens", "Tokens of answers.", service.tokens.generated)
    yield _counter("busy_seconds", "The engine was at work.", stats.busy_time_s)
    waits = stats.queue_times
    buckets = [(_bound(bound), count) for bound, count in waits.cumulative if bound > 1e-4]
    yield HistogramMetricFamily(
        "headrace_queue_time_seconds", "How long records waited for their batch.", buckets, waits.total_s
    )


def _of_keys(keys: Keys) -> Iterator[Metric]:
    if not keys.required:
        return
    requests = CounterMetricFamily("headrace_key_requests", "Requests of a key.", labels=("key",))
    refused = CounterMetricFamily("headrace_key_refused", "Requests refused by a key's own limits.", labels=("key",))
    running = GaugeMetricFamily("headrace_key_requests_running", "A key's requests under way.", labels=("key",))
    for name, use in keys.use().items():
        requests.add_metric((name,), use.requests)
        refused.add_metric((name,), use.refused)
        running.add_metric((name,), use.running)
    yield from (requests, refused, running)


def _of_batches(state: BulkState) -> Iterator[Metric]:
    there = GaugeMetricFamily("headrace_bulk_batches", "Batches of the Batch API, by status.", labels=("status",))
    for status, count in state.batches.counts().items():
        there.add_metric((status,), count)
    ended = CounterMetricFamily("headrace_bulk_batches_ended", "Batches that have ended.", labels=("status",))
    for status in ENDED:
        ended.add_metric((status,), state.batches.ended[status])
    yield from (there, ended)
    yield _counter("bulk_records", "Inputs of batches that were answered.", state.records)
    yield _gauge("bulk_records_waiting", "Inputs of batches that wait beside requests.", state.waiting)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"headrace_{name}", about, value)


def _bound(seconds: float) -> str:
    return "+Inf" if math.isinf(seconds) else f"{seconds:g}"
