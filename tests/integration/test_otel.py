"""Spans, as a real receiver of OTLP gets them on loopback."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.integration.serving.running import running

import headrace
from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.observe.exporters import otel, otel_settings

FAKE = "headrace.testing:FakeEngine"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOSTILE = "</script><b>\udcff{{7*7}}"


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """Receives spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

    def receive(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {plain(one.value) for one in resource.resource.attributes if one.key == "service.name"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def by_name(self) -> dict[str, list[tuple[Span, dict[str, Any]]]]:
        found: defaultdict[str, list[tuple[Span, dict[str, Any]]]] = defaultdict(list)
        for span in self.spans:
            found[span.name].append((span, {one.key: plain(one.value) for one in span.attributes}))
        return found


@contextlib.contextmanager
def listening(answer: Callable[[bytes], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def own_provider() -> Iterator[None]:
    otel_settings._own.cache_clear()
    yield
    otel_settings._own.cache_clear()
    logging.getLogger("opentelemetry.exporter").setLevel(logging.NOTSET)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    with listening(found.receive) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield found


def test_requests_and_their_batch_are_linked(collector: Collector) -> None:
    settings = ServerSettings(EngineConfig(task="embed", engine=FAKE), name=HOSTILE, batch_timeout_s=1.0)
    with running(settings) as server, ThreadPoolExecutor(3) as pool:
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        bodies = [{"input": ["one two", "three"]}, {"input": "four"}, {"input": "five"}]
        given: list[dict[str, str]] = [headers, {}, {"traceparent": "00-zz-</script>-01"}]
        answers = list(
            pool.map(lambda one: server.post("/v1/embeddings", one[0], headers=one[1]), zip(bodies, given, strict=True))
        )
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert server.post("/v1/embeddings", {"input": []}).status_code == 400
        assert server.client.get("/health").status_code == 200
    assert collector.services == {"headrace"}
    names = collector.by_name()
    name = HOSTILE.encode("utf-8", "replace").decode()
    requests = names[f"embeddings {name}"]
    assert len(requests) == 3
    assert [attributes["http.response.status_code"] for _, attributes in names["POST /v1/embeddings"]] == [400]
    [(ours, attributes)] = [one for one in requests if one[1]["headrace.request.id"] == "mine"]
    assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert ours.kind == Span.SpanKind.SPAN_KIND_SERVER
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == name
    assert attributes["gen_ai.usage.input_tokens"] == answers[0].json()["usage"]["prompt_tokens"]
    assert attributes["headrace.request.records"] == 2
    assert attributes["http.route"] == "/v1/embeddings"
    batches = names["batch"]
    assert sum(attributes["headrace.batch.size"] for _, attributes in batches) == 4
    linked = {link.span_id for batch, _ in batches for link in batch.links}
    assert linked == {span.span_id for span, _ in requests}
    assert {link.span_id for span, _ in requests for link in span.links} == {batch.span_id for batch, _ in batches}
    assert len(batches) < 3, "requests that share a batch show it"


def test_a_generator_says_its_settings_tokens_and_ends(collector: Collector) -> None:
    engine = "tests.integration.serving.engines:Talker"
    with running(ServerSettings(EngineConfig(task="generate", engine=engine), name="adder")) as server:
        body = {
            "messages": [{"role": "user", "content": "one two three"}],
            "temperature": 0.5,
            "max_tokens": 4,
            "stream": True,
        }
        assert server.post("/v1/chat/completions", body).status_code == 200
    [(_, attributes)] = collector.by_name()["chat adder"]
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.max_tokens"] == 4
    assert attributes["gen_ai.request.stream"] is True
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes["gen_ai.usage.input_tokens"] > 0 < attributes["gen_ai.usage.output_tokens"]
    assert len(attributes["gen_ai.response.finish_reasons"]) == 1


def test_a_job_has_a_span_and_one_for_each_batch(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", PARENT)
    texts = ["a text" if number % 50 else "" for number in range(200)]
    sink = tmp_path / "out.jsonl"
    report = headrace.run(texts, sink=sink, task="embed", engine=FAKE, batch_size=16, progress=False)
    names = collector.by_name()
    [(job, attributes)] = names[f"embeddings {FAKE}"]
    assert (job.trace_id.hex(), job.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert attributes["headrace.job.records"] == report.ok
    assert attributes["headrace.job.failed"] == report.failed
    assert attributes["headrace.job.state"] == "finished"
    assert attributes["headrace.job.output"] == str(sink)
    batches = names["batch"]
    assert len(batches) == report.batches
    assert {batch.parent_span_id for batch, _ in batches} == {job.span_id}
    assert sum(attributes["headrace.batch.size"] for _, attributes in batches) >= report.ok
    assert {attributes["headrace.batch.close_reason"] for _, attributes in batches} == set(report.close_reasons)
    assert all(
        job.start_time_unix_nano <= batch.start_time_unix_nano <= batch.end_time_unix_nano for batch, _ in batches
    )


def test_the_programs_own_provider_gets_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with provider.get_tracer("mine").start_as_current_span("around") as around:
        headrace.run(["a"], sink=tmp_path / "out.jsonl", task="embed", engine=FAKE, progress=False)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["batch"].parent == spans[f"embeddings {FAKE}"].context
    assert spans[f"embeddings {FAKE}"].parent == around.get_span_context()


def test_a_collector_that_is_gone_costs_a_line_and_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits = 0
    flush = TracerProvider.force_flush

    def counted(self: TracerProvider, timeout_millis: int = 30_000) -> bool:
        nonlocal waits
        waits += 1
        return flush(self, timeout_millis)

    monkeypatch.setattr(TracerProvider, "force_flush", counted)
    monkeypatch.setattr(otel, "FLUSH_S", 60)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    for number in range(3):
        headrace.run(["a"], sink=tmp_path / f"{number}.jsonl", task="embed", engine=FAKE, progress=False)
    assert waits == 1
    assert [one.getMessage() for one in caplog.records if "OpenTelemetry" in one.getMessage()] == [
        "headrace: OpenTelemetry spans cannot be sent, and are dropped (exporter otlp)"
    ]
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


def test_a_collector_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "FLUSH_S", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    asked, over = Event(), Event()

    def hold(_: bytes) -> None:
        asked.set()
        over.wait()

    with listening(hold) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        headrace.run(["a"], sink=tmp_path / "out.jsonl", task="embed", engine=FAKE, progress=False)
        assert asked.wait(60)
        over.set()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "otlp"}, 'pip install "headrace[otel]"'),
        ({"OTEL_TRACES_EXPORTER": "zipkin</b>"}, "OTEL_TRACES_EXPORTER=zipkin</b> names no installed exporter"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "x"}, "OTEL_EXPORTER_OTLP_PROTOCOL=x names"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "pip" in said:
        monkeypatch.delitem(sys.modules, "headrace.observe.exporters.otel_export", raising=False)
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otel_settings.find_tracing() is None
    assert otel_settings.find_tracing() is None
    [record] = caplog.records
    assert said in record.getMessage()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "console, otlp,otlp"}, ("console", "otlp")),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ()),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ()),
    ],
)
def test_the_standard_variables_decide(variables: dict[str, str], wanted: tuple[str, ...]) -> None:
    assert otel_settings.wanted_exporters(variables) == wanted
