"""Spans for OpenTelemetry: the requests and batches of a server, a job and its batches.

The names follow the semantic conventions for HTTP servers and for generative AI. What the conventions do not name
begins with `headrace.`. No span holds a text of a user, nor the message of an error, which may quote one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from headrace.engines.tasks import task_named
from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, JobDone, PartCommitted, StageDone, WorkerLost
from headrace.observe.live.frame import wall_clock

T = TypeVar("T")

FLUSH_S = 3.0
"""Seconds that the end of a job waits for its last spans to be sent."""
_LONGEST = 300
_MOST_REASONS = 64
_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


@dataclass(frozen=True, slots=True)
class Tracing:
    """Where spans go.

    Args:
        failing: whether the last spans could not be sent.
    """

    provider: TracerProvider
    version: str
    failing: Callable[[], bool] = lambda: False

    def tracer(self) -> trace.Tracer:
        return self.provider.get_tracer("headrace", self.version)

    def flush(self) -> None:
        """Send what waits, for a few seconds at most, and not at all while the collector does not answer."""
        send = getattr(self.provider, "force_flush", None)
        if send is None or self.failing():
            return
        sender = threading.Thread(target=send, name="headrace-otel-flush", daemon=True)
        sender.start()
        sender.join(FLUSH_S)


def _text(value: object) -> str:
    """What a protobuf string can hold."""
    return str(value)[:_LONGEST].encode("utf-8", "replace").decode()


def _operation(task: str) -> str:
    return task_named(task).operation or task


def _model_attributes(model: str, operation: str) -> dict[str, AttributeValue]:
    name = _text(model)
    return {
        "gen_ai.operation.name": _text(operation),
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": name,
        "gen_ai.response.model": name,
    }


class RequestSpan:
    """The span of a request, as `serving.tracing` has it."""

    def __init__(self, span: Span, method: str) -> None:
        self.span = span
        self._method = method
        self.model = self.task = ""

    def asked(self, model: str, task: str, values: Sequence[object]) -> None:
        self.model, self.task = model, task
        self.span.set_attribute("headrace.request.records", len(values))
        first = values[0] if values else None
        if isinstance(first, Mapping):  # of a language model
            for name, attribute in _SAMPLING.items():
                if isinstance(value := first.get(name), (int, float)):
                    self.span.set_attribute(attribute, value)

    def carried(self, payload: object) -> object:
        """The payload with its span, for `batches`."""
        return _Carried(payload, self)

    def streamed(self, wait_s: float) -> None:
        self.span.set_attribute("gen_ai.request.stream", True)
        self.span.set_attribute("gen_ai.response.time_to_first_chunk", wait_s)

    def answered(self, outputs: Sequence[object], read: int, generated: int) -> None:
        if read:
            self.span.set_attribute("gen_ai.usage.input_tokens", read)
        if generated:
            self.span.set_attribute("gen_ai.usage.output_tokens", generated)
        reasons = [str(one["finish_reason"]) for one in outputs if isinstance(one, dict) and "finish_reason" in one]
        if reasons:
            self.span.set_attribute("gen_ai.response.finish_reasons", reasons[:_MOST_REASONS])

    def end(self, route: str, status: int) -> None:
        span, route = self.span, _text(route)
        span.update_name(f"{self._method} {route}")
        if self.model:
            operation = "chat" if route == "/v1/chat/completions" else _operation(self.task)
            span.update_name(_text(f"{operation} {self.model}"))
            span.set_attributes(_model_attributes(self.model, operation))
        span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()


@dataclass(slots=True)
class _Carried:
    """A prepared record in the queue, with the span of its request."""

    payload: Any
    request: RequestSpan


class ServerSpans:
    """A span for each request of a server, and for each batch of them."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer()
        self.flush = tracing.flush

    def begin(self, method: str, headers: Iterable[tuple[bytes, bytes]], request_id: str) -> RequestSpan | None:
        """The span of a request; None if it is not sampled. Its parent is the span around it, or the client's."""
        inside = trace.get_current_span().get_span_context().is_valid
        span = self._tracer.start_span(
            method,
            None if inside else _remote(headers),
            SpanKind.INTERNAL if inside else SpanKind.SERVER,
            {"http.request.method": method, "headrace.request.id": _text(request_id)},
        )
        return RequestSpan(span, method) if span.is_recording() else None

    def batches(self, process: Callable[[list[T]], Sequence[object]]) -> Callable[[list[object]], Sequence[object]]:
        """The function that runs a batch, with a span for each call.

        The span is a child of the first request of the batch, and linked to all of them; each of them links to it.
        """

        def traced(records: list[Any]) -> Sequence[object]:
            requests = list(dict.fromkeys(one.request for one in records if type(one) is _Carried))
            payloads = [one.payload if type(one) is _Carried else one for one in records]
            if not requests:
                return process(payloads)
            with self._batch(requests, len(payloads)):
                return process(payloads)

        return traced

    @contextlib.contextmanager
    def _batch(self, requests: list[RequestSpan], size: int) -> Iterator[None]:
        first = requests[0]
        span = self._tracer.start_span(
            "batch",
            trace.set_span_in_context(first.span),
            attributes={
                **_model_attributes(first.model, _operation(first.task)),
                "headrace.batch.size": size,
                "headrace.batch.requests": len(requests),
            },
            links=[Link(request.span.get_span_context()) for request in requests],
        )
        for request in requests:
            request.span.add_link(span.get_span_context())
        with _ending(span):
            yield


