"""Checks settings against the types and ranges that their dataclass declares, and reads them from text."""

from __future__ import annotations

import collections.abc
import functools
import math
import numbers
import re
import types
from collections.abc import Hashable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError
from headrace.options import Declared, Option, declared
from headrace.wording import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    Path: "a path",
    type(None): "None",
}


def check_types(settings: DataclassInstance, *leave_out: str) -> None:
    """Check that every field of a dataclass has a value of its type, and a setting one in its range.

    Args:
        leave_out: fields to skip.

    Raises:
        ConfigError: a value has another type, or is out of range; the message names the field, the value and what it
            takes.
    """
    kind = settings.__class__
    hints, options = _hints(kind), {one.name: one.option for one in declared(kind)}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name not in leave_out and (wanted := _wanted(value, hints[field.name], options.get(field.name))):
            raise ConfigError(f"``{field.name}`` is {shown(value)}; it must be {wanted}")


def read(one: Declared, text: str) -> object:
    """The value of a setting that is given as text, such as a flag's.

    Raises:
        ConfigError: it has none; the message names the setting, the text and what it takes.
    """
    try:
        value = text if one.option.parse is None else one.option.parse(text)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"``{one.name}``: {error}") from error
    kinds = parts(one.kind)
    if one.option.parse is None:
        value = next((made for kind in kinds if (made := _made(kind, text)) is not None), text)
    if wanted := _wanted(value, one.kind, one.option):
        said = shown(value if _fits(value, one.kind) else text)
        raise ConfigError(f"``{one.name}`` is {said}; it must be {wanted.removesuffix(' or None')}")
    return value


def parts(hint: object) -> tuple[object, ...]:
    """The types of a union; a type that is none alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _made(kind: object, text: str) -> object:
    """A text as a value of this type; None if it is none."""
    if kind is bool:
        return _SWITCHES.get(text.strip().lower())
    if kind is int or kind is float:
        try:
            number = int(text) if kind is int else float(text)
        except ValueError:
            return None
        return number
    return Path(text) if kind is Path else None


def _wanted(value: object, hint: object, option: Option | None) -> str:
    """What a setting takes, if it does not take this value; else empty."""
    if not _fits(value, hint):
        return _words(hint)
    if option is None or not isinstance(value, int | float):
        return ""
    low, high, above = option.minimum, option.maximum, option.above
    if low is not None and high is None:
        return "" if value >= low else f">= {low:g}"
    if low is not None and high is not None:
        return "" if low <= value <= high else f"between {low:g} and {high:g}"
    if above is not None and high is not None:
        return "" if above < value <= high else f"a fraction > {above:g} and <= {high:g}"
    if above is not None:
        return "" if above < value < math.inf else f"a finite number > {above:g}"
    return "" if high is None or value <= high else f"<= {high:g}"


@functools.cache
def _hints(kind: Hashable) -> dict[str, object]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is collections.abc.Callable:
        return callable(value)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a tuple, each item {_words(arguments[0])}"
        return f"a tuple of {' and '.join(map(_words, arguments))}"
    if origin is collections.abc.Callable:
        return "a function"
    found = origin or hint
    return _WORDS.get(found, f"a {found.__name__}")


def comma_separated(text: str) -> tuple[str, ...]:
    """The words of a text such as a,b, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def number_or_auto(text: str) -> int | None:
    """A number; None for `auto`.

    Raises:
        ValueError: it is neither.
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither a number nor auto")
    return int(text)


def milliseconds(text: str) -> float:
    """Milliseconds as seconds.

    Raises:
        ValueError: it is not a number.
    """
    try:
        return float(text) / 1000
    except ValueError:
        raise ValueError(f"{text!r} is not a number of milliseconds") from None


def parse_size(text: str) -> int:
    """A size such as 512MB in bytes; 1 MB is 1,000,000 bytes, 1 MiB 1,048,576.

    Raises:
        ValueError: it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]i?)?b?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 512MB or 2GB, for example")
    number, unit = found.groups(default="")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(number) * base ** (" kmgt".index(unit[0]) if unit else 0))
