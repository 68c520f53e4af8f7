"""Ways to call `process_fn`: on the event loop, or off it on a thread that does nothing else."""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
import types
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from time import monotonic
from typing import Any

from headrace.batching.callables import is_async
from headrace.batching.tasks import ends_the_task
from headrace.errors import ProcessError, text_of

BLOCKED_LOOP_S = 0.1
"""An `async def` that keeps the event loop this long without awaiting blocks it, in seconds."""


class BlockedLoopWarning(RuntimeWarning):
    """An async `process_fn` blocked the event loop: nothing is loaded or batched meanwhile."""


@types.coroutine
def watched(coroutine: Coroutine[Any, Any, Any], noticed: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Await `coroutine`, and report the first step in which it kept the loop for `BLOCKED_LOOP_S` or longer."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        started = monotonic()
        try:
            waited_for = step(value)
        except StopIteration as end:
            return end.value
        finally:
            if (kept := monotonic() - started) >= BLOCKED_LOOP_S:
                noticed(kept)
        try:
            step, value = coroutine.send, (yield waited_for)
        except BaseException as exc:  # noqa: BLE001  # thrown in, such as a cancellation
            step, value = coroutine.throw, exc


class WorkerThread:
    """A thread that runs one blocking call after the other, so that a model always meets the same thread.

    A daemon: a call that never returns keeps neither `stop()` nor the interpreter's exit waiting.
    """

    def __init__(self, name: str) -> None:
        self.own_loop = asyncio.Runner()
        """For coroutines that are to run in this thread; used there alone, and made when it is first used."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, loop: asyncio.AbstractEventLoop, fn: Callable[[], Any]) -> asyncio.Future[Any]:
        """A future of `loop` for what `fn` returns or raises; an exception is the future's *result*.

        (As its exception, a `StopIteration` or `KeyboardInterrupt` would mean something to the loop.)
        """
        future: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                outcome: Any = fn()
            except BaseException as exc:  # noqa: BLE001  # the batch's to bear; the thread lives on
                outcome = Raised(exc)
            try:
                loop.call_soon_threadsafe(_finish, future, outcome)
            except RuntimeError:
                pass  # the loop was closed meanwhile: nobody waits

        self._calls.put(call)
        return future

    def close(self) -> None:
        """End the thread once its current call returns; does not wait."""
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, `timeout` seconds at most."""
        self._thread.join(timeout)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread holds on to no batch
        self.own_loop.close()


class Raised:
    """An exception that crosses a thread as a value."""

    __slots__ = ("cause",)

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


def _finish(future: asyncio.Future[Any], outcome: Any) -> None:
    if not future.done():
        future.set_result(outcome)


class ProcessCaller:
    """Calls `process_fn` in the way that suits it.

    An `async def` runs on the event loop, or with `offload` on a loop of its own in a worker thread. Anything else is
    taken to block and runs in a worker thread; a coroutine that it returns runs where an `async def` would.
    """

    def __init__(self, fn: Callable[[list[Any]], Any], *, offload: bool, name: str) -> None:
        self._fn = fn
        self._name = name
        self._offload = offload
        self._on_loop = is_async(fn) and not offload
        self._idle: list[WorkerThread] = []
        self._started = 0
        self._noticed = False

    @property
    def cancellable(self) -> bool:
        """Whether a call can be ended from here: a coroutine can, a thread cannot."""
        return self._on_loop

    async def call(self, records: list[Any]) -> Any:
        """What `process_fn` returns for `records`; raises what it raises.

        Raises:
            ProcessError: it raised something that would mean something to the loop, such as `KeyboardInterrupt` or a
                `CancelledError` of its own; that is the `__cause__`.
        """
        try:
            return await (self._call_on_loop(records) if self._on_loop else self._call_in_thread(records))
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # this call is given up
            raise ProcessError("process_fn raised CancelledError, though nobody cancelled it") from exc
        except Exception:
            raise
        except BaseException as exc:
            if ends_the_task(exc):
                raise
            raise ProcessError(f"process_fn raised {type(exc).__name__}: {text_of(exc)}") from exc

    async def _call_on_loop(self, records: list[Any]) -> Any:
        return await watched(self._fn(records), self._blocked)

    async def _call_in_thread(self, records: list[Any]) -> Any:
        worker = self._idle.pop() if self._idle else self._new_worker()
        running = worker.run(asyncio.get_running_loop(), functools.partial(self._run_in_thread, worker, records))
        try:
            outcome = await running
        except BaseException:  # given up, while the call goes on: its thread ends with it, a new one takes its place
            worker.close()
            raise
        self._idle.append(worker)
        if isinstance(outcome, Raised):
            if isinstance(outcome.cause, StopIteration):  # which a coroutine cannot raise
                raise ProcessError("process_fn raised StopIteration") from outcome.cause
            raise outcome.cause
        if inspect.iscoroutine(outcome):
            return await watched(outcome, self._blocked)
        return await outcome if isinstance(outcome, Awaitable) else outcome

    def close(self) -> None:
        """End the worker threads, waiting a moment for those that are idle."""
        for worker in self._idle:
            worker.close()
        for worker in self._idle:
            worker.join(1.0)
        self._idle.clear()

    def _new_worker(self) -> WorkerThread:
        self._started += 1
        return WorkerThread(f"{self._name}-{self._started}")

    def _run_in_thread(self, worker: WorkerThread, records: list[Any]) -> Any:
        outcome = self._fn(records)
        return worker.own_loop.run(outcome) if self._offload and inspect.iscoroutine(outcome) else outcome

    def _blocked(self, seconds: float) -> None:
        if self._noticed:
            return
        self._noticed = True
        name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
        warnings.warn(
            f"{name} kept the event loop for {seconds:.2f} s without awaiting: nothing is loaded or batched meanwhile. "
            "Pass offload=True to run it on a thread of its own, or make it a plain function",
            BlockedLoopWarning,
            stacklevel=2,
        )
