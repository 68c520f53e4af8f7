"""TorchServe's context: a handler's settings, its requests and their response status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from headrace.engines.torchserve.files import FileValues, HandlerFiles
from headrace.engines.torchserve.metrics import Metrics
from headrace.errors import RecordError
from headrace.records import Json

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
        """The response headers of a row."""
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
