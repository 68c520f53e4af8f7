"""Loads and unloads models with functions of the user's, on threads of their own."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from headrace.batching.batcher import Batcher
from headrace.errors import ConfigError, ProcessError, text_of

logger = logging.getLogger("headrace")

_NOTHING = object()


async def make(load: Callable[[], Any]) -> tuple[Any, Any]:
    """The model that a function returns or yields, and the generator that unloads it, if it is one.

    A batcher is started.

    Raises:
        ConfigError: a generator yields nothing.
        Exception: what the function raised.
    """
    rest: Any = None
    if inspect.isasyncgenfunction(load):
        rest = load()
        model = await anext(rest, _NOTHING)
    elif inspect.isgeneratorfunction(load):
        rest = load()
        model = await _on_thread(functools.partial(next, rest, _NOTHING), lambda _: rest.close())
    elif inspect.iscoroutinefunction(load):
        model = await load()
    else:
        model = await _on_thread(load, _close)
    if model is _NOTHING:
        raise ConfigError("its generator yields no model")
    if isinstance(model, Batcher) and not model.is_running:
        await model.start()
    return model, rest


async def unload(model: Any, rest: Any) -> None:
    """Undo what `make` did, with what it returned; raises what the user's code raises."""
    if isinstance(model, Batcher):
        await model.stop()
    if inspect.isasyncgen(rest):
        await anext(rest, None)
    elif rest is not None:
        await _on_thread(functools.partial(next, rest, None))
    elif not isinstance(model, Batcher) and callable(close := getattr(model, "close", None)):
        await _on_thread(close)


def can_sleep(model: object) -> bool:
    """Whether a model has the methods `sleep` and `wake`, and `can_sleep` does not say otherwise."""
    return (
        getattr(model, "can_sleep", True)
        and callable(getattr(model, "sleep", None))
        and callable(getattr(model, "wake", None))
    )


async def call(method: Callable[[], Any]) -> None:
    """Call a method of a model on a thread, or on the event loop if it is asynchronous; raises what it raises."""
    if inspect.iscoroutinefunction(method):
        await method()
    else:
        await _on_thread(method)


def as_exception(error: BaseException) -> Exception:
    """The error, or one with its name and text where a future or a task would not pass it on."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ProcessError(f"{type(error).__name__}: {text_of(error)}")


def _close(model: object) -> None:
    """Close a model or a generator whose loading took too long."""
    if callable(close := getattr(model, "close", None)):
        close()


async def _on_thread(call: Callable[[], Any], too_late: Callable[[Any], object] | None = None) -> Any:
    """The result of a call on a daemon thread, which does not delay the end of the program.

    Args:
        call: to be made.
        too_late: called on the thread with the result, if nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            if error is None and too_late is not None:
                threading.Thread(target=too_late, args=(result,), daemon=True).start()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - of a user's function; the caller receives it
            error = as_exception(raised)
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed
            if error is None and too_late is not None:
                too_late(result)

    threading.Thread(target=run, name="headrace-pool", daemon=True).start()
    return await done


def warn(doing: str, name: str, error: BaseException) -> None:
    """Log what a model's own code raised."""
    logger.warning("headrace: %s model %r raised %s: %s", doing, name, type(error).__name__, text_of(error))


def is_cancelled(error: BaseException) -> bool:
    """Whether this task is being cancelled. A user's function may raise the same error, or any other."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and bool(task.cancelling())
