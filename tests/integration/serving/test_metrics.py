"""The page of /metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_batches import ENGINES, begin, ended, line
from tests.waiting import until

import headrace
from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.auth import read_keys

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"


def families(server: Running, key: str | None = None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    page = server.client.get("/metrics", headers=headers)
    assert page.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(page.text)}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    """Of the sample of this name with these labels; 0 where there is none."""
    samples = [sample for family in found.values() for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state = tmp_path_factory.mktemp("state")
    with running(
        ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:SlowTalker"), name="says", state=state)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="generate"), state=tmp_path_factory.mktemp("state"))) as server:
        yield server


def test_a_stream_tells_its_first_token_and_the_time_between_tokens(talker: Running) -> None:
    before = families(talker)
    body = {"prompt": "one two three four five", "max_tokens": 9, "stream": True}
    assert talker.post("/v1/completions", body).status_code == 200
    assert talker.post("/v1/completions", body | {"stream": False}).status_code == 200
    after = families(talker)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("headrace_time_to_first_token_seconds_count") == 1
    assert 0.03 < more("headrace_time_to_first_token_seconds_sum") < 5
    assert more("headrace_inter_token_latency_seconds_count") == 4
    assert 0.1 < more("headrace_inter_token_latency_seconds_sum") < 5
    assert more("headrace_prompt_tokens_total") == 10
    assert more("headrace_generation_tokens_total") == 10
    assert more("headrace_queue_time_seconds_count") == 2
    assert more("headrace_requests_total", route="/v1/completions", status="200") == 2
    assert more("headrace_busy_seconds_total") > 0.1


def test_batches_are_counted(tmp_path: Path) -> None:
    with running(
        ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), state=tmp_path / "state")
    ) as server:
        ended(server, begin(server, [line(number) for number in range(50)]))
        ended(server, begin(server, ["nonsense"]))
        server.post("/v1/embeddings", {"input": ["a b", "c"]})
        found = families(server)
        assert value(found, "headrace_bulk_batches_ended_total", status="completed") == 1
        assert value(found, "headrace_bulk_batches_ended_total", status="failed") == 1
        assert value(found, "headrace_bulk_records_total") == 50
        assert value(found, "headrace_bulk_batches", status="in_progress") == 0
        assert value(found, "headrace_prompt_tokens_total") == 2 * 50 + 3


def test_keys_are_told_by_name_and_to_the_admin_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice secret-a per_minute=2\nalice secret-b\nroot secret-r admin\n")
    with running(
        ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), keys=read_keys(path, None))
    ) as server:

        def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return int(server.client.post("/v1/embeddings", json={"input": "x"}, headers=headers).status_code)

        assert [ask("secret-a") for _ in range(3)] == [200, 200, 429]
        assert ask("secret-b") == 200
        found = families(server, "secret-r")
        assert value(found, "headrace_key_requests_total", key="alice") == 4
        assert value(found, "headrace_key_refused_total", key="alice") == 1
        assert value(found, "headrace_key_requests_running", key="alice") == 0
        refused = server.client.get("/metrics", headers={"authorization": "Bearer secret-a"})
        assert refused.status_code == 403
        page = server.client.get("/metrics", headers={"authorization": "Bearer secret-r"}).text
        assert "secret" not in page


def test_an_empty_queue_says_so(talker: Running) -> None:
    talker.post("/v1/completions", {"prompt": "one two", "max_tokens": 9})
    until(lambda: value(families(talker), "headrace_waiting_records") == 0)
    found = families(talker)
    assert not [name for name in found if re.search(r"p\d\d$", name)]  # a percentile of all time misleads
    assert found["headrace_queue_time_seconds"].type == "histogram"


def test_names_follow_the_conventions_and_the_documents(talker: Running, adder: Running, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("root k admin\n")
    with running(
        ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), keys=read_keys(path, None))
    ) as server:
        found = families(talker) | families(adder) | families(server, "k")
    ours = {name: family for name, family in found.items() if name.startswith("headrace_")}
    ours = {name: family for name, family in ours.items() if not name.endswith("_created")}
    told = set(re.findall(r"`(headrace_\w+)", DOCS.read_text())) - {"headrace_replicas"}
    assert {name + "_total" * (family.type == "counter") for name, family in ours.items()} == told
    for name, family in ours.items():
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_size"))
            samples = {sample.name for sample in family.samples}
            assert not samples or {f"{name}_bucket", f"{name}_count", f"{name}_sum"} <= samples
        if family.type == "gauge":
            assert not name.endswith(("_total", "_count"))
    assert value(families(talker), "headrace_build_info", version=headrace.__version__) == 1
    assert value(families(talker), "headrace_model_info", task="generate", model="says") == 1
    assert value(found, "process_resident_memory_bytes") > 1e6
    assert value(found, "process_cpu_seconds_total") > 0


def test_a_scrape_is_what_prometheus_asks_for(talker: Running) -> None:
    answer = httpx.get(f"{talker.url}/metrics", headers={"accept": "text/plain;version=0.0.4"}, timeout=60)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for family in text_string_to_metric_families(answer.text):
        if family.type == "histogram":
            by_labels: dict[str, list[float]] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    key = json.dumps({name: v for name, v in sample.labels.items() if name != "le"}, sort_keys=True)
                    by_labels.setdefault(key, []).append(sample.value)
            assert all(counts == sorted(counts) for counts in by_labels.values())


def test_the_pages_of_replicas_merge_into_one(talker: Running) -> None:
    from headrace.observe.exporters.prometheus import merge_pages

    talker.post("/v1/completions", {"prompt": "one two", "max_tokens": 9})
    page = talker.client.get("/metrics").content
    alone = {family.name: family for family in text_string_to_metric_families(page.decode())}
    both = {
        family.name: family
        for family in text_string_to_metric_families(merge_pages({"a": page, "b": page}, "replica").decode())
    }
    assert both.keys() - alone.keys() == {"headrace_replicas"}
    for name, family in alone.items():
        assert both[name].type == family.type
        assert len(both[name].samples) == 2 * len(family.samples)
    queue = both["headrace_queue_time_seconds"]
    counts = {sample.labels["replica"]: sample.value for sample in queue.samples if sample.name.endswith("_count")}
    assert counts["a"] == counts["b"] >= 1


def test_tokens_of_the_prefix_cache_are_counted_where_there_is_one(talker: Running, adder: Running) -> None:
    for question in ("12+34=", "12+35="):
        assert adder.post("/v1/completions", {"prompt": "a" * 64 + question, "max_tokens": 3}).status_code == 200
    found = families(adder)
    assert value(found, "headrace_prefix_cache_queries_total") == 140
    assert value(found, "headrace_prefix_cache_hits_total") == 64
    assert value(found, "headrace_prompt_tokens_computed_total") == 76
    assert "headrace_prefix_cache_queries" not in families(talker)
