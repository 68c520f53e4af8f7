"""`@reusable`: one model and one batcher for a whole process, whoever calls and from whichever thread or event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import inspect
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar, Unpack, overload

from headrace.batching.batcher import Batcher, SubmitOptions
from headrace.batching.blocking import current_loop
from headrace.batching.options import optional
from headrace.batching.pending import own_copy
from headrace.batching.stats import BatchStats
from headrace.batching.tasks import current_task
from headrace.concurrency.loop_thread import run_on_thread
from headrace.errors import ConfigError

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
AnyT = TypeVar("AnyT")

_LOCAL = "<locals>"
_of_process: dict[str, Reusable[Any, Any]] = {}
"""What this process holds, by name: a worker may unpickle the same one many times."""
_guard = threading.Lock()


class _LoadedModel:
    """A model that is being loaded, at work or on its way out: a thread with an event loop, and the batcher on it."""

    def __init__(
        self,
        factory: Callable[[], Any],
        before: threading.Thread | None,
        idle_check: Callable[[_LoadedModel], float | None] | None,
    ) -> None:
        self.users = 0
        self.used_at = 0.0
        """When the last of them left, on `time.monotonic()`'s scale."""
        self.ready: Future[tuple[Batcher[Any, Any], asyncio.AbstractEventLoop]] = Future()
        self.ready.set_running_or_notify_cancel()  # a caller who leaves must not cancel it for the others
        self._factory = factory
        self._before = before
        self._idle_check = idle_check
        self._left = threading.Event()
        self._leave: Callable[[], object] = self._left.set
        # The model serves all callers: it must not see the context variables of the first.
        self.thread = run_on_thread(self._run(), "headrace-reusable", contextvars.Context())

    @property
    def is_ready(self) -> bool:
        """Whether the model is there."""
        return self.ready.done() and self.ready.exception() is None

    def leave(self) -> None:
        """Answer what waits, then end; from any thread."""
        self._left.set()
        self._leave()

    async def _run(self) -> None:
        if self._before is not None:
            self._before.join()  # there may be no room for two; nothing else runs on this loop
        try:
            await self._serve()
        except BaseException as error:  # whoever waits for the model hears why
            if self.ready.done():
                raise
            self.ready.set_exception(error)

    async def _serve(self) -> None:
        made = self._factory()
        closing = made if inspect.isgenerator(made) else None
        try:
            made = next(closing) if closing is not None else await made if inspect.isawaitable(made) else made
            if not isinstance(made, Batcher):
                raise ConfigError(f"the function returned {made!r}; it must return or yield a batcher")
            if not made.is_running:
                await made.start()
            loop, left = asyncio.get_running_loop(), asyncio.Event()
            self._leave = functools.partial(loop.call_soon_threadsafe, left.set)
            self.ready.set_result((made, loop))
            if not self._left.is_set():
                await self._wait_to_leave(left)
            await made.stop()
            if closing is not None:
                next(closing, None)  # what the function does after its yield
        finally:
            if closing is not None:
                closing.close()

    async def _wait_to_leave(self, left: asyncio.Event) -> None:
        """Wait until asked to leave, or until nobody has used it for long enough."""
        look_in = None if self._idle_check is None else self._idle_check(self)
        while True:
            try:
                async with asyncio.timeout(look_in):
                    await left.wait()
                return
            except TimeoutError:
                assert self._idle_check is not None
                if (look_in := self._idle_check(self)) is None:
                    return


