"""Engines by name: nothing heavy is imported before one is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engines.base import BatchEngine
from headrace.errors import ConfigError, MissingExtraError


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: str
    """`module:attribute`"""
    extra: str
    """The extra that installs what the module imports."""


_TASKS = {
    "embed": _Entry("headrace.engines.embedding:EmbeddingEngine", extra="torch"),
}


def known_tasks() -> tuple[str, ...]:
    """The names `create` takes."""
    return tuple(_TASKS)


def create(task: str, model: str | Path | None = None, **options: Any) -> BatchEngine[Any, Any, Any]:
    """The engine for `task`, with `model` loaded; `task` may also be `module:factory`, for an engine of one's own.

    Raises:
        ConfigError: no such task, model or option.
        MissingExtraError: what the engine needs is not installed.
        EngineError: the model's files cannot be loaded.
    """
    entry = _TASKS.get(task)
    if entry is None and ":" not in task:
        raise ConfigError(f"unknown task {task!r}; known: {', '.join(_TASKS)}, or module:factory for one of your own")
    factory = _import_known(task, entry) if entry else load_factory(task)
    _check_options(task, factory, options)
    engine: BatchEngine[Any, Any, Any] = factory(model, **options)
    return engine


def load_factory(reference: str) -> Callable[..., Any]:
    """The callable that `module:attribute` names, with dots allowed on both sides.

    Raises:
        ConfigError: it is not of that form, cannot be imported, or is not callable.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{reference!r} does not name a callable; write module:attribute")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{reference!r}: cannot import {module_name}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{reference!r}: {getattr(found, '__name__', found)} has no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{reference!r} is of type {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]  # narrowed to a callable of unknown signature


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
        return
    known = [parameter.name for parameter in parameters[1:]]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(f"task {task!r} has no option {unknown[0]!r}; known: {', '.join(known) or 'none'}")
