"""Engines by name: nothing heavy is imported before one is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engines.custom import load
from headrace.engines.kinds import check_kind
from headrace.errors import ConfigError, MissingExtraError, UnknownOptionError


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: str
    """`module:attribute`"""
    extra: str
    """The extra that installs what the module imports."""


_ENGINES: Mapping[str, Mapping[str, _Entry]] = {
    "embed": {
        "torch": _Entry("headrace.engines.embedding:EmbeddingEngine", extra="torch"),
        "onnx": _Entry("headrace.engines.onnx:embed", extra="onnx"),
        "endpoint": _Entry("headrace.engines.endpoint:embed", extra="client"),
    },
    "classify": {
        "torch": _Entry("headrace.engines.classification:classify", extra="torch"),
        "onnx": _Entry("headrace.engines.onnx:classify", extra="onnx"),
        "endpoint": _Entry("headrace.engines.endpoint:classify", extra="client"),
    },
    "score": {
        "torch": _Entry("headrace.engines.classification:score", extra="torch"),
        "onnx": _Entry("headrace.engines.onnx:score", extra="onnx"),
    },
    "zero-shot": {
        "torch": _Entry("headrace.engines.classification:zero_shot", extra="torch"),
        "onnx": _Entry("headrace.engines.onnx:zero_shot", extra="onnx"),
    },
    "image-classify": {
        "torch": _Entry("headrace.engines.vision:image_classify", extra="vision"),
        "onnx": _Entry("headrace.engines.onnx:image_classify", extra="onnx"),
    },
    "image-embed": {
        "torch": _Entry("headrace.engines.vision:image_embed", extra="vision"),
        "onnx": _Entry("headrace.engines.onnx:image_embed", extra="onnx"),
    },
    "generate": {
        "torch": _Entry("headrace.engines.generation:GenerationEngine", extra="torch"),
        "static": _Entry("headrace.engines.static_generation:StaticGenerationEngine", extra="torch"),
        "vllm": _Entry("headrace.engines.vllm:VllmEngine", extra="vllm"),
        "endpoint": _Entry("headrace.engines.endpoint:generate", extra="client"),
    },
    "custom": {"torchserve": _Entry("headrace.engines.torchserve:TorchServeEngine", extra="torch")},
}
"""The engines of each task by name; the first is the task's own."""


def known_tasks() -> tuple[str, ...]:
    """The tasks `create` takes."""
    return tuple(_ENGINES)


def create(task: str, model: str | Path | None = None, *, engine: str | None = None, **options: Any) -> Any:
    """An engine for `task`, with `model` loaded: one of the types of `engines.base`.

    `engine` is the name of one, or `module:name` for one of your own (see `custom.load`); None is the task's own.

    Raises:
        ConfigError: no such task, engine, model or option, or a model made for something else.
        MissingExtraError: what the engine needs is not installed.
        EngineError: the model's files cannot be loaded.
    """
    engines = _ENGINES.get(task)
    if engines is None:
        raise ConfigError(f"unknown task {task!r}; known: {', '.join(_ENGINES)}")
    if engine is not None and ":" in engine:
        return load(engine, model, options)
    if engine is None and task == "custom":
        raise ConfigError("task custom is for an engine of your own: name it with engine (module:name) or handler")
    entry = engines.get(engine or next(iter(engines)))
    if entry is None:
        raise ConfigError(
            f"task {task!r} has no engine {engine!r}; known: {', '.join(engines)}, or module:name for one of your own"
        )
    if entry.extra != "client":
        check_kind(task, model)  # before what takes seconds to import
    factory = _import_known(task, entry)
    _check_options(task, factory, options)
    return factory(model, **options)


def _import_known(task: str, entry: _Entry) -> Callable[..., Any]:
    module_name, _, attribute = entry.factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f'task {task!r} needs {error.name}, which is not installed: pip install "headrace[{entry.extra}]"'
        ) from error
    factory: Callable[..., Any] = getattr(module, attribute)
    return factory


def _check_options(task: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse a mistyped option here, where the known ones can be listed."""
    parameters = list(inspect.signature(factory).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # it knows better
    known = [parameter.name for parameter in parameters[1:]]
    unknown = [name for name in options if name not in known]
    if unknown:
        message = f"task {task!r} has no option {unknown[0]!r}; known: {', '.join(known) or 'none'}"
        raise UnknownOptionError(message, unknown[0])
