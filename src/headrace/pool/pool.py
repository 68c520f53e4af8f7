"""`ModelPool`: models that share memory, loaded when they are asked for."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar, Unpack, overload

from headrace.batching.foreign_calls import Raised, attempt_async, must_propagate
from headrace.batching.options import number, optional, whole
from headrace.concurrency.daemon_thread import as_exception
from headrace.concurrency.loading import call, make, unload
from headrace.device.process_memory import process_bytes
from headrace.errors import ConfigError, EngineError, NotRunningError, StoppedError, text_of
from headrace.pool.model import AnyModel, ModelOptions, ModelStats, PooledModel, PoolEntry, Waiter
from headrace.pool.policy import Phase, decide, to_sleep

T = TypeVar("T")

logger = logging.getLogger("headrace")

_LOAD_TIMEOUT_S = 600.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
"""Seconds between tries to load a model that cannot be loaded; they double each time."""
_LAST_LOADS_S = 10.0
"""Seconds that loads may still take when the pool closes. Nobody waits for them; one may hang."""


class ModelPool:
    """Models that share memory: each is loaded when it is asked for, and unloaded when others need its room.

    `headrace.pool.policy` says when a model makes room for another. A model is loaded once however many requests wait
    for it, and never unloaded while a request uses it. A model that cannot be loaded fails its own requests; the next
    tries wait 1 s, 2 s, ... up to 60 s, and requests in between fail at once.

    All calls come from one event loop.

    Args:
        max_models: how many models fit into memory together.
        memory_bytes: or, the memory for all models together, in bytes. What a model takes is measured when it is
            first loaded, alone, unless `add` gives it.
        max_asleep: with `max_models`: how many models may sleep in host memory besides.
        host_memory_bytes: with `memory_bytes`: host memory for models that sleep. A model sleeps if it has methods
            `sleep`, which frees the device, and `wake`, and if waking it is faster than loading.
        used_memory: the memory in use, in bytes, such as `torch.cuda.memory_allocated`; None for this process's memory.

    Raises:
        ConfigError: neither or both limits are given, or one is out of range.
    """

    def __init__(
        self,
        *,
        max_models: int | None = None,
        memory_bytes: float | None = None,
        max_asleep: int | None = None,
        host_memory_bytes: float | None = None,
        used_memory: Callable[[], float] | None = None,
    ) -> None:
        if (max_models is None) == (memory_bytes is None):
            raise ConfigError("a ModelPool needs one limit: give either max_models or memory_bytes")
        if max_models is not None:
            self._budget: float = whole("max_models", max_models, 1)
        else:
            self._budget = number("memory_bytes", memory_bytes, above=0)
        self._counts_models = max_models is not None
        if (host_memory_bytes if self._counts_models else max_asleep) is not None:
            raise ConfigError("max_asleep belongs to max_models, and host_memory_bytes to memory_bytes")
        if self._counts_models:
            self._host_room: float = whole("max_asleep", max_asleep or 0, 0)
        else:
            self._host_room = number("host_memory_bytes", host_memory_bytes or 0, minimum=0)
        self._used_memory = used_memory or (lambda: process_bytes() or 0.0)
        self._entries: dict[str, PoolEntry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @overload
    def add(self, name: str, load: Callable[[], Iterator[T]], **options: Unpack[ModelOptions]) -> PooledModel[T]: ...

    @overload
    def add(
        self, name: str, load: Callable[[], AsyncIterator[T]], **options: Unpack[ModelOptions]
    ) -> PooledModel[T]: ...

    @overload
    def add(self, name: str, load: Callable[[], Awaitable[T]], **options: Unpack[ModelOptions]) -> PooledModel[T]: ...

    @overload
    def add(self, name: str, load: Callable[[], T], **options: Unpack[ModelOptions]) -> PooledModel[T]: ...

    def add(self, name: str, load: Callable[[], AnyModel], **options: Unpack[ModelOptions]) -> PooledModel[AnyModel]:
        """Add a model; it is not loaded yet.

        Args:
            name: the name to use it by.
            load: returns the model, or yields it once and unloads it after the yield. A plain function or generator
                runs on its own thread. Without a yield, the model's `close` is called, if it has one. A batcher is
                started and stopped by the pool.
            options: see `ModelOptions`.

        Raises:
            ConfigError: the name is taken, a parameter is out of range, or the model is larger than the pool.
        """
        if name in self._entries:
            raise ConfigError(f"the pool has a model {name!r} already; choose another name")
        if unknown := options.keys() - ModelOptions.__annotations__.keys():
            raise ConfigError(f"a model of a pool has no option {min(unknown)!r}")
        memory_bytes, max_wait_s = options.get("memory_bytes"), options.get("max_wait_s")
        if self._counts_models and memory_bytes is not None:
            raise ConfigError(f"memory_bytes of model {name!r} has no meaning in a pool with max_models; leave it out")
        size = 1.0 if self._counts_models else optional("memory_bytes", memory_bytes, above=0)
        limits = (
            None if max_wait_s is None else number("max_wait_s", max_wait_s, minimum=0),
            optional("idle_timeout_s", options.get("idle_timeout_s"), above=0),
            optional("load_timeout_s", options.get("load_timeout_s", _LOAD_TIMEOUT_S), above=0),
        )
        entry = PoolEntry(name, load, size, limits)
        entry.check_size(self._budget)
        self._entries[name] = entry
        return PooledModel(self.use, name)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._closing = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Refuse new requests, fail those that wait, and unload each model when its last request is done."""
        self._closing = True
        for entry in self._entries.values():
            entry.fail(StoppedError("the model pool is closing"))
            if self._loop is not None and entry.loading is not None:
                self._loop.call_later(_LAST_LOADS_S, entry.loading.cancel)
        self._decide()
        while self._tasks or any(entry.is_used for entry in self._entries.values()):
            await (asyncio.wait(set(self._tasks)) if self._tasks else asyncio.sleep(0.01))  # the last requests
        self._loop = None

    def use(self, name: str) -> AbstractAsyncContextManager[AnyModel]:
        """Wait until the model is loaded, and keep it loaded within the context. Yields what `load` returned.

        Raises:
            ConfigError: the pool has no such model, or it turned out to be larger than the pool.
            EngineError: it cannot be loaded, or could not a moment ago.
            NotRunningError: the pool was not entered with `async with`.
            StoppedError: the pool is closing.
        """
        return self._using(name)

    def use_in_background(self, name: str, leave: Callable[[], None]) -> AbstractAsyncContextManager[AnyModel]:
        """The same for work that waits behind requests, such as a long job.

        It takes the room of a model that has requests only after ten minutes. The model makes room for the requests of
        others as soon as the context ends.

        Args:
            name: of the model.
            leave: called on the event loop when the model is to make room. The context should then end soon; enter it
                again to continue later.

        Raises:
            HeadraceError: as `use`.
        """
        return self._using(name, leave)

    @asynccontextmanager
    async def _using(self, name: str, leave: Callable[[], None] | None = None) -> AsyncIterator[object]:
        entry = self._entry(name)
        waiter = await self._acquire(entry, leave)
        try:
            yield entry.model
        finally:
            self._release(entry, waiter)

    def turn_away(self) -> None:
        """Fail the requests that wait for a model. Background work waits on."""
        for entry in self._entries.values():
            entry.fail_requests(StoppedError("the model pool is closing"))

    def unload(self, name: str) -> None:
        """Unload a model as soon as its requests are done, though no other needs its room; nothing if it is not loaded.

        Raises:
            ConfigError: the pool has no such model.
        """
        entry = self._entry(name)
        entry.drops = not entry.phase.is_out
        if entry.phase is Phase.LOADED:
            self._unload_when_done(entry)
        elif entry.phase is Phase.ASLEEP:
            self._drop_now(entry)

    def stats(self) -> dict[str, ModelStats]:
        """A snapshot of each model's counters."""
        return {name: entry.stats() for name, entry in self._entries.items()}

    def _entry(self, name: str) -> PoolEntry:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise ConfigError(f"the pool has no model {name!r}; it has {known}")
        return entry

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _acquire(self, entry: PoolEntry, leave: Callable[[], None] | None = None) -> Waiter:
        if self._closing:
            raise StoppedError("the model pool is closing")
        if self._loop is None:
            raise NotRunningError("the model pool is not running; enter it with `async with`")
        entry.check_size(self._budget)
        now = self._loop.time()
        waiter = Waiter(now, self._loop.create_future(), leave)
        if entry.phase is Phase.LOADED:
            entry.grant(waiter, now)
            return waiter
        if now < entry.retry_at:
            raise EngineError(f"{entry.error}; it is tried again in {entry.retry_at - now:.1f} s")
        (entry.waiting if leave is None else entry.background_waiting).append(waiter)
        self._decide()
        granted = waiter.granted
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(entry, waiter)  # it was granted at the same moment
            raise
        return waiter

    def _release(self, entry: PoolEntry, waiter: Waiter) -> None:
        assert self._loop is not None, "the pool waits for its requests"
        entry.release(waiter, self._loop.time())
        if not entry.is_used:
            if entry.phase is Phase.DRAINING:
                self._unload_now(entry)
            self._decide()

    # -- loading and unloading --------------------------------------------------------------------------------------

    def _decide(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closing:
            decided = [entry for entry in self._entries.values() if entry.phase is Phase.LOADED]
            for entry in self._entries.values():
                if entry.phase is Phase.ASLEEP:
                    self._drop_now(entry)
        else:
            views = [entry.view(self._budget) for entry in self._entries.values()]
            decision = decide(self._loop.time(), views, self._budget)
            decided = [self._entries[name] for name in decision.unload]
            for name in decision.load:
                entry = self._entries[name]
                sleeps, entry.phase = entry.phase is Phase.ASLEEP, Phase.LOADING
                entry.loading = self._start(self._load(entry, sleeps=sleeps))
            if decision.again_at < float("inf"):
                self._timer = self._loop.call_at(decision.again_at, self._decide)
        for entry in decided:
            self._unload_when_done(entry)

    def _unload_when_done(self, entry: PoolEntry) -> None:
        assert self._loop is not None, "a loaded model has its pool's loop"
        entry.drain(self._loop)
        if not entry.is_used:
            self._unload_now(entry)

    def _unload_now(self, entry: PoolEntry) -> None:
        entry.phase = Phase.UNLOADING
        self._start(self._unload(entry))

    def _drop_now(self, entry: PoolEntry) -> asyncio.Task[None]:
        entry.phase = Phase.DROPPING
        return self._start(self._drop(entry))

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, entry: PoolEntry, *, sleeps: bool) -> None:
        assert self._loop is not None
        started, before = self._loop.time(), 0.0
        limit = asyncio.timeout(entry.load_timeout_s)
        try:
            async with limit:
                woken = sleeps and await self._wake(entry)
                if not woken:
                    started, before = self._loop.time(), self._used_memory()
                    entry.model, entry.rest = await make(entry.load)
                grown = self._used_memory() - before
        except BaseException as raised:  # a model's own code may raise anything
            error = as_exception(raised)
            late = limit.expired()  # the function may raise its own TimeoutError
            why = (
                f"took longer than {entry.load_timeout_s:g} s to load"
                if late
                else f"cannot be loaded: {text_of(error)}"
            )
            self._not_loaded(entry, f"model {entry.name!r} {why}", error)
            if entry.model is not None:  # it was to be woken, or its memory cannot be measured
                self._drop_now(entry)
            if must_propagate(raised):
                raise
        else:
            entry.loaded(self._loop.time() - started, woken=woken)
            self._loaded(entry, grown)
        self._decide()

    async def _wake(self, entry: PoolEntry) -> bool:
        """Wake a sleeping model. If it cannot be woken, it is dropped, to be loaded again."""
        if await _tried("waking", entry.name, call(entry.model.wake)):
            return True
        await self._drop(entry)
        return False

    def _loaded(self, entry: PoolEntry, grown: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        entry.phase, entry.loaded_at, entry.last_used = Phase.LOADED, now, now
        if entry.size is None:  # it was loaded alone
            entry.size = max(grown, 1.0)
            try:
                entry.check_size(self._budget)
            except ConfigError as error:
                entry.fail(error)
                entry.drops = True
        for waiter in entry.waiters():
            entry.grant(waiter, now)
        if entry.drops:  # `unload` was called meanwhile, or it is too large
            self._unload_when_done(entry)

    def _not_loaded(self, entry: PoolEntry, why: str, error: Exception) -> None:
        assert self._loop is not None
        entry.phase, entry.drops = Phase.UNLOADED, False
        entry.failed_loads += 1
        entry.retry_at = self._loop.time() + min(_LEAST_PAUSE_S * 2**entry.failures, _MOST_PAUSE_S)
        entry.failures += 1
        entry.error = why
        logger.warning("headrace: %s", why)
        failure = EngineError(why)
        failure.__cause__ = error
        entry.fail(failure)

    async def _unload(self, entry: PoolEntry) -> None:
        if await self._put_to_sleep(entry):
            self._decide()
        else:
            await self._drop(entry)

    async def _put_to_sleep(self, entry: PoolEntry) -> bool:
        """Move a model to host memory, if it can sleep there and is worth the room; others may be dropped for it."""
        if not self._may_sleep(entry):
            return False
        # One that requests wait for is about to leave host memory.
        asleep = [other for other in self._entries.values() if other.phase is Phase.ASLEEP and not other.is_wanted]
        kept = to_sleep([other.sleeper() for other in (*asleep, entry)], self._host_room)
        if entry.name not in kept:
            return False
        await asyncio.gather(*[self._drop_now(other) for other in asleep if other.name not in kept])
        if not await _tried("putting to sleep", entry.name, call(entry.model.sleep, entry.load_timeout_s)):
            return False
        if self._may_sleep(entry):  # still
            entry.phase = Phase.ASLEEP
        return entry.phase is Phase.ASLEEP

    def _may_sleep(self, entry: PoolEntry) -> bool:
        return not (self._closing or entry.drops) and self._host_room > 0 and _can_sleep(entry.model)

    async def _drop(self, entry: PoolEntry) -> None:
        """Remove a model from all memory. A model in phase LOADING is then to be loaded again."""
        (model, rest), entry.model, entry.rest = (entry.model, entry.rest), None, None
        await _tried("unloading", entry.name, unload(model, rest, entry.load_timeout_s))
        del model, rest
        await asyncio.sleep(0)  # its last user releases it
        gc.collect()  # parts of a model may refer to each other in cycles
        if entry.phase is not Phase.LOADING:
            entry.phase, entry.drops = Phase.UNLOADED, False
            self._decide()


def _can_sleep(model: object) -> bool:
    """Whether a model has the methods `sleep` and `wake`, and `can_sleep` does not say otherwise."""
    return (
        getattr(model, "can_sleep", True)
        and callable(getattr(model, "sleep", None))
        and callable(getattr(model, "wake", None))
    )


async def _tried(doing: str, name: str, work: Awaitable[None]) -> bool:
    """Whether a model's own code succeeded; what it raised is logged."""
    done = await attempt_async(work)
    if not isinstance(done, Raised):
        return True
    logger.warning("headrace: %s model %r raised %s: %s", doing, name, type(done.cause).__name__, text_of(done.cause))
    return False