class Reusable(Generic[RecordT, ResultT]):
    """Calls share one batcher, which the first of them loads and the process keeps.

    `await it(record)` from any event loop, `it.blocking(record)` from any thread, `await it.map(records)` for many.
    """

    def __init__(self, factory: Callable[[], Any], idle_timeout_s: float | None, name: str) -> None:
        functools.update_wrapper(self, factory)
        self._factory = factory
        self._idle_timeout_s = optional("idle_timeout_s", idle_timeout_s, above=0)
        self._name = name
        self._lock = threading.Lock()
        self._held: _LoadedModel | None = None
        self._last: threading.Thread | None = None
        self._ended = BatchStats()

    def __reduce__(self) -> str | tuple[Any, ...]:
        """In another process it is that process's own one, however often it is sent there."""
        module, name = self._factory.__module__, self.__qualname__  # type: ignore[attr-defined]
        if module != "__main__" and _LOCAL not in name:
            return str(name)
        return _found, (self._name, self._factory, self._idle_timeout_s)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def __call__(self, record: RecordT, **options: Unpack[SubmitOptions]) -> ResultT:
        """The result for one record; options are those of `Batcher.submit`.

        Raises:
            Exception: what loading raised, for each who waited for it; the next call tries anew.
        """
        options.setdefault("caller", current_task(asyncio.get_running_loop()))
        with self._used() as held:
            batcher, _ = await _loaded(held)
            result: ResultT = await asyncio.wrap_future(batcher.submit_threadsafe(record, **options))
            return result

    async def map(self, records: Iterable[RecordT], *, return_exceptions: bool = False) -> list[ResultT]:
        """The results for many records, in order; with `return_exceptions`, exceptions in the place of some."""
        with self._used() as held:
            batcher, loop = await _loaded(held)
            call = _collect(batcher, list(records), return_exceptions)
            return await asyncio.wrap_future(_on(loop, call))

    def blocking(self, record: RecordT, *, timeout: float | None = None, **options: Unpack[SubmitOptions]) -> ResultT:
        """The result for one record, from a thread that may block; `timeout` seconds at most, loading included.

        Raises:
            ConfigError: called on an event loop.
        """
        if current_loop() is not None:
            raise ConfigError("blocking() would block the running event loop: await the call instead")
        with self._used() as held:
            ends = None if timeout is None else time.monotonic() + timeout
            batcher, _ = held.ready.result(timeout)
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            result: ResultT = batcher.submit_blocking(record, timeout=left, **options)
            return result

    @property
    def stats(self) -> BatchStats:
        """The counts of this process, of models that were dropped too."""
        with self._lock:
            held = self._held
            now = [held.ready.result()[0].stats] if held is not None and held.is_ready else []
            return BatchStats.merge([self._ended, *now])

    @property
    def is_loaded(self) -> bool:
        """Whether the model is there."""
        with self._lock:
            return self._held is not None and self._held.is_ready

    def close(self) -> None:
        """Answer what waits, drop the model, wait for that; the next call loads it anew. Safe to call twice."""
        with self._lock:
            self._drop()
            last = self._last
        if last is not None and last is not threading.current_thread():
            last.join()

    # -- life ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _used(self) -> Iterator[_LoadedModel]:
        with self._lock:
            if self._held is None:
                self._held = _LoadedModel(self._factory, self._last, self._idle if self._idle_timeout_s else None)
                self._last = self._held.thread
            held = self._held
            held.users += 1
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                held.used_at = time.monotonic()
                if self._held is held and held.ready.done() and not held.is_ready:
                    self._held = None  # it could not be loaded: the next call tries anew

    def _idle(self, held: _LoadedModel) -> float | None:
        """Drop the model if nobody has used it for long enough; else say in how many seconds to look again."""
        assert self._idle_timeout_s is not None
        with self._lock:
            if held.users:
                return self._idle_timeout_s
            remaining = held.used_at + self._idle_timeout_s - time.monotonic()
            if remaining > 0:
                return remaining
            if self._held is held:
                self._drop()
            return None

    def _drop(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        if held.is_ready:
            self._ended = BatchStats.merge([self._ended, held.ready.result()[0].stats])
        held.leave()

    def _forget(self) -> None:
        """Threads do not come along into a forked child: it begins with nothing."""
        self._lock = threading.Lock()
        self._held = self._last = None


Factory: TypeAlias = Callable[
    [],
    Batcher[RecordT, ResultT] | Awaitable[Batcher[RecordT, ResultT]] | Iterator[Batcher[RecordT, ResultT]],
]
"""What makes the batcher: plain, `async def`, or a generator that yields it and cleans up behind it."""


@overload
def reusable(factory: Factory[RecordT, ResultT], /) -> Reusable[RecordT, ResultT]: ...


@overload
def reusable(
    *, idle_timeout_s: float | None = None
) -> Callable[[Factory[RecordT, ResultT]], Reusable[RecordT, ResultT]]: ...


def reusable(factory: Any = None, /, *, idle_timeout_s: float | None = None) -> Any:
    """Keep what `factory` makes for all calls of the process: it loads a model and returns the batcher that feeds it.

        @headrace.reusable(idle_timeout_s=300)
        def embed():
            model = load_model()
            return TokenBatcher(inference_fn=model.encode, target_batch_tokens=8_000)

        vector = await embed("one text")

    `factory` may be plain, `async def`, or a generator that yields the batcher and cleans up behind it. It runs once,
    on a thread of its own, however many call at once; what is left over idle for `idle_timeout_s` seconds is dropped.
    Inside a Ray actor or a Flyte task the model is that of the worker process.

    Raises:
        ConfigError: a parameter is out of range.
    """
    if factory is None:
        return functools.partial(_reusable, idle_timeout_s=idle_timeout_s)
    return _reusable(factory, idle_timeout_s)


def _reusable(factory: Callable[[], Any], idle_timeout_s: float | None) -> Reusable[Any, Any]:
    if not callable(factory):
        raise ConfigError(f"the factory is {factory!r}; it must be a function that returns a batcher")
    place = getattr(factory, "__qualname__", _LOCAL)
    # One that was made within a function differs from its namesakes by what it has closed over.
    name = uuid.uuid4().hex if _LOCAL in place else f"{factory.__module__}:{place}"
    made: Reusable[Any, Any] = Reusable(factory, idle_timeout_s, name)
    with _guard:
        _of_process[name] = made  # a module that is loaded anew brings a new one
    return made


def _found(name: str, factory: Callable[[], Any], idle_timeout_s: float | None) -> Reusable[Any, Any]:
    with _guard:
        if name not in _of_process:
            _of_process[name] = Reusable(factory, idle_timeout_s, name)
        return _of_process[name]


async def _loaded(held: _LoadedModel) -> tuple[Batcher[Any, Any], asyncio.AbstractEventLoop]:
    try:
        return await asyncio.wrap_future(held.ready)
    except Exception as error:
        if held.is_ready:
            raise
        raise own_copy(error) from error  # each who waited gets one of their own


async def _collect(batcher: Batcher[Any, Any], records: list[Any], return_exceptions: bool) -> list[Any]:
    return [result async for result in batcher.map(records, return_exceptions=return_exceptions)]


def _on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, AnyT]) -> Future[AnyT]:
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


@atexit.register
def _close_all() -> None:
    for held in list(_of_process.values()):
        if held.is_loaded:
            held.close()


def _forget_all() -> None:
    for held in _of_process.values():
        held._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
