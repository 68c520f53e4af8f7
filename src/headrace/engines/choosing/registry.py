"""Create engines by name. An engine's dependencies are imported only when it is created."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engines.custom import load
from headrace.engines.model_folder import DEFAULT_MODEL, ONNX_WEIGHTS, WEIGHTS, is_local, named_folder
from headrace.engines.model_kinds import check_kind, warn_unused_head
from headrace.engines.options import VLLM_OPTIONS, EncoderOptions
from headrace.engines.requests.generation import Sampling
from headrace.engines.requests.long_prompts import LongPrompts, taken_from
from headrace.engines.task_names import unknown_task
from headrace.errors import ConfigError, MissingExtraError, UnknownOptionError, nearest
from headrace.models.names import remote_model


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: str
    """`module:attribute`"""
    extra: str
    """The extra that installs what the module imports."""
    default: str | None = None
    """The default model."""
    weights: frozenset[str] | None = WEIGHTS
    """Suffixes of the weight files, one of which must be in the model's folder; None if the model is not a folder."""
    samples: bool = False
    """Whether its further options are sampling parameters, and the rules for prompts that are too long."""
    splits: bool = False
    """Whether it can split what is too long for the model."""


_ENGINES: Mapping[str, Mapping[str, _Entry]] = {
    "embed": {
        "torch": _Entry(
            "headrace.engines.text.embedding:EmbeddingEngine", extra="torch", default=DEFAULT_MODEL, splits=True
        ),
        "onnx": _Entry("headrace.engines.onnx.engine:embed", extra="onnx", weights=ONNX_WEIGHTS, splits=True),
        "vllm": _Entry("headrace.engines.vllm.pooling:embed", extra="vllm", default=DEFAULT_MODEL),
        "endpoint": _Entry("headrace.engines.remote.endpoint:embed", extra="client", weights=None),
    },
    "sparse-embed": {"torch": _Entry("headrace.engines.text.sparse:SparseEngine", extra="torch")},
    "multi-vector-embed": {"torch": _Entry("headrace.engines.text.multi_vector:MultiVectorEngine", extra="torch")},
    "classify": {
        "torch": _Entry("headrace.engines.text.classification:classify", extra="torch", splits=True),
        "onnx": _Entry("headrace.engines.onnx.engine:classify", extra="onnx", weights=ONNX_WEIGHTS, splits=True),
        "vllm": _Entry("headrace.engines.vllm.pooling:classify", extra="vllm"),
        "endpoint": _Entry("headrace.engines.remote.endpoint:classify", extra="client", weights=None),
    },
    "score": {
        "torch": _Entry("headrace.engines.text.classification:score", extra="torch", splits=True),
        "onnx": _Entry("headrace.engines.onnx.engine:score", extra="onnx", weights=ONNX_WEIGHTS, splits=True),
        "vllm": _Entry("headrace.engines.vllm.pooling:score", extra="vllm"),
    },
    "zero-shot": {
        "torch": _Entry("headrace.engines.text.classification:zero_shot", extra="torch"),
        "onnx": _Entry("headrace.engines.onnx.engine:zero_shot", extra="onnx", weights=ONNX_WEIGHTS),
    },
    "image-classify": {
        "torch": _Entry("headrace.engines.vision.engine:image_classify", extra="vision"),
        "onnx": _Entry("headrace.engines.onnx.engine:image_classify", extra="onnx", weights=ONNX_WEIGHTS),
    },
    "image-embed": {
        "torch": _Entry("headrace.engines.vision.engine:image_embed", extra="vision"),
        "onnx": _Entry("headrace.engines.onnx.engine:image_embed", extra="onnx", weights=ONNX_WEIGHTS),
    },
    "generate": {
        "torch": _Entry(
            "headrace.engines.generation.continuous:GenerationEngine",
            extra="torch",
            default="arithmetic",
            samples=True,
            splits=True,
        ),
        "static": _Entry(
            "headrace.engines.generation.static:StaticGenerationEngine",
            extra="torch",
            default="arithmetic",
            samples=True,
        ),
        "vllm": _Entry(
            "headrace.engines.vllm.engine:VllmEngine", extra="vllm", default="arithmetic", samples=True, splits=True
        ),
        "endpoint": _Entry("headrace.engines.remote.endpoint:generate", extra="client", weights=None),
    },
    "custom": {
        "torchserve": _Entry("headrace.engines.torchserve.engine:TorchServeEngine", extra="torch", weights=None)
    },
}
"""The engines of each task by name; the first is the default."""


