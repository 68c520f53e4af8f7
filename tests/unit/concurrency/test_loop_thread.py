"""An event loop on a thread of its own: it runs what it is given, cancels what is left, and ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from headrace.concurrency.loop_thread import LoopThread


async def thread_name() -> str:
    return threading.current_thread().name


def test_a_coroutine_runs_on_the_thread() -> None:
    loop = LoopThread("test-loop")
    assert loop.run(thread_name()) == "test-loop"
    loop.close()


def test_closing_cancels_what_still_runs_and_ends_the_thread() -> None:
    loop = LoopThread("test-loop")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    running = loop.submit(forever())
    loop.run(asyncio.sleep(0))  # it has begun
    loop.close()
    assert cancelled.is_set() and running.cancelled()
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
    loop.close()


def test_cancelling_all_leaves_the_loop_running() -> None:
    loop = LoopThread("test-loop")
    running = loop.submit(asyncio.Event().wait())
    loop.run(asyncio.sleep(0))
    loop.cancel_all()
    with pytest.raises(CancelledError):
        running.result()
    assert loop.run(thread_name()) == "test-loop"
    loop.close()
