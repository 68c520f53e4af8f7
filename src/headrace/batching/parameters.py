"""Checks of constructor and call parameters: an error names the parameter, its value and the allowed range."""

from __future__ import annotations

import math
from typing import Any

from headrace.errors import ConfigError


def whole(name: str, value: Any, minimum: int) -> int:
    """`value` if it is an int >= `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}: it must be an int >= {minimum}")
    return value


def number(name: str, value: Any, *, above: float | None = None, minimum: float | None = None) -> float:
    """`value` if it is a finite number > `above` or >= `minimum`."""
    allowed = f"> {above}" if above is not None else f">= {minimum}"
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (above is not None and value <= above) or (minimum is not None and value < minimum):
        raise ConfigError(f"{name} is {value!r}: it must be a finite number {allowed}")
    return value  # type: ignore[no-any-return]


def optional(name: str, value: Any, *, above: float) -> float | None:
    """`value` if it is None or a finite number > `above`."""
    if value is None:
        return None
    try:
        return number(name, value, above=above)
    except ConfigError:
        raise ConfigError(f"{name} is {value!r}: it must be None or a finite number > {above}") from None


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    """`value` if it is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, allowed))}")
    return value


def function(name: str, value: Any, *, needed: bool) -> Any:
    """`value` if it can be called, or is None where that is allowed."""
    if not callable(value) and (needed or value is not None):
        raise ConfigError(f"{name} is {value!r}: it must be a function{'' if needed else ' or None'}")
    return value
