"""An event loop that does not sleep: when nothing is left to do, its clock jumps to the next timer.

Worker threads are real. While one of them works for the loop the clock stands still, so that a test sees the same order
of events on every machine (which is why this is not `looptime`: version 0.9 does not know of threads). When nothing can
ever happen again the loop says so at once: a test of something that hangs fails, it does not hang.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from headrace.batching.dispatch.offload import WorkerThread

ResultT = TypeVar("ResultT")


class HangError(AssertionError):
    """Everybody waits, and nobody is left who could end it."""


class _Selector(selectors.DefaultSelector):
    """Waits for real events where a thread is to bring one, and jumps over what is mere time."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop.awaited and timeout != 0:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout is None:
            raise HangError("no task can go on, no timer is set and no thread is at work")
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves only when there is nothing else to do."""

    def __init__(self, now: float = 0.0) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = now
        self.awaited: set[asyncio.Future[Any]] = set()
        """What threads are working on. A test whose thread is stuck on purpose clears it, so that time goes on."""
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """As usual, while time waits for the answer."""
        return self.await_thread(super().run_in_executor(executor, func, *args))

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As usual: this too waits for a thread."""
        threads = self.await_thread(self.create_future())
        await super().shutdown_default_executor()
        threads.cancel()

    def await_thread(self, answer: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """Let time stand still until a thread has given this answer, or nobody wants it any more."""
        self.awaited.add(answer)
        answer.add_done_callback(self.awaited.discard)
        return answer


class VirtualTime:
    """Runs coroutines, each on an event loop of its own, one after the other on one virtual clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self.problems: list[str] = []
        """What a loop was told about exceptions that nobody has seen."""

    def __call__(self, main: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `main` to its end, then cancel what is left, as `asyncio.run` does."""
        loop = self.new_loop()
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                return runner.run(main)
        finally:
            self._now = loop.now

    def new_loop(self) -> VirtualTimeLoop:
        """A loop that the caller runs and closes."""
        loop = VirtualTimeLoop(self._now)
        loop.set_exception_handler(lambda _, context: self.problems.append(str(context)))
        return loop


_real_run = WorkerThread.run


def _run_awaited(worker: WorkerThread, loop: asyncio.AbstractEventLoop, *call: Any) -> asyncio.Future[Any]:
    answer = _real_run(worker, loop, *call)
    return loop.await_thread(answer) if isinstance(loop, VirtualTimeLoop) else answer


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualTime]:
    """`virtual(main())` runs a coroutine in virtual time. No exception may get lost on the way."""
    monkeypatch.setattr(WorkerThread, "run", _run_awaited)
    time = VirtualTime()
    gc.freeze()  # so that the collection below looks at what this test has made, which takes no time
    yield time
    gc.collect()  # futures complain of exceptions nobody saw when they go
    assert time.problems == []


def now() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()
