"""Custom engines: `module:name` of a function, of a class with one method, or of a factory of an engine."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headrace.batching.callables import plain_function
from headrace.batching.foreign_calls import called
from headrace.batching.options import whole
from headrace.batching.results import checked
from headrace.engines.base import BatchEngine, Prepared
from headrace.engines.capabilities import check_methods
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import ConfigError, EngineDeadError, UnknownOptionError, attempted, text_of, tried

ListFunction: TypeAlias = Callable[[list[Any]], Sequence[object]]
"""Returns one output for each value."""

BATCH_SIZE = 32
_OF_MODULES = ("device", "dtype", "batch_size")
"""Options of PyTorch modules."""
_FOR_ASYNC = (
    "; wrap it, as in `def engine(batch): return asyncio.run(fn(batch))`, or give an engine with an async `infer` "
    "(docs/engines.md)"
)


class FunctionEngine:
    """Wraps a function that takes a list of values and returns one output for each.

    An exception object in place of an output fails only that record. Every record costs 1.

    Args:
        function: may block; called on one thread.
        name: the user's name for it; part of a job's fingerprint.
        model: passed to its factory, if any.
        batch_size: maximum values per call.
        facts: what else determines the outputs, such as `EngineOptions.given`.
    """

    def __init__(
        self,
        function: ListFunction,
        name: str,
        model: str | Path | None = None,
        batch_size: int = BATCH_SIZE,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self._facts = facts or {}
        self._function: ListFunction | None = function
        self._name = name
        self._model = model
        self.profile = EngineProfile(
            batching="batches", cost_unit="records", batch_cost=batch_size, batch_size=batch_size
        )

    def describe(self) -> Mapping[str, object]:
        """The names of function and model, and the options. The code is left out, so a job can resume after a fix."""
        return {"engine": self._name, "model": None if self._model is None else str(self._model), **self._facts}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        return [Prepared(value, cost=1) for value in inputs]

    def forward(self, batch: list[object]) -> Sequence[object]:
        """Call the function.

        Raises:
            BadResultError: the result is not a list or array, or its length differs from the batch's.
            EngineDeadError: the engine is closed.
        """
        function = self._function
        if function is None:
            raise EngineDeadError("the engine is closed; create a new one")
        if not batch:
            return []
        size = len(batch)  # the function may change the list
        found: Sequence[object] = checked(called(self._name, function, batch), size, self._name)
        return found

    def close(self) -> None:
        self._function = None


def load(engine: object, model: str | Path | None, options: Mapping[str, object]) -> BatchEngine:
    """Create a custom engine from `module:name`, a callable or an object.

    A callable whose first parameter is named `model` is a factory: it is called with the model and the options, and
    returns an engine, a function, or an object with one method. Any other class is called without arguments. Any other
    function is used as the engine. All except complete engines take the option `batch_size`.

    Raises:
        ConfigError: it cannot be an engine, or does not take an option.
    """
    found, reference = (load_factory(engine), engine) if isinstance(engine, str) else (engine, _name(engine))
    chosen = dict(options)
    is_object = "torch" in sys.modules and isinstance(found, sys.modules["torch"].nn.Module)
    if callable(found):
        plain_function(repr(reference), found, _FOR_ASYNC)
    parameters = _parameters(found, reference) if callable(found) and not is_object else []
    facts: dict[str, object] = {}
    made: Any = found
    used_model: str | Path | None = None
    known: tuple[str, ...] = ()
    if callable(found) and parameters and parameters[0].name == "model":
        known = tuple(one.name for one in parameters[1:] if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
        own = {name: chosen.pop(name) for name in list(chosen) if _takes(parameters, name)}
        made, used_model = found(model, **own), model
        facts = {"given": {name: value for name, value in own.items() if isinstance(tried(json.dumps, value), str)}}
    elif model is not None:
        raise ConfigError(f"``model`` is {str(model)!r}, and engine {reference!r} takes no model; leave it out")
    elif inspect.isclass(found):
        made = found()
    if hasattr(made, "prepare") and any(hasattr(made, method) for method in ("forward", "step", "infer")):
        _refuse(reference, chosen, known)
        for method in ("prepare", "forward", "span", "add", "step", "needs", "remove", "describe", "close"):
            plain_function(f"{method} of {reference!r}", getattr(made, method, None))
        check_methods(made, profile_of(made))
        complete: BatchEngine = made
        return complete
    if is_own_module(made):
        own = {name: chosen.pop(name) for name in _OF_MODULES if name in chosen}
        _refuse(reference, chosen, (*_OF_MODULES, *known))
        modules = importlib.import_module("headrace.engines.own_modules")  # here, as it imports PyTorch
        whole_engine: BatchEngine = modules.ModuleEngine(made, reference, used_model, facts, own)
        return whole_engine
    size = chosen.pop("batch_size", BATCH_SIZE)
    _refuse(reference, chosen, ("batch_size", *known))
    size = whole("``batch_size``", size, 1)
    return FunctionEngine(_one_function(made, reference), reference, used_model, size, facts)


def is_own_module(made: object) -> bool:
    """Whether it is a PyTorch module, or an object with `collate` and `forward` of batches of tensors."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(made, torch.nn.Module):
        return True
    return all(callable(getattr(made, name, None)) for name in ("collate", "forward"))


