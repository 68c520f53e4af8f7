"""Engines by name. An engine's dependencies are imported only when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeGuard, get_args

from headrace.device.cuda import cuda_devices
from headrace.engines.custom import load
from headrace.engines.declaring import EngineOptions
from headrace.engines.model_folder import WEIGHTS, find_folder, is_local
from headrace.engines.model_kinds import check_kind, warn_unused_head
from headrace.engines.tasks import known_tasks, task_named
from headrace.errors import ConfigError, EngineError, HeadraceError, StoppedEarly, UnknownOptionError, nearest, text_of
from headrace.models.names import remote_model
from headrace.options import RESERVED, declared
from headrace.plugins import OWN, known, working
from headrace.plugins import load as load_plugin
from headrace.wording import shown


def engine_names(task: str) -> tuple[str, ...]:
    """The names of a task's engines, in order; those that cannot be imported come last."""
    found = {plugin.rpartition(".")[2]: plugin for plugin in known("engines") if plugin.rpartition(".")[0] == task}
    declarations = _declarations()
    order = {name: declarations[plugin].order if plugin in declarations else 1000 for name, plugin in found.items()}
    return tuple(sorted(found, key=lambda name: order[name]))


def all_names() -> tuple[str, ...]:
    """The names of the engines of all tasks. Imports nothing."""
    return tuple(dict.fromkeys(plugin.rpartition(".")[2] for plugin in known("engines")))


def declared_engines(task: str | None = None) -> tuple[type[EngineOptions], ...]:
    """The engines of a task, the default first; None for those of all tasks. Without those that cannot be imported."""
    tasks = known_tasks() if task is None else (task,)
    found = [kind for kind in _declarations().values() if kind.task in tasks]
    return tuple(sorted(found, key=lambda kind: (tasks.index(kind.task), kind.order)))


def _declarations() -> dict[str, type[EngineOptions]]:
    every = working("engines", type)
    return {name: kind for name, kind in every.items() if _is_declaration(kind, name) and not _taken(kind, name)}


def options_by_task() -> dict[str, dict[str, tuple[str, ...]]]:
    """The options of each task's engines, the default first; without those that take another program's."""
    found: dict[str, dict[str, tuple[str, ...]]] = {task: {} for task in known_tasks()}
    for kind in declared_engines():
        if kind.others is None:
            found[kind.task][kind.engine] = kind.names() or ()
    return found


def is_custom(engine: object) -> bool:
    """Whether it is a custom engine: `module:name`, a function or another object."""
    return engine is not None and (not isinstance(engine, str) or ":" in engine)


def implied_engine(options: Iterable[str]) -> str | None:
    """The engine that an option chooses where none is named."""
    given = list(options)
    implied = {kind.implied_by: kind.engine for kind in (declared_engines() if given else ()) if kind.implied_by}
    return next((implied[option] for option in given if option in implied), None)


def leading_engine(task: str, options: Iterable[str]) -> str | None:
    """The engine that is the task's default on this machine's GPU; None for the usual one, or without a GPU.

    It must be installed, and take all of these options.
    """
    given = set(options)
    for kind in declared_engines(task):
        if not kind.leads_on_gpu or kind.library is None or not given <= set(kind.names() or ()):
            continue
        if PathFinder.find_spec(kind.library) is not None and cuda_devices():
            return kind.engine
    return None


def is_remote(engine: object) -> bool:
    """Whether the engine of this name asks models on other servers, whatever the task."""
    named = engine is not None and not is_custom(engine)  # the others need no import of all engines' options
    return named and any(kind.remote and kind.engine == engine for kind in declared_engines())


def holds_forms(task: str, engine: object) -> bool:
    """Whether the engine holds answers to a form with llguidance; None stands for the task's own engine."""
    name = _default_engine(task) if engine is None else engine
    return any(kind.holds_forms and kind.engine == name for kind in declared_engines(task))


def default_model(task: str, engine: object) -> str | None:
    """The model that an engine has where none is named; None if it has none.

    A custom engine, and one that asks other servers, goes by the task's.
    """
    kind = engine_named(task, engine)
    if kind is not None and not kind.remote:
        return kind.default_model
    return next((one.default_model for one in declared_engines(task) if one.default_model is not None), None)


