"""Calls `process_fn` on the event loop or on a worker thread."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import queue
import threading
import types
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from time import monotonic
from typing import Any, TypeVar, cast

from headrace.batching.callables import ProcessFn, is_async
from headrace.batching.foreign_calls import Foreign, Raised, attempt
from headrace.batching.results import received

ResultT = TypeVar("ResultT")

BLOCKED_LOOP_S = 0.1
"""An `async def` blocks the event loop if it runs this long without awaiting, in seconds."""
_EXIT_S = 5.0
"""Seconds that a call may still take when the interpreter exits."""


class BlockedLoopWarning(RuntimeWarning):
    """Something blocked the event loop, which stops all else on it: an async `process_fn`, or `headrace.run`."""


@types.coroutine
def watched(
    coroutine: Coroutine[object, None, ResultT], noticed: Callable[[float], None]
) -> Generator[object, None, ResultT]:
    """Await `coroutine`; report each step that blocked the loop for `BLOCKED_LOOP_S` or longer."""
    step: Callable[[Any], object] = coroutine.send
    value: object = None
    while True:
        started = monotonic()
        try:
            waited_for = step(value)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        finally:
            if (kept := monotonic() - started) >= BLOCKED_LOOP_S:
                noticed(kept)
        try:
            step, value = coroutine.send, (yield waited_for)
        except BaseException as exc:  # noqa: BLE001  # thrown in, such as a cancellation
            step, value = coroutine.throw, exc


class WorkerThread:
    """A thread that runs blocking calls one at a time, so that a model is always called from the same thread.

    It is a daemon thread: a call that never returns does not block `stop()`, and the interpreter's exit for some
    seconds only.
    """

    def __init__(self, name: str) -> None:
        self.own_loop = asyncio.Runner()
        """Runs coroutines in this thread; used only there, and created on first use."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        _threads.add(self)

    def run(self, loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> asyncio.Future[object]:
        """Run `fn`; returns a future of `loop`. An exception is the future's *result*, as a `Raised`.

        (As the future's exception, `StopIteration` and `KeyboardInterrupt` have a special meaning to the loop.)
        """
        future: asyncio.Future[object] = loop.create_future()

        def call() -> None:
            outcome = attempt(fn)  # an error fails the batch, not the thread
            try:
                loop.call_soon_threadsafe(_finish, future, outcome)
            except RuntimeError:
                pass  # the loop was closed meanwhile

        self._calls.put(call)
        return future

    def close(self) -> None:
        """End the thread once its current call returns; does not wait."""
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread must not keep a batch alive
        self.own_loop.close()


_threads: weakref.WeakSet[WorkerThread] = weakref.WeakSet()


@atexit.register
def finish_calls() -> None:
    """End all threads after their current calls. Python aborts the process if it ends a thread in C++ code."""
    threads, ends = list(_threads), monotonic() + _EXIT_S
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join(max(ends - monotonic(), 0.0))


def _finish(future: asyncio.Future[object], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)


class CallTimer:
    """How long the calls for one batch ran on their thread."""

    __slots__ = ("on_thread", "seconds")

    def __init__(self) -> None:
        self.on_thread = False
        self.seconds = 0.0

    def time(self, call: Callable[[], object]) -> object:
        """Call, and count its time."""
        self.on_thread = True
        started = monotonic()
        try:
            return call()
        finally:
            self.seconds += monotonic() - started

    def handed_s(self, duration_s: float) -> float:
        """How much of a duration on the event loop was spent outside of the calls; 0 if they ran on the loop."""
        return max(duration_s - self.seconds, 0.0) if self.on_thread else 0.0


class ProcessCaller:
    """Calls `process_fn` on the event loop or a worker thread.

    An `async def` runs on the event loop, or with `offload` on a separate loop in a worker thread. Any other function
    is assumed to block and runs in a worker thread; a coroutine that it returns runs where an `async def` would.
    """

    def __init__(self, fn: ProcessFn, *, offload: bool, name: str) -> None:
        self._fn = fn
        self._foreign = Foreign("process_fn")
        self._name = name
        self._offload = offload
        self.cancellable = is_async(fn) and not offload
        """Whether a call can be cancelled: a coroutine on the loop can, a thread cannot."""
        self._idle: list[WorkerThread] = []
        self._started = 0
        self._noticed = False

    async def call(self, records: Sequence[object], timer: CallTimer) -> Sequence[object]:
        """Return the results of `process_fn` for `records`, which nobody else can change; raises what it raises.

        They are a list. For joined columns they may be a NumPy array.

        Raises:
            BadResultError: it returned the wrong type or number of results.
            ProcessError: it raised an exception with a special meaning to the loop, such as `KeyboardInterrupt` or its
                own `CancelledError`, which is the `__cause__`.
        """
        with self._foreign:
            if not self.cancellable:
                return await self._call_in_thread(records, timer)
            size = len(records)  # it may change the list
            return received(await watched(self._fn(records), self._blocked), size, whole=type(records) is not list)

    async def _call_in_thread(self, records: Sequence[object], timer: CallTimer) -> Sequence[object]:
        size = len(records)
        if not self._idle:
            self._started += 1
            self._idle.append(WorkerThread(f"{self._name}-{self._started}"))
        worker = self._idle.pop()
        work = functools.partial(timer.time, functools.partial(self._run_in_thread, worker, records))
        running = worker.run(asyncio.get_running_loop(), work)
        try:
            outcome = await running
        finally:
            if running.done() and not running.cancelled():
                self._idle.append(worker)
            else:  # cancelled while the call continues: its thread ends after it and is replaced
                worker.close()
        if isinstance(outcome, Raised):
            with self._foreign:
                raise outcome.cause
        if not isinstance(outcome, Awaitable):
            return cast("Sequence[object]", outcome)  # `_run_in_thread` returns nothing else
        timer.on_thread = False
        outcome = await (watched(outcome, self._blocked) if inspect.iscoroutine(outcome) else outcome)
        return received(outcome, size, whole=type(records) is not list)

    def close(self) -> None:
        """End the worker threads; waits briefly for idle ones."""
        for worker in self._idle:
            worker.close()
        for worker in self._idle:
            worker.join(1.0)
        self._idle.clear()

    def _run_in_thread(self, worker: WorkerThread, records: Sequence[object]) -> object:
        """The results, taken over before the next call can change them; or an awaitable for the event loop."""
        size = len(records)
        outcome = self._fn(records)
        if self._offload and inspect.iscoroutine(outcome):
            outcome = worker.own_loop.run(outcome)
        if isinstance(outcome, Awaitable):
            return outcome
        return received(outcome, size, whole=type(records) is not list)

    def _blocked(self, seconds: float) -> None:
        if self._noticed:
            return
        self._noticed = True
        name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
        warnings.warn(
            f"{name} blocked the event loop for {seconds:.2f} s: nothing is loaded or batched meanwhile. "
            "Pass offload=True to run it on a separate thread, or make it a plain function",
            BlockedLoopWarning,
            stacklevel=2,
        )
