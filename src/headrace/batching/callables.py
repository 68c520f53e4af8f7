"""Checks on user functions: which return a coroutine or generator instead of a result."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeAlias

from headrace.errors import BadResultError, ConfigError

ProcessFn: TypeAlias = Callable[[Any], Any]
"""`(list of records, or columns of records joined) -> results`, or an awaitable of them."""

PROMISES = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def is_async(fn: Callable[..., object]) -> bool:
    """Whether `fn` is an `async def`, a partial of one, or an object with an async `__call__`."""
    return _any_is(inspect.iscoroutinefunction, fn)


def plain_function(name: str, fn: object, way_out: str = "") -> None:
    """Check that the parameter `name` is a plain function, which does its work when called.

    `way_out` is the end of the message about an `async def`.

    Raises:
        ConfigError: it is an `async def` or a generator function, which would never be awaited or iterated.
    """
    if fn is None:
        return
    for is_one, kind, end in (
        (inspect.iscoroutinefunction, "an async function", way_out),
        (inspect.isasyncgenfunction, "an async generator function", ""),
        (inspect.isgeneratorfunction, "a generator function", "; return a list instead of yielding"),
    ):
        if _any_is(is_one, fn):
            raise ConfigError(f"{name} is {kind}: it must be a plain function that returns its result{end}")


def unfinished(name: str, result: object) -> BadResultError | None:
    """The error for a result that is an unused coroutine or generator; None for any other result."""
    if not isinstance(result, PROMISES):
        return None
    if isinstance(result, types.CoroutineType):
        result.close()  # otherwise Python warns that it was never awaited
    return BadResultError(
        f"{name} returned a {type(result).__name__}: it must be a plain function that returns its result"
    )


def _any_is(is_one: Callable[[object], bool], fn: object) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return is_one(fn) or is_one(getattr(fn, "__call__", None))  # noqa: B004
