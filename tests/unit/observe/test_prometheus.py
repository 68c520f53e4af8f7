"""Counters of several servers on one page."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client", reason='needs a server: pip install "headrace[serve]"')


def page(requests: int, ready: float) -> bytes:
    from prometheus_client.core import GaugeMetricFamily

    from headrace.events import RequestDone
    from headrace.observe.exporters.prometheus import PrometheusListener

    listener = PrometheusListener(lambda: [GaugeMetricFamily("headrace_ready", "Ready.", ready)], "1")
    for _ in range(requests):
        listener(RequestDone(route="/v1/embeddings", method="POST", status=200, duration_s=0.02, at=0.0))
    return listener.render()


def test_pages_of_replicas_become_one_whose_samples_say_whose_they_are() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from headrace.observe.exporters.prometheus import merge_pages

    families = {
        family.name: family
        for family in text_string_to_metric_families(
            merge_pages({"a": page(3, 1), "b": page(4, 0)}, "replica").decode()
        )
    }
    assert families["headrace_replicas"].samples[0].value == 2
    requests = {s.labels["replica"]: s for s in families["headrace_requests"].samples if s.name.endswith("_total")}
    assert {replica: sample.value for replica, sample in requests.items()} == {"a": 3, "b": 4}
    assert requests["a"].labels["route"] == "/v1/embeddings"
    assert families["headrace_requests"].type == "counter"
    durations = families["headrace_request_duration_seconds"]
    assert durations.type == "histogram"
    buckets = [s for s in durations.samples if s.name.endswith("_bucket") and s.labels["le"] == "0.025"]
    assert {sample.labels["replica"]: sample.value for sample in buckets} == {"a": 3, "b": 4}
    counts = [s for s in durations.samples if s.name.endswith("_count")]
    assert {sample.labels["replica"]: sample.value for sample in counts} == {"a": 3, "b": 4}
    assert {sample.labels["replica"]: sample.value for sample in families["headrace_ready"].samples} == {"a": 1, "b": 0}


def test_without_a_replica_there_is_a_page_that_says_so() -> None:
    from headrace.observe.exporters.prometheus import merge_pages

    assert b"\nheadrace_replicas 0.0\n" in merge_pages({}, "replica")
