"""Read JSON into frozen dataclasses, and refuse what their annotations do not allow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.wording import shown

T = TypeVar("T")


def parse_object(kind: type[T], content: object) -> T:
    """The dataclass in parsed JSON. Fields with a default may be missing. Numbers are finite and at least 0.

    Raises:
        ValueError: a number or a text is not valid.
        TypeError: a field is missing, unknown or of another type.
    """
    if not isinstance(content, dict):
        raise TypeError(f"it has {shown(content, 40)} where {kind.__name__} should be")
    hints, required = _fields(kind)  # type: ignore[arg-type]  # a class is hashable
    if wrong := (required - content.keys()) | (content.keys() - hints.keys()):
        raise TypeError(f"{kind.__name__} lacks, or does not know, the field {shown(min(wrong), 40)}")
    return kind(**{name: _parse(hints[name], value, name) for name, value in content.items()})


@functools.cache
def _fields(kind: type) -> tuple[dict[str, object], frozenset[str]]:
    """The types of a dataclass's fields by name, and the names of those without a default."""
    every, hints = dataclasses.fields(kind), get_type_hints(kind)
    optional = {
        one.name
        for one in every
        if one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
    }
    return {one.name: hints[one.name] for one in every}, frozenset({one.name for one in every} - optional)


def _parse(kind: object, value: object, name: str) -> object:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        [kind] = (one for one in args if one is not NoneType)
        return None if value is None else _parse(kind, value, name)
    if origin is Literal:
        if value not in args or type(value) not in map(type, args):
            raise ValueError(f"its {name} is {shown(value, 40)}")
        return value
    if origin in (list, tuple, Sequence):
        return _parse_list(origin, args, value, name)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _parse_mapping(args, value, name)
    if dataclasses.is_dataclass(kind):
        return parse_object(kind, value) if isinstance(kind, type) else value
    return _parse_plain(kind, value)


def _parse_plain(kind: object, value: object) -> object:
    if kind in (int, float):
        check_number(value)
    elif kind is str and type(value) is not str:
        raise ValueError("a text or a cause is not valid")
    elif kind is bool and type(value) is not bool:
        raise ValueError(f"it has {shown(value, 40)} where true or false should be")
    return value


def check_number(value: object) -> None:
    """Raises ValueError if it is not a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"a number is not valid: {shown(value, 40)}")


def _parse_list(origin: object, args: tuple[object, ...], value: object, name: str) -> object:
    if not isinstance(value, list | tuple):
        raise TypeError(f"its {name} is no list: {shown(value, 40)}")
    if args[0] is float and len(args) == 1:  # the common case: many numbers
        for number in value:
            check_number(number)
        return value
    if origin is not tuple or args[-1] is Ellipsis:
        made = tuple if origin is tuple else list
        return made(_parse(args[0], one, name) for one in value)
    if len(value) != len(args):
        raise ValueError(f"its {name} has an entry that is not of {len(args)} values: {shown(value, 40)}")
    return tuple(_parse(kind, one, name) for kind, one in zip(args, value, strict=True))


def _parse_mapping(args: tuple[object, ...], value: object, name: str) -> object:
    if not isinstance(value, dict):
        raise TypeError(f"its {name} is no mapping: {shown(value, 40)}")
    keys, values = args
    if get_origin(keys) is Literal and not value.keys() <= set(get_args(keys)):
        raise ValueError(f"a text or a cause is not valid: {shown(sorted(value.keys() - set(get_args(keys))), 40)}")
    return {key: _parse(values, one, name) for key, one in value.items()}
