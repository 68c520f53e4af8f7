"""`@reusable`: one model and one batcher per process, callable from any thread or event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar, Unpack, overload

from headrace.batching.batcher import Batcher, SubmitOptions
from headrace.batching.blocking import current_loop
from headrace.batching.foreign_calls import Raised, attempt_async, current_task
from headrace.batching.options import optional
from headrace.batching.pending import own_copy
from headrace.batching.stats import BatchStats
from headrace.concurrency.loading import make, unload
from headrace.concurrency.loop_thread import run_on_thread
from headrace.errors import ConfigError
from headrace.tracebacks import public

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

OnLoop: TypeAlias = "tuple[Batcher[Any, Any], asyncio.AbstractEventLoop]"
"""A batcher, and the event loop that it runs on."""
AnyReusable: TypeAlias = "Reusable[Any, Any]"
_LOCAL = "<locals>"
_instances: dict[str, AnyReusable] = {}
"""This process's instances by name, because a worker may unpickle the same one many times."""
_instances_lock = threading.Lock()


class Loading:
    """A batcher that is loaded or will be, and the event loop that it runs on."""

    def __init__(self) -> None:
        self.ready: Future[OnLoop] = Future()
        self.ready.set_running_or_notify_cancel()  # a cancelled caller must not cancel it for the others

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and self.ready.exception() is None

    def fail(self, error: BaseException) -> None:
        """Pass an error to every waiting caller; raise it if they have got the batcher."""
        if self.ready.done():
            raise error
        self.ready.set_exception(error)


class _LoadedBatcher(Loading):
    """A model that is loading, in use or shutting down: a thread with an event loop, and its batcher."""

    def __init__(
        self,
        factory: Callable[[], object],
        previous: threading.Thread | None,
        idle_check: Callable[[_LoadedBatcher], float | None] | None,
    ) -> None:
        super().__init__()
        self.users = 0
        self.used_at = 0.0
        """When the last call ended, on `time.monotonic()`'s scale."""
        self._factory = factory
        self._previous = previous
        self._idle_check = idle_check
        self._closing = threading.Event()
        self._wake: Callable[[], object] = self._closing.set
        # The model serves all callers and must not see the first caller's context variables.
        self.thread = run_on_thread(self._run(), "headrace-reusable", contextvars.Context())

    def shut_down(self) -> None:
        """Process the waiting records, then end. Thread-safe."""
        self._closing.set()
        self._wake()

    async def _run(self) -> None:
        if self._previous is not None:
            self._previous.join()  # two models may not fit in memory; nothing else runs on this loop
        served = await attempt_async(self._serve())
        if isinstance(served, Raised):
            self.fail(served.cause)

    async def _serve(self) -> None:
        made, rest = await make(self._factory)
        try:
            if not isinstance(made, Batcher):
                raise ConfigError(f"the function returned {made!r}; it must return or yield a batcher")
            loop, closing_event = asyncio.get_running_loop(), asyncio.Event()
            self._wake = functools.partial(loop.call_soon_threadsafe, closing_event.set)
            self.ready.set_result((made, loop))
            if not self._closing.is_set():
                await self._wait_to_close(closing_event)
        finally:
            await unload(made, rest, None)

    async def _wait_to_close(self, closing_event: asyncio.Event) -> None:
        check_in = None if self._idle_check is None else self._idle_check(self)
        while True:
            try:
                async with asyncio.timeout(check_in):
                    await closing_event.wait()
                return
            except TimeoutError:
                assert self._idle_check is not None
                if (check_in := self._idle_check(self)) is None:
                    return


