"""Declare a setting as a field of a frozen dataclass; flags, keywords, checks and docs are read from it.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Limits:
        max_attempts: int = option(3, "Maximum attempts for a record that fails for a transient reason.", minimum=1)

The field's name is the keyword in Python and the key in a file; its flag is `--max-attempts` unless `flags` names
another; its environment variable is `HEADRACE_MAX_ATTEMPTS`, after the flag. A field that is such a dataclass itself
belongs to the settings: its own are given beside the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a setting's declaration says beside its name, type and default."""

    help: str
    """One or two sentences for `--help`, docs and editors; settings in it are marked as `headrace.wording` has it."""
    flags: tuple[str, ...] | None = None
    """Its flags, the first of which messages name; None for `--name-with-dashes`, empty if it has none."""
    panel: str | None = None
    """The heading of its group in `--help`; None for that of its class (`panel`)."""
    brief: str | None = None
    """What `--help` of a command with many flags says of it, briefly; None if only `--help-all` does."""
    metavar: str | None = None
    """What stands for the value in `--help`."""
    parse: Callable[[str], object] | None = None
    """Makes the value of a text, wherever it is given; None if the type says how. Raises ValueError."""
    scale: float = 1
    """What its flag's number is divided by: 1000 for milliseconds of a setting in seconds."""
    shown: str | None = None
    """Its default as `--help` shows it, which `parse` can read; None if the default itself can be shown."""
    repeatable: bool = False
    """Whether its flag may be given several times although it takes one value: the command says what that means."""
    several: bool = False
    """Whether its flag may be given several times, for a setting that takes one value or several."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """The value must be greater than this."""
    changes_output: bool = False
    """Whether it is part of a job's fingerprint: another value may give other outputs."""
    per_step: bool = False
    """Whether each step of several has its own, so that it is a key in a file of steps."""


@dataclass(frozen=True, slots=True)
class SettingName:
    """How messages name a setting."""

    keyword: str
    flag: str
    is_key: bool
    """Whether files of settings have it as a key."""
    changes_output: bool


RESERVED: set[str] = set()
"""The settings of jobs and servers, whose names no option of an engine may have."""
NAMES: dict[str, SettingName] = {}
"""All settings that `argument_types.named` registered, by keyword and by the other names of their flags."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One setting: its declaration with the name, type and default of its field."""

    name: str
    kind: Any
    """Its type, such as `int | None`."""
    default: object
    """`dataclasses.MISSING` if it must be given."""
    option: Option

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags, such as `("--dedupe/--no-dedupe",)`; empty if it has none. What is on by default can be turned
        off."""
        if self.option.flags is not None:
            return self.option.flags
        name = self.name.replace("_", "-")
        flags = (name, f"no-{name}") if self.default is True else (name,)
        return ("/".join(f"--{one}" for one in flags),)

    @property
    def variables(self) -> tuple[str, ...]:
        """Its environment variables, one for each long flag."""
        long = [flag.partition("/")[0].strip("-") for flag in self.flags if flag.startswith("--")]
        return tuple(f"HEADRACE_{name.replace('-', '_').upper()}" for name in long)


def option(default: object, help: str, **more: Any) -> Any:  # noqa: A002 - as in argparse and typer
    """A field of a dataclass that is a setting.

    Args:
        default: its value if it is not given; `dataclasses.MISSING` if it must be, a function without parameters
            (such as `dict`) to make one for each object.
    """
    metadata = {"option": Option(help=help, **more)}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared(kind: type) -> tuple[Declared, ...]:
    """The settings that a dataclass declares, in order; fields without a declaration are left out."""
    return _declared(kind)


@functools.cache
def _declared(kind: type) -> tuple[Declared, ...]:
    hints = get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        if (one := field.metadata.get("option")) is None:
            continue
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        one = dataclasses.replace(one, panel=one.panel or getattr(kind, "panel", None))
        found.append(Declared(field.name, hints[field.name], made, one))
    return tuple(found)


def all_declared(kind: type) -> tuple[Declared, ...]:
    """The settings that a dataclass declares, and those of the dataclasses that are its fields, in order."""
    own = {one.name: one for one in declared(kind)}
    inner = groups(kind)
    found: list[Declared] = []
    for field in dataclasses.fields(kind):
        if field.name in own:
            found.append(own[field.name])
        elif field.name in inner:
            found += all_declared(inner[field.name])
    return tuple(found)


def groups(kind: type) -> dict[str, type]:
    """The fields that are dataclasses with settings."""
    return _groups(kind)


@functools.cache
def _groups(kind: type) -> dict[str, type]:
    hints = get_type_hints(kind)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(kind)
        if "option" not in field.metadata
        and dataclasses.is_dataclass(hints[field.name])
        and all_declared(hints[field.name])
    }


def split(kind: type, given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """What is given for a dataclass of settings, its fields and what its groups declare; and the rest."""
    names = {field.name for field in dataclasses.fields(kind)} | {one.name for one in all_declared(kind)}
    names -= {"config"} | {
        one.name for name, group in groups(kind).items() if name == "config" for one in all_declared(group)
    }
    own = {name: value for name, value in given.items() if name in names}
    return own, {name: value for name, value in given.items() if name not in names}