def path_options() -> frozenset[str]:
    """The names of options that may be a file or folder."""
    return frozenset(
        one.name for kind in declared_engines() for one in declared(kind) if Path in (one.kind, *get_args(one.kind))
    )


def check_options(task: str, engine: object, options: Mapping[str, object], settings: Iterable[str] = ()) -> None:
    """Check that the task, the engine and its options exist, without importing the engine's dependencies.

    Args:
        settings: other names to suggest for an unknown option.

    Raises:
        ConfigError: one of them does not exist.
    """
    if (kind := engine_named(task, engine)) is not None:
        _made(kind, engine, None, options, settings)


def check_model(task: str, model: str | Path | None, engine: object) -> None:
    """Check that the model's folder exists and fits the task, without importing the engine's dependencies.

    Raises:
        ConfigError: it does not.
    """
    if (kind := engine_named(task, engine)) is not None:
        folder_of(task, model, engine)
        _check_kind(model, kind)


def folder_of(task: str, model: str | Path | None, engine: object) -> Path | None:
    """The folder of the model that the engine would load; None if the model is not a local folder.

    Raises:
        ConfigError: the folder does not exist, or no model is named.
    """
    kind = engine_named(task, engine)
    if kind is None or kind.weights is None or is_downloaded(task, model, engine):
        return None
    _check_named(model, kind)
    return find_folder(kind.default_model if model is None else model, kind.weights)


def is_downloaded(task: str, model: str | Path | None, engine: object) -> bool:
    """Whether the model must be downloaded: it is neither a local folder nor an included model.

    The model of a custom engine and of a server elsewhere is a name of their own.

    Raises:
        ConfigError: the task or engine does not exist, or the name has a wrong form.
    """
    kind = engine_named(task, engine)
    if kind is None or kind.weights is None or model is None or is_local(model):
        return False
    return bool(remote_model(str(model)))


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
        EngineError: the model's files cannot be loaded, or what loads them raised.
    """
    kind = engine_named(task, engine)
    if kind is not None:
        _check_named(model, kind)
        _check_kind(model, kind)  # before imports that take seconds
        if kind.weights is not None:
            warn_unused_head(task, model)
    try:
        return load(engine, model, options) if kind is None else _made(kind, engine, model, options).load()
    except UnknownOptionError as error:
        _refuse_second_choice("engine", error.option)
        raise
    except (HeadraceError, OSError, KeyboardInterrupt, StoppedEarly):
        raise
    except BaseException as error:  # the border to models, libraries and users' factories
        words = " ".join(text_of(error).split())
        raise EngineError(f"the engine cannot be loaded: {type(error).__name__}: {words}") from error


def engine_named(task: str, engine: object) -> type[EngineOptions] | None:
    """The declaration of the engine with that name; None for a custom engine.

    Raises:
        ConfigError: no such task or engine, or the package that registers it is broken.
    """
    task_named(task)
    if is_custom(engine):
        return None
    name = f"{task}.{engine or _default_engine(task)}"
    if name not in known("engines"):
        raise ConfigError(
            f"task {task!r} has no engine {engine!r}; known: {', '.join(engine_names(task))}, or module:name for a "
            "custom engine"
        )
    return declaration(name)


def declaration(name: str) -> type[EngineOptions]:
    """The engine that is registered as `TASK.ENGINE`.

    Raises:
        ConfigError: there is none, or the package that registers it is broken.
    """
    found = load_plugin("engines", name, object)
    if _is_declaration(found, name):
        if taken := _taken(found, name):
            raise ConfigError(
                f"{known('engines')[name]} has the option {taken[0]!r}, which is a setting of jobs or servers: its "
                "package must give it another name"
            )
        return found
    raise ConfigError(
        f"{known('engines')[name]} must be a class of EngineOptions with that task and name, not {shown(found)}"
    )


def _is_declaration(found: object, name: str) -> TypeGuard[type[EngineOptions]]:
    return isinstance(found, type) and issubclass(found, EngineOptions) and f"{found.task}.{found.engine}" == name


def _taken(kind: type[EngineOptions], name: str) -> list[str]:
    """The options of another package's engine whose names are taken."""
    return [] if known("engines")[name].package == OWN else [one for one in kind.names() or () if one in RESERVED]


