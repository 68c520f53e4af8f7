"""Replacements for the helpers that TorchServe's example handlers import, if TorchServe is not installed."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import torch

CLEANUP_REGEX = re.compile(r"<.*?>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
"""Matches HTML tags and entities."""
PREDICTION_METRIC = "PredictionTime"
_STEPS = ("preprocess", "inference", "postprocess")

logger = logging.getLogger(__name__)


class PredictionException(Exception):  # noqa: N818 - TorchServe's name
    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def timed(method: Callable[..., object]) -> Callable[..., object]:
    """Measure a handler's method if model-config.yaml sets `handler: {profile: true}`."""

    @functools.wraps(method)
    def measured(self: object, *args: object, **kwargs: object) -> object:
        context = getattr(self, "context", None)
        config = (getattr(context, "model_yaml_config", None) or {}).get("handler") or {}
        if not config.get("profile"):
            return method(self, *args, **kwargs)
        began = time.perf_counter()
        result = method(self, *args, **kwargs)
        context.metrics.add_time(f"ts_handler_{method.__name__}", (time.perf_counter() - began) * 1000)  # type: ignore[union-attr]
        return result

    return measured


def timeit(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def measured(*args: object, **kwargs: object) -> object:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            logger.info("%s took %.4f s", function.__name__, time.perf_counter() - began)

    return measured


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that a module defines, or only the subclasses of `parent_class`."""
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and (parent_class is None or issubclass(kind, parent_class))
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Labels by class number (as text); None if the file does not exist. If a class has several names, the last.

    Raises:
        ValueError: the file has another format.
    """
    file = Path(mapping_file_path)
    if not file.is_file():
        return None
    mapping = json.loads(file.read_text(encoding="utf-8"))
    named = mapping.get("object_type_names") if isinstance(mapping, dict) else None
    if isinstance(named, list):
        mapping = {str(number): name for number, name in enumerate(named)}
    if not isinstance(mapping, dict):
        raise ValueError(f"{file.name} must be an object of labels by class number; it is a {type(mapping).__name__}")
    labels = {number: label[-1] if isinstance(label, list) else label for number, label in mapping.items()}
    wrong = next((number for number, label in labels.items() if not isinstance(label, str)), None)
    if wrong is not None:
        raise ValueError(f"{file.name}: the label of {wrong!r} is {mapping[wrong]!r}; it must be text")
    return labels


def map_class_to_label(
    probs: Sequence[Sequence[object]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Iterable[Iterable[object]] | None = None,
) -> list[dict[str, object]]:
    """Map the values of each row to labels, or to class numbers if there are no labels."""
    rows = [range(len(row)) for row in probs] if lbl_classes is None else lbl_classes
    return [
        {(str(number) if mapping is None else mapping[str(number)]): value for number, value in zip(*row, strict=False)}
        for row in zip(rows, probs, strict=False)
    ]


def get_yaml_config(yaml_file_path: str) -> object:
    return yaml.safe_load(Path(yaml_file_path).read_text(encoding="utf-8"))


def check_valid_pt2_backend(backend: str) -> bool:
    import torch

    return backend in (*torch.compiler.list_backends(()), "eager")


def import_class(class_name: str, module_prefix: str | None = None) -> object:
    """Import a class by its qualified name. Raises ImportError: there is no such class."""
    module, _, name = class_name.rpartition(".")
    place = ".".join(part for part in (module_prefix, module) if part)
    if not place:
        raise ImportError(f"class name {class_name!r} names no module")
    try:
        return getattr(importlib.import_module(place), name)
    except AttributeError:
        raise ImportError(f"there is no class {name!r} in {place}") from None


def send_intermediate_predict_response(
    ret: Sequence[object],
    req_id_map: Mapping[int, str],  # noqa: ARG001 - the documented shape
    message: str,  # noqa: ARG001 - likewise
    code: int,  # noqa: ARG001 - likewise
    context: Any = None,
) -> None:
    """Store a part of each answer. TorchServe would send it at once; an output record has all parts together."""
    context.send(ret)


def emit_metrics(metrics: object) -> None:
    """Do nothing: metrics are not reported."""


class MicroBatching:
    """Replaces a handler's `handle`: splits a batch and overlaps the steps of its parts.

    The threads end with the call.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.parallelism = dict(parallelism or {})
        """Threads per step: `preprocess`, `inference`, `postprocess`; default 1."""
        self._here = threading.local()

    def __call__(self, data: Sequence[object], context: object) -> list[object]:
        self.handler.context = context
        return self.handle(data)

    def handle(self, data: Sequence[object]) -> list[object]:
        size = self.micro_batch_size
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        slots = [(step, threading.Semaphore(self.parallelism.get(step, 1))) for step in _STEPS]

        def steps(number: int, part: Sequence[object]) -> Sequence[object]:
            self._here.number = number
            for step, slot in slots:
                with slot:
                    part = getattr(self.handler, step)(part)
            return part

        width = sum(self.parallelism.get(step, 1) for step in _STEPS)
        with ThreadPoolExecutor(width, "headrace-micro-batch") as pool:
            done = list(pool.map(steps, range(len(parts)), parts))
        return [answer for part in done for answer in part]

    def get_micro_batch_idx(self) -> int | None:
        """The index of this thread's part of the batch."""
        return getattr(self._here, "number", None)

    def shutdown(self) -> None:
        """Do nothing: no threads remain."""


class TextIteratorStreamerBatch:
    """A streamer for transformers' `generate`: iterates over the new text of all rows of a batch."""

    def __init__(
        self,
        tokenizer: object,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **options: object,
    ) -> None:
        from transformers import TextIteratorStreamer

        self.batch_size = batch_size
        self.streamers = [TextIteratorStreamer(tokenizer, skip_prompt, timeout, **options) for _ in range(batch_size)]

    def put(self, value: torch.Tensor) -> None:
        """Add new tokens, one row per text."""
        if len(value) != self.batch_size:
            raise ValueError(f"the streamer expects {self.batch_size} texts and received {len(value)}")
        for streamer, row in zip(self.streamers, value, strict=True):
            streamer.put(row.reshape(-1))

    def end(self) -> None:
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> TextIteratorStreamerBatch:
        return self

    def __next__(self) -> list[dict[str, str]]:
        return [{"text": next(streamer)} for streamer in self.streamers]
