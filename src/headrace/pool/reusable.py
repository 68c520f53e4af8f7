"""`ReusablePool`: several `@reusable` models that share the memory of a process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypedDict, TypeVar, Unpack, overload

from headrace.batching.batcher import Batcher
from headrace.batching.foreign_calls import Raised, attempt_async
from headrace.batching.stats import BatchStats
from headrace.concurrency.loop_thread import LoopThread
from headrace.concurrency.reusable import Factory, Loading, Reusable, registered
from headrace.errors import ConfigError
from headrace.pool.model import ModelOptions, ModelStats
from headrace.pool.policy import Phase
from headrace.pool.pool import ModelPool

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

_POLL_S = 0.01
_pools: weakref.WeakValueDictionary[str, ReusablePool] = weakref.WeakValueDictionary()
"""This process's pools by name, because a worker may unpickle the same one many times."""
_pools_lock = threading.Lock()


class PoolLimits(TypedDict, total=False):
    """The arguments of `ModelPool`."""

    max_models: int | None
    memory_bytes: float | None
    max_asleep: int | None
    host_memory_bytes: float | None
    used_memory: Callable[[], float] | None


class ReusablePool:
    """Models of a process that share memory, each callable from any thread and event loop.

        models = headrace.ReusablePool(max_models=1)

        @models.reusable
        def embed():
            return TokenBatcher(inference_fn=load_model().encode, target_batch_tokens=8_000)

        vector = await embed("one text")

    Args:
        limits: as `ModelPool` has them.

    Raises:
        ConfigError: neither or both limits are given, or one is out of range.
    """

    def __init__(self, **limits: Unpack[PoolLimits]) -> None:
        ModelPool(**limits)  # checks them
        self._limits = limits
        self._name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._live: tuple[LoopThread, ModelPool] | None = None
        with _pools_lock:
            _pools[self._name] = self

    def __reduce__(self) -> tuple[object, ...]:
        """Unpickling gives the receiving process's single pool."""
        return _unpickle, (self._name, self._limits)

    @overload
    def reusable(self, factory: Factory[RecordT, ResultT], /) -> Reusable[RecordT, ResultT]: ...

    @overload
    def reusable(
        self, **options: Unpack[ModelOptions]
    ) -> Callable[[Factory[RecordT, ResultT]], Reusable[RecordT, ResultT]]: ...

    def reusable(  # type: ignore[misc] # mypy takes `factory` for one of the options
        self, factory: Factory[RecordT, ResultT] | None = None, /, **options: Unpack[ModelOptions]
    ) -> Reusable[RecordT, ResultT] | Callable[[Factory[RecordT, ResultT]], Reusable[RecordT, ResultT]]:
        """As `headrace.reusable`, for a model of this pool; options are those of `ModelPool.add`.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        ModelPool(**self._limits).add("model", lambda: None, **options)  # checks them

        def made(factory: Factory[RecordT, ResultT]) -> Reusable[RecordT, ResultT]:
            return registered(factory, functools.partial(_PooledReusable, factory, self, options))

        return made if factory is None else made(factory)

    def stats(self) -> dict[str, ModelStats]:
        """What happened to each model that was called in this process."""
        live = self._live
        return {} if live is None else live[1].stats()

    def close(self) -> None:
        """Serve what has begun, and unload all models; the next call loads its model again."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            thread, pool = live
            thread.run(pool.close())
            thread.close()

    def _running(self) -> tuple[LoopThread, ModelPool]:
        with self._lock:
            if self._live is None:
                self._live = LoopThread("headrace-reusable-pool"), ModelPool(**self._limits)
                thread, pool = self._live
                thread.run(pool.__aenter__())
            return self._live

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._live = None


class _PooledReusable(Reusable[RecordT, ResultT]):
    def __init__(self, factory: Callable[[], object], pool: ReusablePool, options: ModelOptions, name: str) -> None:
        super().__init__(factory, options.get("idle_timeout_s"), name)
        self._shared = pool
        self._options = options
        self._last: tuple[weakref.ref[Batcher[object, object]], BatchStats] | None = None

    def _made_anew(self) -> Callable[[str], Reusable[object, object]]:
        return functools.partial(_PooledReusable, self._factory, self._shared, self._options)

    @property
    def stats(self) -> BatchStats:
        """The counters of this process as of the last call that ended."""
        with self._lock:
            return BatchStats.merge([self._ended, *(() if self._last is None else [self._last[1]])])

    @property
    def is_loaded(self) -> bool:
        found = self._shared.stats().get(self._name)
        return found is not None and found.phase == Phase.LOADED.value

    def close(self) -> None:
        if self._name in self._shared.stats():
            thread, pool = self._shared._running()
            thread.run(_unloaded(pool, self._name))

    @contextmanager
    def _use(self) -> Iterator[Loading]:
        thread, pool = self._shared._running()
        lease = Loading()
        held = thread.submit(self._hold(pool, lease))
        try:
            yield lease
        finally:
            if lease.is_ready:
                self._count(lease.ready.result()[0])
            held.cancel()

    async def _hold(self, pool: ModelPool, lease: Loading) -> None:
        """Keep the model loaded until cancelled. Runs on the pool's loop."""
        held = await attempt_async(self._keep(pool, lease))
        if isinstance(held, Raised):
            lease.fail(held.cause)

    async def _keep(self, pool: ModelPool, lease: Loading) -> None:
        if self._name not in pool.stats():
            pool.add(self._name, self._factory, **self._options)
        async with pool.use(self._name) as batcher:
            if not isinstance(batcher, Batcher):
                raise ConfigError(f"the function returned {batcher!r}; it must return or yield a batcher")
            lease.ready.set_result((batcher, asyncio.get_running_loop()))
            del batcher
            await asyncio.Event().wait()

    def _count(self, batcher: Batcher[object, object]) -> None:
        with self._lock:
            if self._last is not None and self._last[0]() is not batcher:
                self._ended = BatchStats.merge([self._ended, self._last[1]])
            self._last = weakref.ref(batcher), batcher.stats


async def _unloaded(pool: ModelPool, name: str) -> None:
    pool.unload(name)
    while pool.stats()[name].phase not in (Phase.UNLOADED.value, Phase.LOADED.value):  # noqa: ASYNC110 - no event
        await asyncio.sleep(_POLL_S)  # another call may have loaded it again


def _unpickle(name: str, limits: PoolLimits) -> ReusablePool:
    with _pools_lock:
        found = _pools.get(name)
    if found is None:
        found = ReusablePool(**limits)
        found._name = name
        with _pools_lock:
            found = _pools.setdefault(name, found)
    return found


@atexit.register
def _close_all() -> None:
    for pool in list(_pools.values()):
        with suppress(Exception):  # a model's own code may raise anything
            pool.close()


def _reset_all() -> None:
    for pool in list(_pools.values()):
        pool._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