def _default_engine(task: str) -> str:
    for name in engine_names(task):
        plugin = known("engines")[f"{task}.{name}"]
        if plugin.package == OWN and plugin.problem is not None:
            return name  # loading it says why: no other engine takes its place
    kinds = declared_engines(task)
    default = next((kind.engine for kind in kinds if kind.implied_by is None), None)
    if default is None:
        working_ones = {kind.engine for kind in kinds}
        default = next((one for one in engine_names(task) if one not in working_ones), None)  # loading it says why
    if default is None:
        ways = ["``engine=MODULE:NAME``", *(f"``{kind.implied_by}``" for kind in kinds if kind.implied_by is not None)]
        raise ConfigError(f"task {task} needs an engine: set {' or '.join(ways)}")
    return default


def _made(
    kind: type[EngineOptions],
    engine: object,
    model: str | Path | None,
    options: Mapping[str, object],
    settings: Iterable[str] = (),
) -> EngineOptions:
    """The engine's options as its own class, checked as far as can be without the model.

    Raises:
        ConfigError: an option is unknown, or missing, or cannot be used.
    """
    names = kind.names()
    unknown = None if names is None else next((name for name in options if name not in names), None)
    if names is not None and unknown is not None:
        if kind.implied_by in options:
            _refuse_second_choice(kind.implied_by, unknown)
        owners = tuple(_owners(unknown).items())
        raise UnknownOptionError(
            unknown, kind.task, None if engine is None else str(engine), names, owners, tuple(settings)
        )
    splits = options.get("on_too_long") == "split"
    if splits and not kind.splits:
        raise ConfigError(f"``on_too_long`` is 'split', which {_who_splits()}; use 'error', or another engine")
    made = kind.of(model, options)
    made.check()
    for name in () if splits else ("chunk_overlap", "chunk_join"):
        if options.get(name) is not None:
            raise ConfigError(f"``{name}`` is {options[name]!r}, but no text is split: set ``on_too_long=split``")
    return made


def _refuse_second_choice(first: str | None, option: str) -> None:
    """Raises ConfigError: an option that an engine does not have chooses another one."""
    if implied_engine([option]) is not None:
        raise ConfigError(f"``{first}`` and ``{option}`` choose different engines: give one of them")


def _check_named(model: str | Path | None, kind: type[EngineOptions]) -> None:
    if model is None and kind.default_model is None and kind.weights is not None:
        own = task_named(kind.task).included if kind.weights == WEIGHTS else None
        included = "" if own is None else f", or {own}, which is included"
        raise ConfigError(f"task {kind.task!r} has no default model; set one: ``model=FOLDER`` or org/name{included}")


def _check_kind(model: str | Path | None, kind: type[EngineOptions]) -> None:
    if model is not None and not (kind.takes_model or kind.weights or kind.remote or kind.default_model):
        raise ConfigError(
            f"``model`` is {str(model)!r}, and engine {kind.engine!r} of task {kind.task!r} has no models; leave it out"
        )
    if kind.weights is not None:
        check_kind(kind.task, model)


def _who_splits() -> str:
    """ "the engines a and b have for the tasks c and d, and a and e for f"."""
    by_task: dict[str, list[str]] = {}
    for kind in declared_engines():
        if kind.splits:
            by_task.setdefault(kind.task, []).append(kind.engine)
    by_engines: dict[str, list[str]] = {}
    for task, engines in by_task.items():
        by_engines.setdefault(_listed(engines), []).append(task)
    first, *others = by_engines.items()
    more = "".join(f", and {who} for {_listed(where)}" for who, where in others)
    return f"the engines {first[0]} have for the tasks {_listed(first[1])}{more}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _owners(option: str) -> dict[str, str]:
    """The engines that have `option`, each with its first task."""
    owners: dict[str, str] = {}
    for kind in declared_engines():
        if option in (kind.names() or [one.name for one in declared(kind)]):
            owners.setdefault(kind.engine, kind.task)
    return owners
