"""Declare a setting as a field of a frozen dataclass; flags, keywords, checks and docs are read from it.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Limits:
        max_attempts: int = option(3, "Maximum attempts for a record that fails for a transient reason.", minimum=1)

The field's name is the keyword in Python and the key in a file; its flag is `--max-attempts` unless `flags` names
another; its environment variable is `HEADRACE_MAX_ATTEMPTS`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a setting's declaration says beside its name, type and default."""

    help: str
    """One or two sentences for `--help`, docs and editors."""
    flags: tuple[str, ...] | None = None
    """Its flags, the first of which messages name; None for `--name-with-dashes`, empty if it has none."""
    panel: str | None = None
    """The heading of its group in `--help`; None for that of its class (`panel`)."""
    metavar: str | None = None
    """What stands for the value in `--help`."""
    parse: Callable[[str], object] | None = None
    """Makes the value of a text, as of a flag or environment variable; None if the type says how. Raises ValueError."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """The value must be greater than this."""
    changes_output: bool = False
    """Whether it is part of a job's fingerprint: another value may give other outputs."""
    excludes: tuple[str, ...] = ()
    """Settings that may not be given beside it."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One setting: its declaration with the name, type and default of its field."""

    name: str
    kind: Any
    """Its type, such as `int | None`."""
    default: Any
    """`dataclasses.MISSING` if it must be given."""
    option: Option

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags; empty if it has none."""
        return (f"--{self.name.replace('_', '-')}",) if self.option.flags is None else self.option.flags


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - as in argparse and typer
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
