"""`ModelPool`: models that share memory, loaded when they are asked for."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack, overload

from headrace.batching.batcher import Batcher
from headrace.batching.options import number, optional, whole
from headrace.device.memory import process_bytes
from headrace.errors import ConfigError, EngineError, NotRunningError, StoppedError, text_of
from headrace.pool.policy import ModelView, Phase, decide

T = TypeVar("T")

logger = logging.getLogger("headrace")

_NOTHING = object()
_FIRST_LOAD_S = 1.0
"""Expected loading time of a model that was never loaded."""
_LOAD_TIMEOUT_S = 600.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
"""Seconds between tries to load a model that cannot be loaded; they double each time."""


@dataclass(frozen=True, slots=True)
class ModelStats:
    """What happened to a model so far."""

    phase: str
    """unloaded, loading, loaded, draining (it serves its last requests) or unloading."""
    loads: int
    failed_loads: int
    requests: int
    """Requests that got the model."""
    in_use: int
    waiting: int
    wait_s: float
    """Seconds that requests have waited for the model, in sum."""
    longest_wait_s: float
    load_s: float
    """Expected loading time in seconds, learned from the last loads."""
    size: float | None
    """Measured or given memory in bytes; None if it is not known yet. 1 if the pool counts models."""


class ModelOptions(TypedDict, total=False):
    """Options of a model in a pool."""

    memory_bytes: float | None
    """What it takes; None to measure it when it is first loaded. Only for a pool with `memory_bytes`."""
    max_wait_s: float | None
    """Seconds that a request waits before this model takes the room of one that has requests too; None for twice the
    time that it takes to load."""
    idle_timeout_s: float | None
    """Unload it when it was not used for so many seconds; None to keep it until others need its room."""
    load_timeout_s: float | None
    """Fail its requests if loading takes longer; 600 by default, None for no limit."""


class PooledModel(Generic[T]):
    """A model of a pool. Made by `ModelPool.add`."""

    def __init__(self, pool: ModelPool, name: str) -> None:
        self._pool = pool
        self.name = name

    def use(self) -> AbstractAsyncContextManager[T]:
        """See `ModelPool.use`."""
        return self._pool.use(self.name)


class _Entry:
    """A model of the pool, and its requests."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Any],
        size: float | None,
        limits: tuple[float | None, float | None, float | None],
    ) -> None:
        self.name = name
        self.load = load
        self.size = size
        self.max_wait_s, self.idle_timeout_s, self.load_timeout_s = limits
        self.phase = Phase.UNLOADED
        self.model: Any = None
        self.rest: Any = None
        """A generator that unloads the model when it goes on."""
        self.in_use = 0
        self.waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self.loaded_at = self.last_used = 0.0
        self.load_s = _FIRST_LOAD_S
        self.retry_at = 0.0
        self.error = ""
        self.failures = 0
        """Failed loads in a row."""
        self.loads = self.failed_loads = self.requests = 0
        self.wait_s = self.longest_wait_s = 0.0

    def view(self, budget: float) -> ModelView:
        while self.waiting and self.waiting[0][1].done():
            self.waiting.popleft()  # cancelled
        return ModelView(
            self.name,
            self.phase,
            budget if self.size is None else self.size,
            self.load_s,
            self.max_wait_s,
            self.idle_timeout_s,
            self.in_use,
            self.waiting[0][0] if self.waiting else None,
            self.loaded_at,
            self.last_used,
        )

    def grant(self, arrived: float, now: float) -> None:
        """Count a request that gets the model now."""
        self.in_use += 1
        self.requests += 1
        self.wait_s += now - arrived
        self.longest_wait_s = max(self.longest_wait_s, now - arrived)

    def stats(self) -> ModelStats:
        return ModelStats(
            self.phase.value,
            self.loads,
            self.failed_loads,
            self.requests,
            self.in_use,
            sum(not future.done() for _, future in self.waiting),
            self.wait_s,
            self.longest_wait_s,
            self.load_s,
            self.size,
        )


