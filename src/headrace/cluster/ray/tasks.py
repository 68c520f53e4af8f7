"""Runs a function as Ray tasks, for `map_concurrent`."""

from __future__ import annotations

import asyncio
import functools
import pickle
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from headrace.batching.callables import plain_function
from headrace.errors import ConfigError, MissingExtraError, WorkerDiedError

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError as error:
    raise MissingExtraError('a cluster needs ray, which is not installed: pip install "headrace[ray]"') from error

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def ray_task(
    fn: Callable[[ItemT], ResultT], **options: object
) -> Callable[[ItemT], Coroutine[object, object, ResultT]]:
    """Wrap `fn` in an `async def` that runs each call as a task on the connected Ray cluster.

        async for page in headrace.map_concurrent(ray_task(parse, num_cpus=1), files, concurrency=200, retries=3): ...

    Cancelling a call, or exceeding its `timeout_s`, cancels the task on the cluster.

    Args:
        fn: a plain function whose dependencies are installed on the cluster.
        options: options of `ray.remote`, such as `num_cpus`. Ray's retries are off; use those of `map_concurrent`.

    Raises:
        ConfigError: `fn` is asynchronous or cannot be pickled.
    """
    plain_function("fn", fn)
    try:
        cloudpickle.dumps(fn)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(f"{fn!r} cannot be sent to a cluster: {error}") from error
    remote = ray.remote(**{"max_retries": 0, "num_cpus": 1, **options})(_interruptible(fn))

    async def call(item: ItemT) -> ResultT:
        task = remote.remote(item)
        try:
            result: ResultT = await task
        except asyncio.CancelledError:
            ray.cancel(task)
            raise
        except RayTaskError as error:
            raise error.cause from error  # the exception of the function
        except RayError as error:
            raise WorkerDiedError(f"the call was lost: {error}") from error
        return result

    return call


def _interruptible(fn: Callable[[ItemT], ResultT]) -> Callable[[ItemT], ResultT]:
    """Make sure that Ray can interrupt `fn`.

    Ray cancels a task with SIGINT. The workers of a cluster that a shell started in the background, as with nohup,
    ignore that signal, and a cancelled task would never end.
    """

    @functools.wraps(fn)
    def call(item: ItemT) -> ResultT:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return fn(item)

    return call
