"""Functions that users give: which of them only return a promise of their work, to be awaited or iterated."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from headrace.errors import BadResultError, ConfigError

PROMISES = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is an `async def`, a partial of one, or an object with an async `__call__`."""
    return _any_is(inspect.iscoroutinefunction, fn)


def plain_function(name: str, fn: Callable[..., Any] | None) -> None:
    """See that the parameter `name` is no function whose call alone does nothing.

    Raises:
        ConfigError: it is an `async def` or a generator function, which nobody would await or iterate.
    """
    if fn is None:
        return
    for is_one, kind in (
        (inspect.iscoroutinefunction, "an async function"),
        (inspect.isasyncgenfunction, "an async generator function"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if _any_is(is_one, fn):
            raise ConfigError(f"{name} is {kind}: it must be a plain function, which returns its result")


def unfinished(name: str, result: Any) -> BadResultError | None:
    """The error of a function whose result is a coroutine or a generator that nobody will run; None for any other."""
    if not isinstance(result, PROMISES):
        return None
    if isinstance(result, types.CoroutineType):
        result.close()  # or Python warns that it was never awaited
    return BadResultError(
        f"{name} returned a {type(result).__name__}: it must be a plain function, which returns its result"
    )


def _any_is(is_one: Callable[[Any], bool], fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return is_one(fn) or is_one(getattr(fn, "__call__", None))  # noqa: B004