class ModelPool:
    """Models that share memory: each is loaded when it is asked for, and unloaded when others need its room.

    `headrace.pool.policy` says when a model makes room for another, and how long a request may wait for that. A model
    is loaded once however many requests wait for it, and never unloaded while a request uses it. A model that cannot be
    loaded fails its own requests; the next tries wait 1 s, 2 s, ... up to 60 s, and requests in between fail at once.

    All calls come from one event loop.

    Args:
        max_models: how many models fit into memory together.
        memory_bytes: or, the memory for all models together, in bytes. What a model takes is measured when it is
            first loaded, alone, unless `add` gives it.
        used_memory: the memory in use, in bytes, such as `torch.cuda.memory_allocated`; None for this process's memory.

    Raises:
        ConfigError: neither or both limits are given, or one is out of range.
    """

    def __init__(
        self,
        *,
        max_models: int | None = None,
        memory_bytes: float | None = None,
        used_memory: Callable[[], float] | None = None,
    ) -> None:
        if (max_models is None) == (memory_bytes is None):
            raise ConfigError("a ModelPool needs one limit: give either max_models or memory_bytes")
        if max_models is not None:
            self._budget: float = whole("max_models", max_models, 1)
        else:
            self._budget = number("memory_bytes", memory_bytes, above=0)
        self._counts_models = max_models is not None
        self._used_memory = used_memory or process_bytes
        self._entries: dict[str, _Entry] = {}
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

    def add(self, name: str, load: Callable[[], Any], **options: Unpack[ModelOptions]) -> PooledModel[Any]:
        """Add a model; it is not loaded yet.

        Args:
            name: the name to use it by.
            load: returns the model, or yields it once and unloads it after the yield. A plain function or generator
                runs on a thread of its own. Without a yield, the model's `close` is called, if it has one. A batcher is
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
        entry = _Entry(name, load, size, limits)
        self._check_size(entry)
        self._entries[name] = entry
        return PooledModel(self, name)

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
            self._fail(entry, StoppedError("the model pool is closing"))
        self._decide()
        while self._tasks or any(entry.in_use for entry in self._entries.values()):
            if self._tasks:
                await asyncio.wait(set(self._tasks))
            else:
                await asyncio.sleep(0.01)  # the last requests
        self._loop = None

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Any]:
        """Wait until the model is loaded, and keep it loaded within the context. Yields what `load` returned.

        Raises:
            ConfigError: the pool has no such model, or it turned out to be larger than the pool.
            EngineError: it cannot be loaded, or could not a moment ago.
            NotRunningError: the pool was not entered with `async with`.
            StoppedError: the pool is closing.
        """
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise ConfigError(f"the pool has no model {name!r}; it has {known}")
        await self._acquire(entry)
        try:
            yield entry.model
        finally:
            self._release(entry)

    def stats(self) -> dict[str, ModelStats]:
        """A snapshot of each model's counters."""
        return {name: entry.stats() for name, entry in self._entries.items()}

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _acquire(self, entry: _Entry) -> None:
        if self._closing:
            raise StoppedError("the model pool is closing")
        if self._loop is None:
            raise NotRunningError("the model pool is not running; enter it with `async with`")
        self._check_size(entry)
        now = self._loop.time()
        if entry.phase is Phase.LOADED:
            entry.grant(now, now)
            return
        if now < entry.retry_at:
            raise EngineError(f"{entry.error}; it is tried again in {entry.retry_at - now:.1f} s")
        granted: asyncio.Future[None] = self._loop.create_future()
        entry.waiting.append((now, granted))
        self._decide()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(entry)  # it was granted at the same moment
            raise

    def _release(self, entry: _Entry) -> None:
        assert self._loop is not None, "the pool waits for its requests"
        entry.in_use -= 1
        entry.last_used = self._loop.time()
        if not entry.in_use:
            if entry.phase is Phase.DRAINING:
                self._unload_now(entry)
            self._decide()

    def _check_size(self, entry: _Entry) -> None:
        if entry.size is not None and entry.size > self._budget:
            raise ConfigError(
                f"model {entry.name!r} takes {entry.size:,.0f} bytes, and the pool has {self._budget:,.0f}: "
                "raise memory_bytes of the pool"
            )

    def _fail(self, entry: _Entry, error: Exception) -> None:
        while entry.waiting:
            _, granted = entry.waiting.popleft()
            if not granted.done():
                granted.set_exception(error)

    # -- loading and unloading --------------------------------------------------------------------------------------

    def _decide(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closing:
            decided = [entry for entry in self._entries.values() if entry.phase is Phase.LOADED]
        else:
            views = [entry.view(self._budget) for entry in self._entries.values()]
            decision = decide(self._loop.time(), views, self._budget)
            decided = [self._entries[name] for name in decision.unload]
            for name in decision.load:
                self._entries[name].phase = Phase.LOADING
                self._start(self._load(self._entries[name]))
            if decision.again_at < float("inf"):
                self._timer = self._loop.call_at(decision.again_at, self._decide)
        for entry in decided:
            entry.phase = Phase.DRAINING
            if not entry.in_use:
                self._unload_now(entry)

    def _unload_now(self, entry: _Entry) -> None:
        entry.phase = Phase.UNLOADING
        self._start(self._unload(entry))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, entry: _Entry) -> None:
        assert self._loop is not None
        started, before = self._loop.time(), self._used_memory()
        try:
            async with asyncio.timeout(entry.load_timeout_s):
                await self._make(entry)
        except TimeoutError:
            self._not_loaded(entry, f"loading model {entry.name!r} took longer than {entry.load_timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything: its own requests fail
            self._not_loaded(entry, f"model {entry.name!r} cannot be loaded: {text_of(error)}", error)
        else:
            self._loaded(entry, started, self._used_memory() - before)
        self._decide()

    def _loaded(self, entry: _Entry, started: float, grown: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        entry.load_s = now - started if not entry.loads else (entry.load_s + now - started) / 2
        entry.loads += 1
        entry.failures = 0
        entry.phase, entry.loaded_at, entry.last_used = Phase.LOADED, now, now
        if entry.size is None:  # it was loaded alone
            entry.size = max(grown, 1.0)
            try:
                self._check_size(entry)
            except ConfigError as error:
                self._fail(entry, error)
                self._unload_now(entry)
        while entry.waiting:
            arrived, granted = entry.waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                entry.grant(arrived, now)

    def _not_loaded(self, entry: _Entry, why: str, error: Exception | None = None) -> None:
        assert self._loop is not None
        entry.phase = Phase.UNLOADED
        entry.failed_loads += 1
        entry.retry_at = self._loop.time() + min(_LEAST_PAUSE_S * 2**entry.failures, _MOST_PAUSE_S)
        entry.failures += 1
        entry.error = why
        failure = EngineError(why)
        failure.__cause__ = error
        self._fail(entry, failure)

    async def _make(self, entry: _Entry) -> None:
        load = entry.load
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
        entry.model, entry.rest = model, rest

    async def _unload(self, entry: _Entry) -> None:
        model, rest = entry.model, entry.rest
        entry.model = entry.rest = None
        try:
            if isinstance(model, Batcher):
                await model.stop()
            if inspect.isasyncgen(rest):
                await anext(rest, None)
            elif rest is not None:
                await _on_thread(functools.partial(next, rest, None))
            elif not isinstance(model, Batcher) and callable(close := getattr(model, "close", None)):
                await _on_thread(close)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and others wait for the room
            logger.warning(
                "headrace: unloading model %r raised %s: %s", entry.name, type(error).__name__, text_of(error)
            )
        del model, rest
        entry.phase = Phase.UNLOADED
        self._decide()


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

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            if error is None and too_late is not None:
                threading.Thread(target=too_late, args=(result,), daemon=True).start()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - of a user's function; the caller receives it
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed
            if error is None and too_late is not None:
                too_late(result)

    threading.Thread(target=run, name="headrace-pool", daemon=True).start()
    return await done
