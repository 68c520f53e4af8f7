"""Groups of flags: dataclasses that commands take as parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ParameterInfo

from headrace.errors import ConfigError

ENGINE_PANEL = "Engine"
ACCESS_PANEL = "Access"
FILES_PANEL = "Input and output"
RECORDS_PANEL = "Records"
_ONCE = frozenset({ENGINE_PANEL, ACCESS_PANEL, FILES_PANEL, RECORDS_PANEL})
"""Panels of flags that are refused if given twice: one would silently not count, such as an input or a file of keys."""


class FlagGroup:
    """Base of a dataclass whose fields are flags: `name: Annotated[type, typer.Option(...)] = default`."""

    panel: ClassVar[str]
    """The heading of the group in `--help`."""


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Expand each `FlagGroup` parameter of a command into one parameter per field."""
    hints = get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[object], tuple[str, ...]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and issubclass(kind, FlagGroup):
            flags = _flags(kind)
            groups[parameter.name] = kind, tuple(flag.name for flag in flags)
            plain += flags
        else:
            plain.append(parameter.replace(annotation=kind))
    plain = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in plain]

    @functools.wraps(command)
    def expanded(**given: object) -> None:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields})
        command(**given)

    expanded.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]  # what typer reads
    expanded.__annotations__ = {one.name: one.annotation for one in plain}
    return expanded


def _flags(group: type[FlagGroup]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    flags: list[inspect.Parameter] = []
    for field in dataclasses.fields(group):  # type: ignore[arg-type]  # each is a dataclass
        required = field.default is dataclasses.MISSING
        default = inspect.Parameter.empty if required else field.default
        kind = _in_panel(hints[field.name], group.panel)
        flags.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return flags


def _in_panel(hint: object, panel: str) -> object:
    assert get_origin(hint) is Annotated, "a flag is Annotated[type, typer.Option(...)]"
    kind, *more = get_args(hint)
    shown = [copy(one) for one in more]
    for one in shown:
        if isinstance(one, ParameterInfo):
            one.rich_help_panel = panel
    return Annotated[kind, *shown]


def comma_separated(text: str | None) -> tuple[str, ...]:
    """The words of a flag such as a,b, each once."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def positive_numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """The numbers of a flag such as 8,32, each once, in ascending order.

    Raises:
        ConfigError: one of them is not a whole number above 0.
    """
    words = comma_separated(text)
    for word in words:
        if not (word.isascii() and word.isdecimal() and int(word) > 0):
            raise ConfigError(f"{flag} {text}: {word!r} is not a whole number above 0")
    return tuple(sorted(map(int, words)))


class Command(TyperCommand):
    """A command that refuses a flag of one of these panels given twice; for other flags the last value counts.

    Messages about values are without Pydantic's own words, which newer versions of typer pass on.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            BadParameter: a value is not valid.
            Exit: a flag that counts once is given twice.
        """
        try:
            left = super().parse_args(ctx, list(args))  # reports other errors first
        except typer.BadParameter as error:
            error.message = _in_plain_words(error)
            raise
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, times in Counter(order).items():
            once = getattr(parameter, "rich_help_panel", None) in _ONCE
            if times > 1 and once and not getattr(parameter, "multiple", False):
                print(f"headrace: {parameter.opts[0]} is given twice; give it once", file=sys.stderr)
                raise typer.Exit(2)
        return left


_KINDS = {"int_parsing": "integer", "int_from_float": "integer", "float_parsing": "number"}


def _in_plain_words(error: typer.BadParameter) -> str:
    """The message of a value that typer has refused, where Pydantic refused it for typer."""
    message = error.message.removeprefix("Value error, ")
    details = getattr(error.__cause__, "errors", None)
    first: dict[str, Any] = details()[0] if callable(details) else {}
    if kind := _KINDS.get(first.get("type", "")):
        return f"{first['input']!r} is not a valid {kind}"
    if "input" not in first:
        return message
    return message.replace("Input should be", f"{first['input']!r} must be", 1)