@contextlib.contextmanager
def _ending(span: Span) -> Iterator[None]:
    """End the span with the body, and say which kind of error ended it."""
    try:
        yield
    except BaseException as error:
        _failed(span, error)
        raise
    finally:
        span.end()


def _failed(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))


def _remote(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The trace that a client's headers name."""
    wanted = propagate.get_global_textmap().fields
    named = ((name.decode("latin-1").lower(), value) for name, value in headers)
    return propagate.extract({name: value.decode("latin-1") for name, value in named if name in wanted}, Context())


def _around() -> Context | None:
    """The span in which a job runs: that of the program, or of the environment variable TRACEPARENT."""
    if trace.get_current_span().get_span_context().is_valid:
        return None
    return propagate.extract(
        {name: value for name in propagate.get_global_textmap().fields if (value := os.environ.get(name.upper()))}
    )


class JobSpans:
    """A context manager and thread-safe event listener: a span for a job, and one for each of its batches.

    Args:
        began: when the job began, on the events' clock.
        output: of the job, without passwords.
    """

    def __init__(self, tracing: Tracing, began: float, output: str, model: str, task: str) -> None:
        self._tracing = tracing
        self._tracer = tracing.tracer()
        self._offset_s = wall_clock() - time.monotonic()
        self._lock = threading.Lock()
        self._formed: dict[tuple[int, int], BatchFormed] = {}
        self._done = self._failed = self._tokens = 0
        operation = _operation(task)
        self._common = _model_attributes(model, operation)
        self._span = self._tracer.start_span(
            _text(f"{operation} {model}"),
            _around(),
            attributes={**self._common, "headrace.job.output": _text(output)},
            start_time=self._ns(began),
        )
        self._context = trace.set_span_in_context(self._span)

    def _ns(self, at: float) -> int:
        return round((at + self._offset_s) * 1e9)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the job's span, and send what waits."""
        self._span.set_attributes({"headrace.job.records": self._done, "headrace.job.failed": self._failed})
        if self._tokens:
            self._span.set_attribute("gen_ai.usage.input_tokens", self._tokens)
        if error is not None:
            _failed(self._span, error)
        self._span.end()
        self._tracing.flush()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._heard(event)

    def _heard(self, event: Event) -> None:
        match event:
            case BatchFormed():
                self._formed[event.batch, event.size] = event
            case BatchDone():
                self._batch(event, self._formed.pop((event.batch, event.size), None))
            case BatchSplit():
                why = "out_of_memory" if event.out_of_memory else type(event.cause).__name__
                self._note("batch split", event.at, {"headrace.batch.number": event.batch, "error.type": why})
            case WorkerLost():
                self._note("worker lost", event.at, {"headrace.worker": _text(event.worker)})
            case StageDone(stage="prepare"):
                self._tokens += event.tokens
            case PartCommitted():
                self._done += event.end - event.start - event.failed
                self._failed += event.failed
            case JobDone():
                self._span.set_attribute("headrace.job.state", event.state)

    def _note(self, name: str, at: float, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.add_event(name, attributes, self._ns(at))

    def _batch(self, event: BatchDone, formed: BatchFormed | None) -> None:
        attributes = {
            **self._common,
            "headrace.batch.number": event.batch,
            "headrace.batch.size": event.size,
            "headrace.batch.failed": event.failed,
            "headrace.batch.cost": float(event.cost),
            "headrace.batch.padded_cost": float(event.padded_cost),
        }
        if formed is not None:
            attributes["headrace.batch.close_reason"] = formed.reason
        started = self._ns(event.at - event.duration_s)
        span = self._tracer.start_span("batch", self._context, attributes=attributes, start_time=started)
        if event.failed == event.size:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(event.at))
