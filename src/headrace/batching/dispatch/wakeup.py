"""Lets a dispatcher sleep until its queue changes."""

from __future__ import annotations

import asyncio


class Wakeup:
    """One sleeping task that any code on the event loop may wake."""

    __slots__ = ("sleeper",)

    def __init__(self) -> None:
        self.sleeper: asyncio.Future[None] | None = None
        """Not None while a dispatcher sleeps. `submit` checks it for every record."""

    async def sleep(self, until: float | None = None) -> None:
        """Return when woken, or at the time `until` on the loop's clock."""
        loop = asyncio.get_running_loop()
        self.sleeper = loop.create_future()
        timer = None if until is None else loop.call_at(until, self.wake)
        try:
            await self.sleeper
        finally:
            self.sleeper = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        if self.sleeper is not None and not self.sleeper.done():
            self.sleeper.set_result(None)
