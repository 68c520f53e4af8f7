"""What a TorchServe handler is told about itself and its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.engines.torchserve_files import HandlerFiles
from headrace.errors import RecordError


class Context:
    """The parts of TorchServe's context that handlers are documented to use."""

    def __init__(self, files: HandlerFiles, gpu: int | None) -> None:
        self.manifest: Mapping[str, Any] = files.manifest
        self.model_name = str(files.manifest["model"].get("modelName", ""))
        self.model_yaml_config: Mapping[str, Any] = files.yaml_config
        self.system_properties: Mapping[str, Any] = {
            "model_dir": str(files.model_dir),
            "gpu_id": gpu,
            "batch_size": files.batch_size,
            "server_name": "headrace",
            "server_version": "",
        }
        self.request_ids: dict[int, str] = {}
        self.metrics = _Metrics()
        self._refused: dict[int, RecordError] = {}
        self._requests = 0

    def begin(self, rows: int) -> None:
        """Forget the last batch; the next has so many rows."""
        self.request_ids = {row: str(self._requests + row) for row in range(rows)}
        self._requests += rows
        self._refused = {}

    def refusal(self, row: int) -> RecordError | None:
        """The error the handler set for a row of this batch, if it did."""
        return self._refused.get(row)

    def get_request_id(self, idx: int = 0) -> str | None:
        """A number for the row, other than any before."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:  # noqa: ARG002 - the documented shape
        """None: a record has no headers."""
        return None

    def get_all_request_header(self, idx: int) -> dict[str, str]:  # noqa: ARG002 - the documented shape
        """Empty: a record has no headers."""
        return {}

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Say how a row's request ended; 400 and more is the record's error."""
        if code >= 400:
            self._refused[idx] = RecordError(f"the handler answered {code} {phrase}".strip())

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Say the same of every row of the batch."""
        for row in self.request_ids:
            self.set_response_status(code, phrase, row)

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Without effect: an answer becomes a record, which has no headers."""

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Without effect, as above."""


class _Metrics:
    """Takes what handlers measure (`add_time`, `add_counter`, ...) and keeps none of it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("add_"):
            raise AttributeError(f"metrics has no attribute {name!r}")
        return _forget


def _forget(*measured: Any, **more: Any) -> None:
    """Take anything, keep nothing."""
