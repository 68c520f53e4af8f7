"""Runs a function as Ray tasks, for `map_concurrent`."""

from __future__ import annotations

import asyncio
import pickle
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


_CANCEL_WAITS_S = (2, 4, 8, 16)
"""Seconds between repeated interrupts of a task. Each wait leaves time for cleanup."""


def ray_task(fn: Callable[[ItemT], ResultT], **options: object) -> Callable[[ItemT], Coroutine[Any, Any, ResultT]]:
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
    remote = ray.remote(**{"max_retries": 0, "num_cpus": 1, **options})(fn)

    async def call(item: ItemT) -> ResultT:
        task = remote.remote(item)
        try:
            result: ResultT = await task
        except asyncio.CancelledError:
            _cancel(task)
            raise
        except RayTaskError as error:
            raise error.cause from error  # the exception of the function
        except RayError as error:
            raise WorkerDiedError(f"the call was lost: {error}") from error
        return result

    return call


def _cancel(task: ray.ObjectRef[object]) -> None:
    """Interrupt a task repeatedly until it ends. Python drops an interrupt that arrives in a destructor."""
    ray.cancel(task)

    def interrupt() -> None:
        for wait_s in _CANCEL_WAITS_S:
            try:
                if ray.wait([task], timeout=wait_s, fetch_local=False)[0]:
                    return
                ray.cancel(task)
            except Exception:  # noqa: BLE001 - Ray is shutting down, which can raise anything and ends the task
                return

    threading.Thread(target=interrupt, name="headrace-cancel", daemon=True).start()