_INCLUDED = {"classify": "docstrings", "image-classify": "digits"}
"""A small model of a task without a default, to begin with."""


def known_tasks() -> tuple[str, ...]:
    """The tasks that `create` supports."""
    return tuple(_ENGINES)


def options_by_task() -> dict[str, dict[str, tuple[str, ...]]]:
    """The options of each task's engines, the default first; without those that take another program's."""
    found = {
        task: {name: _known_options(entry) for name, entry in engines.items()} for task, engines in _ENGINES.items()
    }
    return {
        task: {name: known for name, known in engines.items() if known is not None and name != "vllm"}
        for task, engines in found.items()
    }


def is_custom(engine: object) -> bool:
    """Whether it is a custom engine: `module:name`, a function or another object."""
    return engine is not None and (not isinstance(engine, str) or ":" in engine)


def check_options(task: str, engine: object, options: Mapping[str, object], settings: Iterable[str] = ()) -> None:
    """Check that the task, the engine and its options exist, without importing the engine's dependencies.

    Args:
        settings: other names to suggest for an unknown option.

    Raises:
        ConfigError: one of them does not exist.
    """
    entry = _entry(task, engine)
    known = _known_options(entry) if entry is not None else None
    if known is not None:
        _refuse_unknown(task, None if engine is None else str(engine), known, options, settings)
    if entry is not None:
        _check_splitting(entry, options)


def check_model(task: str, model: str | Path | None, engine: object) -> None:
    """Check that the model's folder exists and fits the task, without importing the engine's dependencies.

    Raises:
        ConfigError: it does not.
    """
    entry = _entry(task, engine)
    if entry is not None:
        folder_of(task, model, engine)
        _check_kind(task, model, entry)


def folder_of(task: str, model: str | Path | None, engine: object) -> Path | None:
    """The folder of the model that the engine would load; None if the model is not a local folder.

    Raises:
        ConfigError: the folder does not exist, or no model is named.
    """
    entry = _entry(task, engine)
    if entry is None or entry.weights is None or is_remote(task, model, engine):
        return None
    _check_named(task, model, entry)
    return named_folder(entry.default if model is None else model, entry.weights)


def is_remote(task: str, model: str | Path | None, engine: object) -> bool:
    """Whether the model must be downloaded: it is neither a local folder nor an included model.

    The model of a custom engine and of a server elsewhere is a name of their own.

    Raises:
        ConfigError: the task or engine does not exist, or the name has a wrong form.
    """
    return _needs_folder(task, engine) and model is not None and not is_local(model) and bool(remote_model(str(model)))


def loads_onnx(task: str, engine: object) -> bool:
    """Whether the engine reads ONNX files."""
    entry = _entry(task, engine)
    return entry is not None and entry.weights == ONNX_WEIGHTS


def _needs_folder(task: str, engine: object) -> bool:
    entry = _entry(task, engine)
    return entry is not None and entry.weights is not None


def has_option(task: str | None, engine: object, option: str) -> bool:
    """Whether an engine of Headrace's own has an option of this name; False for others, and where it cannot be told."""
    entry = _entry(task or "", engine)
    return entry is not None and option in (_known_options(entry) or ())


def unknown_key(key: str, known: Sequence[str]) -> str:
    """What to do about an unknown key of a mapping that has `engine_options`, as the end of a sentence."""
    if _owners(key):
        return "; it is an option of an engine: put it under engine_options"
    return nearest(key, known) or f"; known: {', '.join(known)}"


def create(task: str, model: str | Path | None = None, *, engine: object = None, **options: object) -> Any:
    """Create an engine for `task` and load `model`. The result is one of the types in `engines.base`.

    `engine` is a name, or `module:name` or a callable for a custom engine (see `custom.load`); None for the task's
    default.

    Raises:
        ConfigError: no such task, engine, model or option, or a model of another kind.
        MissingExtraError: a dependency of the engine is not installed.
        EngineError: the model's files cannot be loaded.
    """
    entry = _entry(task, engine)
    if entry is None:
        return load(engine, model, options)
    _check_named(task, model, entry)
    _check_kind(task, model, entry)  # before imports that take seconds
    if entry.extra != "client":
        warn_unused_head(task, model)
    factory = _import_known(task, entry)
    if (known := _known_options(entry)) is not None:
        _refuse_unknown(task, None if engine is None else str(engine), known, options)
    _check_splitting(entry, options)
    return factory(model, **options)