class Reusable(Generic[RecordT, ResultT]):
    """Calls share one batcher, which the first call loads and the process keeps.

    `await it(record)` from any event loop, `it.blocking(record)` from any thread, `await it.map(records)` for many.
    """

    def __init__(self, factory: Callable[[], object], idle_timeout_s: float | None, name: str) -> None:
        if not callable(factory):
            raise ConfigError(f"the factory is {factory!r}; it must be a function that returns a batcher")
        functools.update_wrapper(self, factory)
        self._factory = factory
        self._idle_timeout_s = optional("idle_timeout_s", idle_timeout_s, above=0)
        self._name = name
        self._lock = threading.Lock()
        self._loaded_model: _LoadedBatcher | None = None
        self._last_thread: threading.Thread | None = None
        self._ended = BatchStats()

    def __reduce__(self) -> str | tuple[object, ...]:
        """Unpickling gives the receiving process's single instance."""
        module, name = self._factory.__module__, self.__qualname__  # type: ignore[attr-defined]
        if module != "__main__" and _LOCAL not in name:
            return str(name)
        return _unpickle, (self._name, self._made_anew())

    def _made_anew(self) -> Callable[[str], AnyReusable]:
        """A function that makes this object in another process, under a given name."""
        return functools.partial(Reusable, self._factory, self._idle_timeout_s)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def __call__(self, record: RecordT, **options: Unpack[SubmitOptions]) -> ResultT:
        """The result for one record; options are those of `Batcher.submit`.

        Raises:
            Exception: what loading raised; every waiting caller receives a copy, and the next call tries again.
        """
        options.setdefault("caller", current_task(asyncio.get_running_loop()))
        with self._use() as loaded:
            batcher, _ = await _wait_loaded(loaded)
            result: ResultT = await asyncio.wrap_future(batcher.submit_threadsafe(record, **options))
            return result

    async def map(self, records: Iterable[RecordT], *, return_exceptions: bool = False) -> list[ResultT]:
        """The results for many records, in order; with `return_exceptions`, failed records give exceptions."""
        with self._use() as loaded:
            batcher, loop = await _wait_loaded(loaded)
            call = _collect(batcher, list(records), return_exceptions)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

    @public
    def blocking(self, record: RecordT, *, timeout: float | None = None, **options: Unpack[SubmitOptions]) -> ResultT:
        """The result for one record, from a thread that may block; waits at most `timeout` seconds with loading.

        Raises:
            ConfigError: called on an event loop.
        """
        if current_loop() is not None:
            raise ConfigError("blocking() would block the running event loop: await the call instead")
        with self._use() as loaded:
            ends = None if timeout is None else time.monotonic() + timeout
            batcher, _ = loaded.ready.result(timeout)
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            result: ResultT = batcher.submit_blocking(record, timeout=left, **options)
            return result

    @property
    def stats(self) -> BatchStats:
        """The counters of this process, including dropped models."""
        with self._lock:
            loaded = self._loaded_model
            now = [loaded.ready.result()[0].stats] if loaded is not None and loaded.is_ready else []
            return BatchStats.merge([self._ended, *now])

    @property
    def is_loaded(self) -> bool:
        with self._lock:
            return self._loaded_model is not None and self._loaded_model.is_ready

    def close(self) -> None:
        """Process the waiting records and drop the model; the next call loads it again. Safe to call twice."""
        with self._lock:
            self._drop()
            last = self._last_thread
        if last is not None and last is not threading.current_thread():
            last.join()

    # -- lifecycle --------------------------------------------------------------------------------------------------

    @contextmanager
    def _use(self) -> Iterator[Loading]:
        with self._lock:
            if self._loaded_model is None:
                self._loaded_model = _LoadedBatcher(
                    self._factory, self._last_thread, self._idle if self._idle_timeout_s else None
                )
                self._last_thread = self._loaded_model.thread
            loaded = self._loaded_model
            loaded.users += 1
        try:
            yield loaded
        finally:
            with self._lock:
                loaded.users -= 1
                loaded.used_at = time.monotonic()
                if self._loaded_model is loaded and loaded.ready.done() and not loaded.is_ready:
                    self._loaded_model = None  # loading failed: the next call tries again

    def _idle(self, loaded: _LoadedBatcher) -> float | None:
        """Drop the model if it was idle for long enough; otherwise return the seconds until the next check."""
        assert self._idle_timeout_s is not None
        with self._lock:
            if loaded.users:
                return self._idle_timeout_s
            remaining = loaded.used_at + self._idle_timeout_s - time.monotonic()
            if remaining > 0:
                return remaining
            if self._loaded_model is loaded:
                self._drop()
            return None

    def _drop(self) -> None:
        loaded, self._loaded_model = self._loaded_model, None
        if loaded is None:
            return
        if loaded.is_ready:
            self._ended = BatchStats.merge([self._ended, loaded.ready.result()[0].stats])
        loaded.shut_down()

    def _reset(self) -> None:
        """Reset in a forked child, which does not inherit threads."""
        self._lock = threading.Lock()
        self._loaded_model = self._last_thread = None


