"""A function as tasks of a Ray cluster, for `map_concurrent`."""

from __future__ import annotations

import asyncio
import functools
import pickle
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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


def ray_task(fn: Callable[[ItemT], ResultT], **options: Any) -> Callable[[ItemT], Coroutine[Any, Any, ResultT]]:
    """`fn` as an `async def` that runs each call as a task of the Ray cluster this process is connected to.

        async for page in headrace.map_concurrent(ray_task(parse, num_cpus=1), files, concurrency=200, retries=3): ...

    A call that is cancelled, or takes longer than its `timeout_s`, is cancelled on the cluster too.

    Args:
        fn: a plain function, with all that it needs to be had on the cluster's machines.
        options: of `ray.remote`, such as `num_cpus`. Ray's own retries are off: `map_concurrent` has some.

    Raises:
        ConfigError: it is asynchronous, or cannot be sent to another process.
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
            raise error.cause from error  # the function's own
        except RayError as error:
            raise WorkerDiedError(f"the call was lost: {error}") from error
        return result

    return call


def _interruptible(fn: Callable[[ItemT], ResultT]) -> Callable[[ItemT], ResultT]:
    """`fn` for a worker that Ray can interrupt.

    Ray cancels a task by SIGINT. A cluster started from a shell's background, as with nohup, ignores that signal, and
    so do its workers: their tasks would go on for ever.
    """

    @functools.wraps(fn)
    def call(item: ItemT) -> ResultT:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return fn(item)

    return call
