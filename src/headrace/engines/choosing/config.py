"""The engine configuration that the command line, Python API, server and cluster share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from headrace.engines.choosing import registry
from headrace.engines.declaring import EngineOptions
from headrace.engines.model_folder import is_included
from headrace.errors import ConfigError


class EngineChoice(Protocol):
    """An engine with its options as one object, such as `headrace.Embedding`."""

    def as_config(self) -> EngineConfig:
        """The configuration that jobs and servers use."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which engine to load, its options and its batch limits."""

    task: str | None = None
    """None to use the input's task, else the engine's ("custom" for a custom engine), else "embed"."""
    model: str | None = None
    """As the user wrote it: a folder, an included model, `org/name[@revision]` or `hf://...` on the hub, or a folder in
    an object store; None for the task's default."""
    engine: str | Callable[..., object] | object | None = None
    """Replaces the task's default engine: a name such as "onnx" or "vllm", or a custom engine (`module:name`, a
    function, or any other object that `headrace.engines.custom.load` takes)."""
    engine_options: Mapping[str, object] = field(default_factory=dict)
    """Engine options, such as `max_model_len`."""
    batch_tokens: int | None = None
    """Maximum cost of a batch in the engine's cost unit, padding included; None for the engine's default."""
    batch_size: int | None = None
    """Maximum records in a batch; None for the engine's default."""
    engine_process: bool = False
    """Run the engine in a child process, so that a crash fails only the record that caused it."""
    engine_timeout_s: float | None = None
    """Maximum seconds for a batch, step or request, and for a call of `prepare` or `finish` in a process; None for no
    limit."""
    pickled_weights: bool = False
    """Allow pickled weights, which can run code, in downloaded models and in servers; otherwise only safetensors."""
    commit: str | None = None
    """The version of a downloaded model, set by `engines.choosing.resolving.resolve`; None for a local model."""

    def changed(self) -> list[str]:
        """The names of the settings that differ from their defaults."""
        default = EngineConfig()
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(default, one.name)]

    @property
    def devices(self) -> int:
        """How many CUDA devices one engine uses; an option of a wrong type counts as 1, as the engine refuses it."""
        sizes = (self.engine_options.get(f"{way}_parallel_size", 1) for way in ("tensor", "pipeline", "data"))
        return max(math.prod(size for size in sizes if isinstance(size, int)), 1)

    @property
    def declaration(self) -> type[EngineOptions] | None:
        """What its engine declares; None for a custom engine.

        Raises:
            ConfigError: there is no such task or engine, or the package that registers it is broken.
        """
        return registry.engine_named(self.task or "", self.engine)

    def has_option(self, name: str) -> bool:
        """Whether its engine declares an option of this name; False for a custom engine."""
        return self.declaration is not None and name in (self.declaration.names() or ())

    @property
    def call_timeout_s(self) -> float | None:
        """The limit that a batcher keeps for a batch, step or request; None where an engine process keeps it itself."""
        return None if self.engine_process else self.engine_timeout_s

    @property
    def label(self) -> str | None:
        """The model with its version, for people; None for the task's default model."""
        return self.model if self.commit is None else f"{self.model} at commit {self.commit}"

    def resolved(self, asked: str | None = None) -> EngineConfig:
        """A copy with task and engine filled in from the options and the input's task (`asked`).

        Raises:
            ConfigError: an option belongs to another engine than the one named.
        """
        config = self
        if config.engine is None and config.engine_options:
            config = replace(config, engine=registry.implied_engine(config.engine_options))
        if config.task is not None:
            return config
        own = registry.is_custom(config.engine) or config.engine in registry.engine_names("custom")
        return replace(config, task=asked or ("custom" if own else "embed"))

    def anchored(self) -> EngineConfig:
        """A copy with absolute paths, as user code may change the current folder.

        The model of an engine of the user's own or of a server elsewhere is a name, and stays.
        """
        if not isinstance(self.engine_options, Mapping):
            return self  # its check names it
        paths = registry.path_options()
        options = {
            name: _anchored(value) if name in paths or isinstance(value, Path) else value
            for name, value in self.engine_options.items()
        }
        engine, model = self.engine or registry.implied_engine(options), self.model
        if model is None or registry.is_custom(engine) or is_included(model) or registry.is_remote(engine):
            return replace(self, engine_options=options)
        return replace(self, model=_anchored(model), engine_options=options)

    def check(self, settings: Iterable[str] = (), *, model: bool = True) -> None:
        """Check that the task, engine, options and model exist, without importing the engine's dependencies.

        Args:
            settings: names of the caller's other settings, suggested when an option is unknown.
            model: whether to check the model's folder; False if it is on another machine. A model that is downloaded
                is checked by `engines.choosing.resolving.resolve`.

        Raises:
            ConfigError: one of them does not exist, or a number is out of range.
        """
        self._check_numbers()
        task, own = self.task or "", (*_NAMES, *settings)
        registry.check_options(task, self.engine, self.engine_options, own)
        if model:
            registry.check_model(task, self.model, self.engine)

    def _check_numbers(self) -> None:
        for name in ("batch_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"{name} is {value!r}; it must be >= 1")
        timeout = self.engine_timeout_s
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ConfigError(f"engine_timeout_s is {timeout!r}; it must be a finite number > 0")


def _anchored(name: Any) -> Any:
    """An absolute path instead of a relative one to a file or folder, which may have `:function` behind it."""
    text = str(name) if isinstance(name, (str, Path)) else ""
    file = text if os.path.exists(text) else text.partition(":")[0]  # noqa: PTH110 - must not raise for a long text
    if not file or not os.path.exists(file):  # noqa: PTH110
        return name
    return type(name)(f"{Path(file).absolute()}{text.removeprefix(file)}")


_NAMES = tuple(entry.name for entry in fields(EngineConfig))


def merged_options(explicit: Mapping[str, object] | None, keywords: Mapping[str, object]) -> dict[str, object]:
    """Merge options given as a mapping and as keyword arguments.

    Raises:
        ConfigError: an option is given both ways.
    """
    options = dict(explicit or {})
    for name, value in keywords.items():
        if name in options:
            raise ConfigError(f"{name} is given twice; give it once")
        options[name] = value
    return options


def model_name(model: str | Path | None) -> str | None:
    """The model as the string that `EngineConfig` stores."""
    return str(model) if isinstance(model, Path) else model
