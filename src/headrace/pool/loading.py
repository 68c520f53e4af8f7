"""Loads and unloads models with functions of the user's, on their own threads."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.batching.batcher import Batcher
from headrace.concurrency.daemon_thread import on_daemon_thread
from headrace.errors import ConfigError, text_of

logger = logging.getLogger("headrace")

_NOTHING = object()


async def make(load: Callable[[], object]) -> tuple[object, object]:
    """The model that a function returns or yields, and the generator that unloads it, if it is one.

    A batcher is started.

    Raises:
        ConfigError: a generator yields nothing.
        Exception: what the function raised.
    """
    rest: object = None
    if inspect.isasyncgenfunction(load):
        rest = load()
        model = await anext(rest, _NOTHING)
    elif inspect.isgeneratorfunction(load):
        rest = load()
        model = await on_daemon_thread(functools.partial(next, rest, _NOTHING), lambda _: rest.close())
    elif inspect.iscoroutinefunction(load):
        model = await load()
    else:
        model = await on_daemon_thread(load, _close)
    if model is _NOTHING:
        raise ConfigError("its generator yields no model")
    if isinstance(model, Batcher) and not model.is_running:
        await model.start()
    return model, rest


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


def can_sleep(model: object) -> bool:
    """Whether a model has the methods `sleep` and `wake`, and `can_sleep` does not say otherwise."""
    return (
        getattr(model, "can_sleep", True)
        and callable(getattr(model, "sleep", None))
        and callable(getattr(model, "wake", None))
    )


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


def warn(doing: str, name: str, error: BaseException) -> None:
    """Log what a model's own code raised."""
    logger.warning("headrace: %s model %r raised %s: %s", doing, name, type(error).__name__, text_of(error))


def is_cancelled(error: BaseException) -> bool:
    """Whether this task is being cancelled. A user's function may raise the same error, or any other."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and bool(task.cancelling())
