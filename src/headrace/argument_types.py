"""Checks settings against the declared types of their dataclass, and reads sizes."""

from __future__ import annotations

import collections.abc
import functools
import numbers
import re
import types
from collections.abc import Hashable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError
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


def check_types(settings: DataclassInstance, *leave_out: str, **names: str) -> None:
    """Check that every field of a dataclass has a value of its declared type.

    Args:
        leave_out: fields to skip.
        names: a field's name in messages, if users know it by another name.

    Raises:
        ConfigError: a value has another type; the message names the field, the value and the expected type.
    """
    hints = _hints(settings.__class__)
    for field in fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if field.name not in leave_out and not _fits(value, hint):
            raise ConfigError(f"{names.get(field.name, field.name)} is {shown(value)}; it must be {_words(hint)}")


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
