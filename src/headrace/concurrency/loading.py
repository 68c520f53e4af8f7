"""Loads and unloads models with functions of the user's, on their own threads."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.batching.batcher import Batcher
from headrace.concurrency.daemon_thread import on_daemon_thread
from headrace.errors import ConfigError

_NOTHING = object()


async def make(load: Callable[[], object]) -> tuple[object, object]:
    """The model that a function returns or yields, and the generator that unloads it, if it is one.

    A batcher is started.

    Raises:
        ConfigError: a generator yields nothing.
        Exception: what the function raised.
    """
    if inspect.iscoroutinefunction(load) or inspect.isasyncgenfunction(load):
        made: object = load()
    else:
        made = await on_daemon_thread(load, _close)
    rest: object = None
    if inspect.isasyncgen(made):
        rest, made = made, await anext(made, _NOTHING)
    elif inspect.isgenerator(made):
        rest = made
        made = await on_daemon_thread(functools.partial(next, made, _NOTHING), lambda _: _close(rest))
    elif inspect.isawaitable(made):
        made = await made
    if made is _NOTHING:
        raise ConfigError("its generator yields no model")
    if isinstance(made, Batcher) and not made.is_running:
        await made.start()
    return made, rest


async def unload(model: object, rest: object, within_s: float | None) -> None:
    """Undo what `make` did, with what it returned; raises what the user's code raises, or TimeoutError."""
    async with _at_most(within_s):
        if isinstance(model, Batcher):
            await model.stop()
        if inspect.isasyncgen(rest):
            await anext(rest, None)
        elif rest is not None:
            await on_daemon_thread(functools.partial(next, rest, None))
        elif not isinstance(model, Batcher) and callable(close := getattr(model, "close", None)):
            await on_daemon_thread(close)


async def call(method: Callable[[], object], within_s: float | None = None) -> None:
    """Call a method of a model on a thread, or on the event loop if it is asynchronous.

    Raises:
        TimeoutError: it takes longer than `within_s`.
        Exception: what the method raises.
    """
    async with _at_most(within_s):
        if inspect.iscoroutinefunction(method):
            await method()
        else:
            await on_daemon_thread(method)


@asynccontextmanager
async def _at_most(seconds: float | None) -> AsyncIterator[None]:
    """A time limit whose error names it."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"it took longer than {seconds:g} s") from error
        raise


def _close(model: object) -> None:
    """Close a model or a generator whose loading took too long."""
    if callable(close := getattr(model, "close", None)):
        close()