Factory: TypeAlias = Callable[
    [],
    Batcher[RecordT, ResultT]
    | Awaitable[Batcher[RecordT, ResultT]]
    | Iterator[Batcher[RecordT, ResultT]]
    | AsyncIterator[Batcher[RecordT, ResultT]],
]
"""Returns the batcher, or yields it and then cleans up; may be async."""


@overload
def reusable(factory: Factory[RecordT, ResultT], /) -> Reusable[RecordT, ResultT]: ...


@overload
def reusable(
    *, idle_timeout_s: float | None = None
) -> Callable[[Factory[RecordT, ResultT]], Reusable[RecordT, ResultT]]: ...


def reusable(
    factory: Factory[RecordT, ResultT] | None = None, /, *, idle_timeout_s: float | None = None
) -> Reusable[RecordT, ResultT] | Callable[[Factory[RecordT, ResultT]], Reusable[RecordT, ResultT]]:
    """Share one batcher between all calls of the process; `factory` loads the model and returns the batcher.

        @headrace.reusable(idle_timeout_s=300)
        def embed():
            model = load_model()
            return TokenBatcher(inference_fn=model.encode, target_batch_tokens=8_000)

        vector = await embed("one text")

    `factory` returns the batcher, or yields it and then cleans up; it may be async. It runs once, on a separate thread,
    even with concurrent calls. After `idle_timeout_s` idle seconds the model is dropped.
    Inside a Ray actor or a Flyte task, each worker process has one model.

    Raises:
        ConfigError: a parameter is out of range.
    """

    def made(factory: Factory[RecordT, ResultT]) -> Reusable[RecordT, ResultT]:
        return registered(factory, functools.partial(Reusable, factory, idle_timeout_s))

    return made if factory is None else made(factory)


def registered(
    factory: Factory[RecordT, ResultT], make: Callable[[str], Reusable[RecordT, ResultT]]
) -> Reusable[RecordT, ResultT]:
    """Make the process's instance for a factory, of its name."""
    place = getattr(factory, "__qualname__", _LOCAL)
    # Functions defined within a function may share a name but differ in their closures.
    name = uuid.uuid4().hex if _LOCAL in place else f"{factory.__module__}:{place}"
    made = make(name)
    with _instances_lock:
        _instances[name] = made  # reloading a module replaces it
    return made


def _unpickle(name: str, make: Callable[[str], AnyReusable]) -> AnyReusable:
    with _instances_lock:
        if name not in _instances:
            _instances[name] = make(name)
        return _instances[name]


async def _wait_loaded(loaded: Loading) -> OnLoop:
    found = await attempt_async(asyncio.wrap_future(loaded.ready))
    if isinstance(found, Raised):
        raise own_copy(found.cause) from found.cause  # one copy per caller
    return found


async def _collect(
    batcher: Batcher[RecordT, ResultT], records: list[RecordT], return_exceptions: bool
) -> list[ResultT]:
    return [result async for result in batcher.map(records, return_exceptions=return_exceptions)]


@atexit.register
def _close_all() -> None:
    for loaded in list(_instances.values()):
        if loaded.is_loaded:
            loaded.close()


def _reset_all() -> None:
    for loaded in _instances.values():
        loaded._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