def _entry(task: str, engine: object) -> _Entry | None:
    """The engine with that name; None for a custom engine.

    Raises:
        ConfigError: no such task or engine.
    """
    engines = _ENGINES.get(task)
    if engines is None:
        raise unknown_task(task, _ENGINES)
    if is_custom(engine):
        return None
    if engine is None and task == "custom":
        raise ConfigError("task custom needs an engine: set engine (module:name) or handler")
    entry = engines.get(str(engine) if engine else next(iter(engines)))
    if entry is None:
        raise ConfigError(
            f"task {task!r} has no engine {engine!r}; known: {', '.join(engines)}, or module:name for a custom engine"
        )
    return entry


def _check_named(task: str, model: str | Path | None, entry: _Entry) -> None:
    if model is None and entry.default is None and entry.weights is not None:
        own = _INCLUDED.get(task) if entry.weights == WEIGHTS else None
        included = "" if own is None else f", or {own}, which is included"
        raise ConfigError(f"task {task!r} has no default model; set one: ``model=FOLDER`` or org/name{included}")


def _check_kind(task: str, model: str | Path | None, entry: _Entry) -> None:
    if entry.extra != "client":
        check_kind(task, model)


def _import_known(task: str, entry: _Entry) -> Callable[..., object]:
    module_name, _, attribute = entry.factory.partition(":")
    try:
        with _importing, _quiet_imports():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f'task {task!r} needs {error.name}, which is not installed: pip install "headrace[{entry.extra}]"'
        ) from error
    factory: Callable[..., object] = getattr(module, attribute)
    return factory


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


@functools.cache
def _known_options(entry: _Entry) -> tuple[str, ...] | None:
    """The names of a factory's options, read from its source to avoid slow imports.

    None if they cannot be determined.
    """
    module, _, attribute = entry.factory.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    found = next((node for node in body if getattr(node, "name", None) == attribute), None)
    if isinstance(found, ast.ClassDef):
        found = next((node for node in found.body if getattr(node, "name", None) == "__init__"), None)
    if not isinstance(found, ast.FunctionDef):
        return None
    names = [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs) if argument.arg != "self"][1:]
    if found.args.kwarg is not None and "EncoderOptions" in ast.dump(found.args.kwarg):
        names = [*EncoderOptions.__annotations__, *names]
    if found.args.kwarg is not None and "SamplingOptions" in ast.dump(found.args.kwarg):
        names += Sampling.__slots__
    if entry.samples:
        names += [*Sampling.__slots__, *LongPrompts.__slots__]
    if found.args.kwarg is not None and entry.extra == "vllm":
        arguments = _vllm_arguments()
        if arguments is None:
            return None
        names += arguments
    return tuple(dict.fromkeys(names))


def _vllm_arguments() -> list[str] | None:
    """The names of vLLM's engine arguments, from its source; None if it is not installed."""
    spec = importlib.machinery.PathFinder.find_spec("vllm")
    file = Path(spec.origin).parent / "engine" / "arg_utils.py" if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = [node for node in body if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")]
    assigned = [node.target for kind in kinds for node in kind.body if isinstance(node, ast.AnnAssign)]
    names = [target.id for target in assigned if isinstance(target, ast.Name)]
    return [name for name in names if name != "model" and not name.startswith("_")] or None


def _refuse_unknown(
    task: str, engine: str | None, known: Sequence[str], options: Mapping[str, object], settings: Iterable[str] = ()
) -> None:
    option = next((name for name in options if name not in known), None)
    if option is None:
        return
    raise UnknownOptionError(option, task, engine, tuple(known), tuple(_owners(option).items()), tuple(settings))


def _check_splitting(entry: _Entry, options: Mapping[str, object]) -> None:
    """Refuse texts that are to be split where they cannot be, and settings of it where they are not.

    Raises:
        ConfigError: as said.
    """
    splits = options.get("on_too_long") == "split"
    if splits and not entry.splits:
        raise ConfigError(
            "on_too_long is 'split', which the engines torch and onnx have for the tasks embed, classify and score, "
            "and torch and vllm for generate; use 'error', or another engine"
        )
    if entry.samples:
        taken_from(dict(options))
    for name in () if splits else ("chunk_overlap", "chunk_join"):
        if options.get(name) is not None:
            raise ConfigError(f"{name} is {options[name]!r}, but no text is split: set on_too_long to 'split'")


def _owners(option: str) -> dict[str, str]:
    """The engines that have `option`, each with its first task."""
    owners: dict[str, str] = {}
    for task, engines in _ENGINES.items():
        for name, entry in engines.items():
            known = _known_options(entry)
            if option in (VLLM_OPTIONS if known is None else known):
                owners.setdefault(name, task)
    return owners
