"""Health checks of a worker: one that does not answer counts as dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from headrace.errors import WorkerDiedError

T = TypeVar("T")

PULSE_S = 5.0
"""Seconds between health checks of a worker."""
MISSED = 6
"""Health checks without an answer until a worker counts as dead. The cluster itself may wait for minutes."""
MISSED_LOADING = 60
"""The same while the model loads, which can block the worker's event loop."""


class Heartbeat:
    """Asks a worker for its clock.

    Args:
        clock: the worker's `time.monotonic()`; raises WorkerDiedError if the worker is known to be dead.
    """

    def __init__(self, name: Callable[[], str], clock: Callable[[], Awaitable[float]]) -> None:
        self._name = name
        self._clock = clock

    async def clock_offset(self) -> float:
        """Seconds by which this process's clock is ahead of the worker's.

        Raises:
            WorkerDiedError: the worker does not answer.
        """
        sent = time.monotonic()
        remote = await self._beat(MISSED)
        return (sent + time.monotonic()) / 2 - remote

    async def watch(self, missed: int | None = None) -> NoReturn:
        """Check the worker's health until it misses `missed` checks (by default `MISSED`).

        Raises:
            WorkerDiedError: the worker died or does not answer.
        """
        while True:
            await asyncio.sleep(PULSE_S)
            await self._beat(MISSED if missed is None else missed)

    async def unless_silent(self, reply: Awaitable[T]) -> T:
        """Await a reply of a worker that loads a model.

        Raises:
            WorkerDiedError: the worker misses `MISSED_LOADING` health checks.
        """
        answer, watch = asyncio.ensure_future(awaited(reply)), asyncio.ensure_future(self.watch(MISSED_LOADING))
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else watch.result()
        finally:
            answer.cancel()
            watch.cancel()
            await asyncio.gather(answer, watch, return_exceptions=True)  # both may have failed

    async def _beat(self, missed: int) -> float:
        answer = asyncio.ensure_future(awaited(self._clock()))
        try:
            for _ in range(missed):  # one by one, so that a pause of this process counts only once
                if (await asyncio.wait({answer}, timeout=PULSE_S))[0]:
                    return answer.result()
        finally:
            answer.cancel()
        raise WorkerDiedError(f"{self._name()} has not answered for {missed * PULSE_S:g} s")


async def awaited(reply: Awaitable[T]) -> T:
    """The result of any awaitable, as a coroutine."""
    return await reply
