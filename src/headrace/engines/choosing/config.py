"""The engine configuration that the command line, Python API, server and cluster share."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from headrace.argument_types import check_types, named, with_more
from headrace.engines.choosing import registry
from headrace.engines.declaring import EngineOptions
from headrace.engines.model_folder import is_included
from headrace.engines.tasks import known_tasks
from headrace.errors import ConfigError
from headrace.options import option
from headrace.wording import shown, spelled

logger = logging.getLogger("headrace")


class EngineChoice(Protocol):
    """An engine with its options as one object, such as `headrace.Embedding`."""

    def as_config(self) -> EngineConfig:
        """The configuration that jobs and servers use."""
        ...


@named(keys=True)
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which engine to load, its options and its batch limits."""

    panel: ClassVar[str] = "Engine"

    task: str | None = option(
        None,
        f"Task of the model: {', '.join(known_tasks())}. Default: embed, or custom with an engine of your own; in a "
        "job, that of an OpenAI batch file.",
        changes_output=True,
        brief="embed, classify, score, zero-shot, generate, ...",
    )
    model: str | None = option(
        None,
        "Model of the Hugging Face Hub (org/name or org/name@revision), a folder (local or s3://...), or an included "
        "model: all-MiniLM-L6-v2 (default for embed), arithmetic (default for generate), docstrings, digits. "
        "Repeatable in headrace run.",
        repeatable=True,
        brief="model of the Hub, a folder, or an included one",
    )
    """As the user wrote it."""
    engine: str | Callable[..., object] | object | None = option(
        None,
        f"Engine: {', '.join(registry.all_names())}, as headrace list engines has them for each task, or your "
        "module:name. Default: chosen by the task.",
        brief="torch, onnx, vllm, endpoint, ... or your module:name",
    )
    """In Python also a function, or any other object that `headrace.engines.custom.load` takes."""
    engine_options: Mapping[str, object] = option(
        dict, "Options of the engine as a mapping, for one whose options no type checker knows.", flags=()
    )
    batch_tokens: int | None = option(
        None, "Maximum tokens in a batch, padding included. Default: measured, or set by the engine.", minimum=1
    )
    batch_size: int | None = option(
        None, "Maximum texts, images or prompts in a batch. Default: set by the engine.", minimum=1
    )
    engine_process: bool = option(
        False, "Run a batch engine in its own process, so that a crash fails only the record or request that caused it."
    )
    engine_timeout_s: float | None = option(
        None,
        "Maximum seconds for a batch, step or request; in a job, also for a ``prepare`` or ``finish`` call in a "
        "process, see docs/jobs.md. Default: no limit.",
        flags=("--engine-timeout",),
        above=0,
    )
    pickled_weights: bool = option(
        False,
        "Load weights in formats other than safetensors, which can run code, from a downloaded model, or in a server.",
        flags=("--allow-pickled-weights",),
    )
    commit: str | None = None
    """The version of a downloaded model, set by `engines.choosing.resolving.resolve`; None for a local model."""

    def changed(self) -> list[str]:
        """The names of the settings that differ from their defaults."""
        default = EngineConfig()
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(default, one.name)]

    def given(self) -> list[str]:
        """The names of the settings, and of the engine's options, that differ from their defaults."""
        return [
            one for name in self.changed() for one in (self.engine_options if name == "engine_options" else (name,))
        ]

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
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests choose among."""
        given = self.engine_options.get("adapters")
        return tuple(given) if isinstance(given, Mapping) and self.has_option("adapters") else ()

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
            return config._led()
        own = registry.is_custom(config.engine) or config.engine in registry.engine_names("custom")
        return replace(config, task=asked or ("custom" if own else "embed"))

    def _led(self) -> EngineConfig:
        """With the engine that leads on a GPU, if it is installed and none was named; says so."""
        if self.engine is not None or self.engine_process or self.task not in known_tasks():
            return self
        engine = registry.leading_engine(self.task, self.engine_options)
        if engine is None:
            return self
        logger.warning(
            "%s runs on %s, which is installed and fastest on a GPU; %s for Headrace's own engine",
            self.task, engine, spelled("``engine=torch``"),
        )  # fmt: skip
        return replace(self, engine=engine)

    def anchored(self) -> EngineConfig:
        """A copy with absolute paths, as user code may change the current folder.

        The model of an engine of the user's own or of a server elsewhere is a name, and stays.
        """
        if not isinstance(self.engine_options, Mapping):
            return self  # its check names it
        paths = registry.path_options() if self.engine_options else ()  # it imports the options of all engines
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
        check_types(self)
        task, own = self.task or "", (*_NAMES, *settings)
        registry.check_options(task, self.engine, self.engine_options, own)
        if model:
            registry.check_model(task, self.model, self.engine)


def _anchored(name: Any) -> Any:
    """An absolute path instead of a relative one to a file or folder, which may have `:function` behind it."""
    text = str(name) if isinstance(name, (str, Path)) else ""
    file = text if os.path.exists(text) else text.partition(":")[0]  # noqa: PTH110 - must not raise for a long text
    if not file or not os.path.exists(file):  # noqa: PTH110
        return name
    return type(name)(f"{Path(file).absolute()}{text.removeprefix(file)}")


_NAMES = tuple(entry.name for entry in fields(EngineConfig))


def config_from(given: Mapping[str, Any]) -> EngineConfig:
    """The configuration of settings as keyword arguments: those that are not its own are options of the engine.

    Raises:
        ConfigError: an option is given twice, or beside an engine that is an object with its own; or the model is what
            goes to `engine`.
    """
    own = {name: value for name, value in given.items() if name in _NAMES and name != "engine_options"}
    options = merged_options(
        given.get("engine_options"), {name: value for name, value in given.items() if name not in _NAMES}
    )
    choice: Any = own.get("engine")
    if isinstance(choice, type) and hasattr(choice, "as_config"):
        raise ConfigError(f"engine is the class {choice.__name__}; it must be an object of it: {choice.__name__}()")
    if callable(model := own.get("model")) or hasattr(model, "as_config"):
        raise ConfigError(f"``model`` is {shown(model)}; it must be a text: a function or an engine goes to ``engine``")
    if not hasattr(choice, "as_config"):
        return EngineConfig(**{**own, "model": model_name(model), "engine_options": options})
    beside = {name: value for name, value in {**own, **options}.items() if name in ("task", "model", *options)}
    if name := next((name for name, value in beside.items() if value is not None), None):
        if is_dataclass(choice) and not hasattr(choice, name):
            raise ConfigError(f"``{name}`` is unknown: the engine {type(choice).__name__} has no such option")
        raise ConfigError(f"``{name}`` is a setting of the engine {type(choice).__name__}: give it there")
    chosen: EngineConfig = choice.as_config()
    return with_more(chosen, {name: own[name] for name in own if name not in ("task", "model", "engine")}, "``engine``")


def merged_options(explicit: Mapping[str, object] | None, keywords: Mapping[str, object]) -> dict[str, object]:
    """Merge options given as a mapping and as keyword arguments. Raises ConfigError: an option is given both ways."""
    given: object = explicit or {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"``engine_options`` is {shown(explicit)}; it must be a mapping of options by name")
    options = dict(given)
    for name, value in keywords.items():
        if name in options:
            raise ConfigError(f"``{name}`` is given twice; give it once")
        options[name] = value
    return options


def model_name(model: str | Path | None) -> str | None:
    """The model as the string that `EngineConfig` stores."""
    return str(model) if isinstance(model, Path) else model
