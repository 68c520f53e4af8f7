"""Checks settings against the types and ranges that their dataclass declares, and reads them from text."""

from __future__ import annotations

import collections.abc
import functools
import math
import numbers
import re
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError, nearest
from headrace.options import NAMES, RESERVED, Declared, Option, SettingName, all_declared, declared, groups
from headrace.wording import shown, spoken

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    Path: "a path",
    collections.abc.Mapping: 'an object such as {"name": "value"}',
    type(None): "None",
}


def named(*, keys: bool = False, of_engine: bool = False) -> Callable[[type[T]], type[T]]:
    """A decorator of a dataclass of settings: messages name them, and a text is read as that of a flag.

    Its constructor raises ConfigError for a setting that it does not know, and for one that is missing.

    Args:
        keys: whether files of settings have all of them as keys; otherwise only those that are `per_step`.
        of_engine: whether they are options of one engine; otherwise no engine may have an option of their names.
    """

    def register(kind: type[T]) -> type[T]:
        every = fields(kind)  # type: ignore[arg-type]  # it is a dataclass
        made, known = kind.__init__, [one.name for one in every if one.init]
        required = {one.name for one in every if one.init and one.default is one.default_factory is MISSING}
        options: dict[str, Option] = {one.name: one.metadata["option"] for one in every if "option" in one.metadata}

        @functools.wraps(made)
        def init(self: T, *values: object, **given: object) -> None:
            if unknown := next((name for name in given if name not in known), None):
                hint = nearest(unknown, known) or f"; known: {', '.join(known)}"
                raise ConfigError(f"{kind.__name__} has no setting {unknown!r}{hint}")
            if missing := required.difference(given, known[: len(values)]):
                raise ConfigError(f"{kind.__name__} needs ``{min(missing, key=known.index)}``")
            if any(isinstance(value, str) and name in options and options[name].parse for name, value in given.items()):
                given.update(read_texts(kind, given))
            made(self, *values, **given)

        kind.__init__ = init  # type: ignore[method-assign,assignment]
        RESERVED.update(() if of_engine else options)
        for keyword, one in options.items():
            flag, *others = one.flags or (f"--{keyword.replace('_', '-')}",)
            for name in (keyword, *(other[2:].replace("-", "_") for other in others if other[:2] == "--")):
                shown = flag if name == keyword else f"--{name.replace('_', '-')}"
                NAMES[name] = SettingName(keyword, shown.partition("/")[0], keys or one.per_step, one.changes_output)
        return kind

    return register


def read_texts(kind: type, given: Mapping[str, object]) -> dict[str, object]:
    """The values of settings that are given as texts, but are none."""
    texts = [(one, text) for one in declared(kind) if isinstance(text := given.get(one.name), str)]
    return {one.name: read(one, text) for one, text in texts if one.option.parse and not _fits(text, one.kind)}


def build(kind: type[T], given: Mapping[str, object]) -> T:
    """The object of these settings, of which those of a group may be given one by one, or as its object, or both.

    Raises:
        ConfigError: a setting is given in the object of its group and beside it.
    """
    left: dict[str, Any] = dict(given)
    for name, group in groups(kind).items():
        inner = {one.name: left.pop(one.name) for one in all_declared(group) if one.name in left}
        if inner and isinstance(left.get(name), group):
            left[name] = with_more(left[name], inner, f"``{name}``")
        elif inner and left.get(name) is None:
            left[name] = build(group, inner)
    return kind(**left)


def with_more(settings: T, beside: Mapping[str, object], what: str) -> T:
    """A copy of settings with some that are given beside them.

    Raises:
        ConfigError: one of them is given in both; the message names it, and the object as `what`.
    """
    for one in all_declared(type(settings)):
        if one.name in beside and getattr(settings, one.name, one.default) != one.default:
            raise ConfigError(f"``{one.name}`` is given twice, in {what} and beside it; give it once")
    return replace(settings, **beside)  # type: ignore[type-var]  # a dataclass


def check_types(settings: DataclassInstance, *leave_out: str) -> None:
    """Check that every field of a dataclass has a value of its type, and a setting one in its range.

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


def check_value(one: Declared, value: object) -> None:
    """Check one value as `check_types` does. Raises ConfigError: it has another type, or is out of range."""
    if wanted := _wanted(value, one.kind, one.option):
        raise ConfigError(f"``{one.name}`` is {shown(value)}; it must be {wanted}")


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
        said = text if _fits(value, one.kind) else shown(text)
        raise ConfigError(f"``{one.name}`` is {said}; it must be {wanted.removesuffix(' or None')}")
    return scaled(one, value)


def scaled(one: Declared, value: object) -> object:
    """The value of a setting from the number of its flag, whose unit may be another."""
    return value / one.option.scale if one.option.scale != 1 and isinstance(value, int | float) else value


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
    if origin is list:
        return type(value) is list and all(_fits(one, arguments[0]) for one in value)
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
    if origin is list:
        return f"a list, each item {_words(arguments[0])}"
    if origin is collections.abc.Callable:
        return "a function"
    found = origin or hint
    if found is bool and spoken() != "python":
        return "true or false"
    return _WORDS.get(found, f"a {found.__name__}")


def comma_separated(text: str) -> tuple[str, ...]:
    """The words of a text such as a,b, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def number_or_auto(text: str) -> int | None:
    """A number; None for `auto`. Raises ValueError: it is neither."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither a number nor auto")
    return int(text)


def parse_size(text: str) -> int:
    """A size such as 512MB in bytes; 1 MB is 1,000,000 bytes, 1 MiB 1,048,576. Raises ValueError: it is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]i?)?b?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 512MB or 2GB, for example")
    number, unit = found.groups(default="")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(number) * base ** (" kmgt".index(unit[0]) if unit else 0))