def may_take_rows(given: object) -> bool:
    """Whether it is a function or module, which may be made for whole rows; no name and no complete engine."""
    return not isinstance(given, str) and (callable(given) or is_own_module(given)) and not hasattr(given, "prepare")


def search_current_folder() -> None:
    """Let modules in the current folder be found: an installed command does not search it."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # it has been deleted
        return
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def load_factory(reference: str) -> Callable[..., object]:
    """Import the callable `module:attribute`. Both sides may contain dots; the current folder is on the path.

    Raises:
        ConfigError: the reference has another form, cannot be imported, or is not callable.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{reference!r} does not name a callable; write module:attribute")
    if (file := Path(module_name)).is_file() or "/" in module_name:
        where = "" if file == Path(file.name) else f", with {str(file.parent)!r} in PYTHONPATH"
        raise ConfigError(f"{reference!r} names a file; give the name of its module: {file.stem}:{attribute}{where}")
    search_current_folder()
    found: object = attempted(importlib.import_module, module_name)
    if isinstance(found, KeyboardInterrupt):
        raise found
    if isinstance(found, ImportError):
        raise ConfigError(f"{reference!r}: cannot import {module_name}: {found}") from found
    if isinstance(found, BaseException):  # a module may raise anything, or call sys.exit()
        words = f"{type(found).__name__}: {' '.join(text_of(found).split())}"
        raise ConfigError(f"{reference!r}: importing {module_name} raised {words}") from found
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{reference!r}: {getattr(found, '__name__', found)} has no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{reference!r} is of type {type(found).__name__}, which cannot be called")
    return found


def _name(found: object) -> str:
    """The object's name in a job's fingerprint, without its memory address."""
    kind = found if hasattr(found, "__qualname__") else type(found)
    return f"{kind.__module__}:{kind.__qualname__}"


def _parameters(found: Callable[..., object], reference: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(found).parameters.values())
    except ValueError as error:
        raise ConfigError(f"{reference!r}: {error}; wrap it in a function") from error


def _takes(parameters: Sequence[inspect.Parameter], option: str) -> bool:
    return any(
        parameter.name == option or (parameter.kind is parameter.VAR_KEYWORD and option != "batch_size")
        for parameter in parameters[1:]
    )


def _refuse(reference: str, options: Mapping[str, object], known: Sequence[str]) -> None:
    if options:
        raise UnknownOptionError(next(iter(options)), None, reference, tuple(known))


def _one_function(made: Any, reference: str) -> ListFunction:
    """The object if it is callable, else its only public method."""
    function = made
    if not callable(made):
        methods = [name for name, _ in inspect.getmembers(made, inspect.ismethod) if not name.startswith("_")]
        if len(methods) != 1:
            raise ConfigError(
                f"{reference!r} gives an object of {type(made).__name__} with {len(methods)} public methods "
                f"({', '.join(methods) or 'none'}); it must have one, be callable, or be a complete engine"
            )
        function = getattr(made, methods[0])
    plain_function(repr(reference), function, _FOR_ASYNC)
    return function  # type: ignore[no-any-return]  # known to be callable
