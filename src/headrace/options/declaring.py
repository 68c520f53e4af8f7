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
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a setting's declaration says beside its name, type and default."""

    help: str
    """One or two sentences for `--help`, docs and editors; settings in it are marked as `headrace.wording` has it."""
    flags: tuple[str, ...] | None = None
    """Its flags, the first of which messages name; None for `--name-with-dashes`, empty if it has none."""
    panel: str | None = None
    """The heading of its group in `--help`; None for that of its class (`panel`)."""
    metavar: str | None = None
    """What stands for the value in `--help`."""
    parse: Callable[[str], object] | None = None
    """Makes the value of a text, as of a flag or environment variable; None if the type says how. Raises ValueError."""
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


NAMES: dict[str, SettingName] = {}
"""The settings that are declared `@named`, by keyword, and by what else a flag of theirs calls them."""


def named(*, keys: bool = False) -> Callable[[type[T]], type[T]]:
    """A decorator of a dataclass whose settings messages name.

    Args:
        keys: whether files of settings have all of them as keys; otherwise only those that are `per_step`.
    """

    def register(kind: type[T]) -> type[T]:
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # it is one
            one = field.metadata.get("option")
            if one is None:
                continue
            flag, *others = one.flags or (f"--{field.name.replace('_', '-')}",)
            for name in (field.name, *(other.strip("-").replace("-", "_") for other in others if other[:2] == "--")):
                shown = flag if name == field.name else f"--{name.replace('_', '-')}"
                NAMES[name] = SettingName(field.name, shown.partition("/")[0], keys or one.per_step, one.changes_output)
        return kind

    return register


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
        """Its flags, such as `("--dedupe/--no-dedupe",)`; empty if it has none."""
        return (f"--{self.name.replace('_', '-')}",) if self.option.flags is None else self.option.flags

    @property
    def variable(self) -> str:
        """Its environment variable."""
        longest = max((flag.partition("/")[0] for flag in self.flags), key=len)
        long = next((flag.partition("/")[0] for flag in self.flags if flag.startswith("--")), longest)
        return f"HEADRACE_{long.strip('-').replace('-', '_').upper()}"


def option(default: object, help: str, **more: Any) -> Any:  # noqa: A002 - as in argparse and typer
    """A field of a dataclass that is a setting.

    Args:
        default: its value if it is not given; `dataclasses.MISSING` if it must be, a function without parameters
            (such as `dict`) to make one for each object.
        help: one or two sentences.
        more: fields of `Option`.
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
        found.append(Declared(field.name, hints[field.name], made, one))
    return tuple(found)


def all_declared(kind: type) -> tuple[Declared, ...]:
    """The settings that a dataclass declares, and those of the dataclasses that are its fields, in order."""
    own = {one.name: one for one in declared(kind)}
    groups = _groups(kind)
    found: list[Declared] = []
    for field in dataclasses.fields(kind):
        if field.name in own:
            found.append(own[field.name])
        elif field.name in groups:
            found += all_declared(groups[field.name])
    return tuple(found)


def build(kind: type[T], given: Mapping[str, object]) -> T:
    """The object of these settings, of which those of a group may be given one by one, or as its object, or both.

    A setting that is given beside the object of its group takes the place of the object's own.
    """
    left: dict[str, Any] = dict(given)
    for name, group in _groups(kind).items():
        names = [one.name for one in all_declared(group) if one.name in left]
        if not names:
            continue
        inner = {one: left.pop(one) for one in names}
        left[name] = dataclasses.replace(left[name], **inner) if left.get(name) is not None else build(group, inner)
    return kind(**left)


def _groups(kind: type) -> dict[str, type]:
    """The fields that are dataclasses with settings."""
    return _groups_of(kind)


@functools.cache
def _groups_of(kind: type) -> dict[str, type]:
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
        one.name for name, group in _groups(kind).items() if name == "config" for one in all_declared(group)
    }
    own = {name: value for name, value in given.items() if name in names}
    return own, {name: value for name, value in given.items() if name not in names}
