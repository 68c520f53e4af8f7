"""Flags of an engine, shared by all commands. Unknown flags become options of the engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.cli.flags import Command, Given, given_twice, option_of
from headrace.engines.choosing.config import EngineConfig, merged_options
from headrace.engines.choosing.registry import declared_engines, options_by_task
from headrace.errors import ConfigError, UnknownOptionError, nearest
from headrace.options import declared
from headrace.wording import flag_of, spelled, spoken

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that passes unknown flags to the engine."""


def config_of(given: Given[Any], arguments: Sequence[str], meant: str = "") -> EngineConfig:
    """The engine configuration that the flags describe, for one model.

    Args:
        arguments: flags that the command does not know: options of the engine.
        meant: suggestion for a stray argument, with {} in its place.

    Raises:
        ConfigError: an argument is not a flag, or a flag is given twice.
    """
    if len(given.values["model"] or ()) > 1:
        raise ConfigError("``model`` is given twice; give it once")
    options = merged_options(given.engine_options(), engine_options(arguments, meant))
    return Given(EngineConfig, given.values).build(engine_options=options)


class EngineCommand(Command):
    """A command that takes flags of engines."""

    def more_variables(self) -> Mapping[str, str]:
        names = {name for engines in options_by_task().values() for known in engines.values() for name in known}
        return {f"HEADRACE_{name.upper()}": name for name in names if name not in self.settings}

    def flags_for(self, typed: Mapping[str, object]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Those of the engine that `--task` and `--engine` name."""
        task, engine = typed.get("task"), typed.get("engine")
        for kind in declared_engines() if task or engine else ():
            if task in (None, kind.task) and engine in (None, kind.engine):
                rows = [(one.flags[0], spelled(one.option.help, "flags")) for one in declared(kind)]
                yield f"Flags of task {kind.task} by engine {kind.engine}:", rows
                return

    def all_flags(self) -> str:
        return more_flags({flag for parameter in self.params for flag in parameter.opts})


def more_flags(own: Collection[str]) -> str:
    """The flags of engines besides `own`, as paragraphs: by task, and by engine where only that one has them."""
    tasks = options_by_task()
    engines: dict[str, set[str]] = {}
    for known in tasks.values():
        for engine, options in known.items():
            for option in options:
                engines.setdefault(option, set()).add(engine)
    groups: dict[str, list[str]] = {}
    for task, known in tasks.items():
        default = next(iter(known), None)
        for engine, options in known.items():
            for option in options:
                alone = engine != default and engines[option] == {engine}
                groups.setdefault(f"--engine {engine}" if alone else task, []).append(flag_of(option))
    together: dict[tuple[str, ...], list[str]] = {}
    for group, flags in groups.items():
        if left := tuple(flag for flag in dict.fromkeys(flags) if flag not in own):
            together.setdefault(left, []).append(group)
    lines = [f"{', '.join(names)}: {' '.join(left)}" for left, names in together.items()]
    lines.sort(key=lambda line: line.startswith("--engine"))
    return "\n\n".join(["Flags of a task or an engine (docs/engines.md):", *lines, "--engine vllm: those of vLLM"])


def changed(config: EngineConfig, given: EngineConfig) -> EngineConfig:
    """A job's configuration, overridden by the values given on the command line."""
    new = {name: getattr(given, name) for name in given.changed() if name != "engine_options"}
    if given.model is not None:
        config = replace(config, commit=None)  # of the job's model
    return replace(config, engine_options={**config.engine_options, **given.engine_options}, **new)


def engine_options(arguments: Sequence[str], meant: str = "") -> dict[str, object]:
    """`--max-num-seqs 64 --enforce-eager --no-enable-prefix-caching` as options of an engine.

    A value that is valid JSON (a number, list or object) is parsed; any other is text.

    Raises:
        ConfigError: an argument is not a flag, or a flag is given twice.
    """
    options: dict[str, object] = {}
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if not flag.startswith("--") or flag == "--":
            hint = f"; did you mean {meant.format(flag)}"
            raise ConfigError(
                f"unexpected argument {flag!r}: flags begin with --, and a flag takes one value"
                + (hint if meant else "")
            )
        name, equals, text = flag.removeprefix("--").partition("=")
        value: object
        if equals:
            value = _value(text)
        elif left and not left[0].startswith("--"):
            value = _value(left.pop(0))
        else:
            value = not name.startswith("no-")
            name = name.removeprefix("no-")
        name = name.replace("-", "_")
        if name in options:
            every = (one for kind in declared_engines() for one in declared(kind) if one.name == name)
            raise ConfigError(given_twice(flag, every))
        options[name] = value
    return options


def as_typed(arguments: Sequence[str], option: str) -> str:
    """The flag by which `option` was given, such as `--no-eager` for `eager`; else how messages name it."""
    typed = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    return next((flag for flag in typed if option_of(flag) == option), spelled(f"``{option}``"))


def unknown_flag(error: UnknownOptionError, arguments: Sequence[str], flags: Sequence[str]) -> str:
    """What to say of an unknown option that was given as a flag, a variable or a key of a file."""
    if spoken() == "keys":
        return str(error)
    typed = as_typed(arguments, error.option)
    if not typed.startswith("--"):
        dash = "-" if "-" in typed.rpartition(": ")[2] else "_"
        return error.told(typed, str, [flag.lstrip("-").replace("-", dash) for flag in flags if flag.startswith("--")])
    is_close = nearest(flag_of(error.option), map(flag_of, error.known))
    beside = "" if is_close else ", and those of --help"
    return error.told(typed, flag_of, [flag for flag in flags if flag != typed], beside)


def engine_and_model(config: EngineConfig) -> str:
    """What is loaded, for people."""
    declared = config.declaration
    default = "the engine" if declared is None or declared.default_model is None else "the default model"
    return " ".join(str(name) for name in (config.engine, config.label) if name) or default


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
