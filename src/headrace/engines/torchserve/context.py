"""TorchServe's context: a handler's settings, its requests and their response status."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.engines.torchserve.files import FileValues, HandlerFiles
from headrace.errors import RecordError
from headrace.records import Json


class MetricTypes(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass
class Dimension:
    """A name and value that distinguish metrics."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, object]:
        return {"Name": self.name, "Value": self.value}


@dataclass
class Metric:
    """One metric: a counter sums its values, any other keeps the last."""

    name: str
    value: float = 0
    unit: str | None = None
    dimensions: Sequence[object] = ()
    request_id: str | None = None
    metric_method: str | None = None
    metric_type: MetricTypes = MetricTypes.GAUGE

    @property
    def metric_name(self) -> str:
        """Alias of `name` in TorchServe."""
        return self.name

    def add_or_update(
        self,
        value: float,
        dimension_values: Sequence[object] = (),  # noqa: ARG002 - the documented shape
        request_id: str = "",  # noqa: ARG002 - likewise
    ) -> None:
        """Add to a counter, or set any other metric."""
        self.value = self.value + value if self.metric_type is MetricTypes.COUNTER else value

    def update(self, value: float) -> None:
        self.add_or_update(value)

    def reset(self) -> None:
        self.value = 0


@dataclass
class Metrics:
    """`context.metrics`: metrics by type and name, created on first use."""

    request_ids: dict[int, str] = field(default_factory=dict)
    model_name: str = ""
    cache: dict[MetricTypes, dict[str, Metric]] = field(default_factory=dict)

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> Metric:
        return self.add_metric_to_cache(metric_name, metric_type=metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str | None = None,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> Metric:
        new = Metric(metric_name, unit=unit, dimensions=dimension_names, metric_type=metric_type)
        return self.cache.setdefault(metric_type, {}).setdefault(metric_name, new)

    def add_metric(
        self,
        name: str,
        value: float,
        *described: object,  # noqa: ARG002 - TorchServe's signature
        metric_type: MetricTypes = MetricTypes.COUNTER,
        **more: object,  # noqa: ARG002 - likewise
    ) -> Metric:
        """Add to a counter, or set another type of metric. Unit, row and dimensions are ignored."""
        metric = self.add_metric_to_cache(name, metric_type=metric_type)
        metric.add_or_update(value)
        return metric

    def add_time(
        self, name: str, value: float, *described: object, metric_type: MetricTypes = MetricTypes.GAUGE, **more: object
    ) -> Metric:
        return self.add_metric(name, value, *described, metric_type=metric_type, **more)

    add_counter = add_error = add_metric
    add_size = add_percent = add_time


_NEXT = "ts_stream_next"
_NOT_WHOLE = (
    "the handler answers over several calls (ts_stream_next, stopping_criteria), which is not supported; return the "
    "whole answer"
)


class Context:
    """The documented parts of TorchServe's context."""

    def __init__(self, files: HandlerFiles, gpu: int | None) -> None:
        self.manifest: FileValues = files.manifest
        self.model_name = str(files.manifest["model"].get("modelName", ""))
        self.model_yaml_config: Mapping[str, object] = files.yaml_config
        self.system_properties: Mapping[str, Json] = {
            "model_dir": str(files.model_dir),
            "gpu_id": gpu,
            "batch_size": files.batch_size,
            "server_name": "headrace",
            "server_version": "",
            "limit_max_image_pixels": True,
        }
        self.metrics = Metrics(model_name=self.model_name)
        self.stopping_criteria: Sequence[Callable[[object], bool | None]] | None = None
        self.header_key_sequence_id = "ts_request_sequence_id"
        self.header_key_sequence_start = "ts_request_sequence_start"
        self.header_key_sequence_end = "ts_request_sequence_end"
        self.request_ids: dict[int, str] = {}
        self.request_processor: list[RequestProcessor] = []
        self._sent: dict[int, list[object]] = {}
        self._requests = 0

    def begin(self, rows: int) -> None:
        """Start a new batch with this number of rows."""
        self.request_ids = self.metrics.request_ids = {row: str(self._requests + row) for row in range(rows)}
        self.request_processor = [RequestProcessor() for _ in range(rows)]
        self.stopping_criteria = None
        self._requests += rows
        self._sent = {}

    def answer(self, row: int, last: object) -> object:
        """The answer that a client would receive, including parts sent before; a RecordError for an error status."""
        request = self.request_processor[row]
        if request.status >= 400:
            return RecordError(f"the handler answered {request.status} {request.phrase}".strip())
        if request.headers.get(_NEXT) == "true":
            return RecordError(_NOT_WHOLE)
        if self.stopping_criteria is not None and self.stopping_criteria[row](last) is False:
            return RecordError(_NOT_WHOLE)
        sent = self._sent.get(row)
        return last if not sent else "".join(_text(part) for part in [*sent, last])

    def send(self, answers: Sequence[object]) -> None:
        """Store a part of each row's answer, to put before the handler's return value."""
        for row, part in enumerate(answers):
            self._sent.setdefault(row, []).append(part)

    def get_request_id(self, idx: int = 0) -> str | None:
        return self.request_ids.get(idx)

    def get_sequence_id(self, idx: int) -> str:
        """The request id: each record is its own sequence."""
        return self.request_ids[idx]

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Always None: a record has no headers."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """Always empty: a record has no headers."""
        return self.request_processor[idx].get_request_properties()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of a row; 400 or more fails the record."""
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for request in self.request_processor:
            request.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        return self.request_processor[idx].status, self.request_processor[idx].phrase

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a response header, which is kept only for the batch: output records have no headers."""
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].headers

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")


class RequestProcessor:
    """The request of one row (without headers, since a record has none) and its response status."""

    def __init__(self, request_header: Mapping[str, str] | None = None) -> None:
        self.status = 200
        self.phrase = ""
        self.headers: dict[str, str] = {}
        self._asked = dict(request_header or {})

    def get_request_property(self, key: str) -> str | None:
        return self._asked.get(key)

    def get_request_properties(self) -> dict[str, str]:
        return self._asked

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self.status, self.phrase = code, reason_phrase or ""

    def add_response_property(self, key: str, value: str) -> None:
        self.headers[key] = value


def _text(part: object) -> str:
    if isinstance(part, (bytes, bytearray)):
        return part.decode(errors="replace")
    return part if isinstance(part, str) else json.dumps(part)
