"""What a task and an engine declare about themselves, so that nothing else need know their names."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, dataclass_transform

from headrace.argument_types import check_types, named
from headrace.errors import ConfigError, MissingExtraError
from headrace.options import declared

if TYPE_CHECKING:
    from headrace.engines.choosing.config import EngineConfig

OutputKind: TypeAlias = Literal["vector", "sparse vector", "vectors", "labels", "score", "text", "any"]
"""What a task's outputs are; "any" if its engine decides."""


_EXAMPLES: dict[OutputKind, object] = {
    "vector": [0.0],
    "vectors": [[0.0]],
    "score": 0.0,
    "labels": {"label": "", "score": 0.0},
    "text": {"text": "", "finish_reason": "", "prompt_tokens": 0, "completion_tokens": 0},
    "sparse vector": {"indices": [0], "values": [0.0]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: what goes in, what comes out, and which models and servers it goes with.

    A package registers one in the group `headrace.tasks`, under its name. A prompt that all inputs of a task share is
    an option of the engines that serve it (`EngineOptions`).
    """

    name: str
    output: str
    """The default column of its outputs."""
    input: str = "text"
    """The default column of its inputs."""
    text_only: bool = True
    """Whether an input must be text; otherwise the engine checks it."""
    pairs: Literal["never", "perhaps", "always"] = "never"
    """Whether an input may be, or is, a pair of texts."""
    images: bool = False
    """Whether its inputs are images."""
    requests: bool = False
    """Whether an input may be a whole request to a language model, with a chat or sampling parameters."""
    outputs: OutputKind = "any"
    aliases: tuple[str, ...] = ()
    """What people and other libraries call it; an error suggests the task for these."""
    suits: frozenset[str] | None = None
    """The kinds of models that it can use, as in `model_kinds`; None if models are not checked."""
    included: str | None = None
    """A small included model to begin with, for a task whose engine has no default model."""
    endpoints: tuple[str, ...] = ()
    """The endpoints of OpenAI's Batch API that it answers."""
    routes: str | Callable[[Any], Any] | None = None
    """Makes the FastAPI router of its own HTTP routes from the server's `ServerState`, or names `module:attribute`."""
    operation: str | None = None
    """The operation's name in OpenTelemetry's conventions; None for the task's name."""
    order: int = 100
    """Its place where tasks are listed."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that each output has; none if outputs are single values, or if their engine decides."""
        return tuple(self.example) if isinstance(self.example, dict) else ()

    @property
    def example(self) -> object:
        """An output, with all its fields; None if their engine decides."""
        return _EXAMPLES.get(self.outputs)

    @property
    def takes_single_texts(self) -> bool:
        """Whether an input is, or may be, one text."""
        return not self.images and self.pairs != "always"


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Dataclasses:
    """Makes each subclass a frozen dataclass of keywords."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __init_subclass__(cls) -> None:
        named(keys=True, of_engine=True)(dataclass(frozen=True, kw_only=True)(cls))


class EngineOptions(_Dataclasses):
    """An engine: its options are fields declared with `headrace.options.option`; the rest is known before it is loaded.

    A package registers a subclass in the group `headrace.engines`, under the name `TASK.ENGINE`. A subclass sets `task`
    and `engine`, and either `factory` or `load`. It must import fast: it is read by `--help` and for errors.
    """

    task: ClassVar[str]
    engine: ClassVar[str]
    factory: ClassVar[str] = ""
    """`module:attribute` of what makes the engine from these options. Imported when the engine is loaded."""
    extra: ClassVar[str] = ""
    """The extra of its package that installs what `factory` imports."""
    holds_forms: ClassVar[bool] = False
    """Whether it holds answers to a form with llguidance, which says before it is loaded what it cannot do."""
    default_model: ClassVar[str | None] = None
    weights: ClassVar[frozenset[str] | None] = None
    """Suffixes of the weight files, one of which must be in the model's folder; None if the model is not a folder."""
    by_transformers: ClassVar[bool] = False
    """Whether transformers reads the model's config.json."""
    splits: ClassVar[bool] = False
    """Whether it can split what is too long for the model."""
    preparing: ClassVar[str] = ""
    """The module of what prepares columns in other processes, where that can be done."""
    takes_model: ClassVar[bool] = False
    """Whether `model` names one although `weights`, `default_model` and `remote` do not say so."""
    remote: ClassVar[bool] = False
    """Whether the model is on another server, under a name of its own."""
    runs_batches: ClassVar[bool] = True
    """Whether it runs batches that it is given, and so can run in a child process."""
    implied_by: ClassVar[str | None] = None
    """The option that chooses this engine where none is named. Such an engine is never a task's default."""
    library: ClassVar[str | None] = None
    """The package whose version may change its outputs, beside the model and the options."""
    leads_on_gpu: ClassVar[bool] = False
    """Whether it is the default of its task where there is a GPU and its library is installed."""
    others: ClassVar[str | None] = None
    """The program whose own options it takes beside those that are declared."""
    order: ClassVar[int] = 100
    """Its place among the engines of a task; the first is the default."""

    model: str | Path | None = None
    """A folder, an included model, or `org/name[@revision]` on the Hub; None for the default."""

    @classmethod
    def names(cls) -> tuple[str, ...] | None:
        """The names of its options; None if they cannot be told."""
        return tuple(one.name for one in declared(cls))

    @classmethod
    def of(cls, model: str | Path | None, given: Mapping[str, object]) -> Self:
        """The object for options as a mapping, all of whose names are known.

        Raises:
            ConfigError: a required option is missing.
        """
        needed = (one.name for one in declared(cls) if one.required and one.name not in given)
        if (name := next(needed, None)) is not None:
            raise ConfigError(f"engine {cls.engine} needs ``{name}``")
        return cls(model=model, **given)

    def given(self) -> dict[str, object]:
        """The options that differ from their defaults."""
        every = ((one.name, getattr(self, one.name), one.default) for one in declared(type(self)))
        return {name: value for name, value, default in every if value != default}

    def as_config(self) -> EngineConfig:
        from headrace.engines.choosing.config import EngineConfig, model_name  # this module is below it

        return EngineConfig(self.task, model_name(self.model), self.engine, self.given())

    def check(self) -> None:
        """Check all values as far as can be before the model is loaded.

        Raises:
            ConfigError: a value has another type than is declared, or is out of range.
        """
        check_types(self, "model")

    def load(self) -> Any:
        """The engine, with its model loaded: one of the types in `engines.base`.

        Raises:
            ConfigError: an option that the model does not support.
            MissingExtraError: a library is not installed.
            EngineError: the model's files cannot be loaded.
        """
        module_name, _, attribute = self.factory.partition(":")
        try:
            with _importing, _quiet_imports():
                module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            package = "headrace" if self.factory.startswith("headrace.") else module_name.partition(".")[0]
            install = f'pip install "{package}[{self.extra}]"' if self.extra else f"pip install {error.name}"
            raise MissingExtraError(
                f"task {self.task!r} needs {error.name}, which is not installed: {install}"
            ) from error
        return getattr(module, attribute)(self)


_importing = threading.Lock()
"""Imports of torch and transformers on two threads may each see a module of the other half made."""


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without the warnings that torchao gives for kernels of other devices, where transformers finds and imports it."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
