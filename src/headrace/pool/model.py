"""A model of a pool: its state, its requests and its counters."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

from headrace.errors import ConfigError
from headrace.pool.policy import ModelView, Phase, SleeperView

T = TypeVar("T")
AnyModel: TypeAlias = Any
"""What the `load` of a model returned; its user knows its type."""

_FIRST_LOAD_S = 1.0
"""Expected loading time of a model that was never loaded."""


class ModelOptions(TypedDict, total=False):
    """Options of a model in a pool."""

    memory_bytes: float | None
    """What it takes; None to measure it when it is first loaded. Only for a pool with `memory_bytes`."""
    max_wait_s: float | None
    """Seconds that a request waits before this model takes the room of one that has requests too; None for twice the
    time that it takes to load."""
    idle_timeout_s: float | None
    """Unload it after this many seconds without use; None to keep it until others need its room."""
    load_timeout_s: float | None
    """Fail its requests if loading takes longer, and give its room to others if unloading does; 600 by default, None
    for no limit."""


@dataclass(frozen=True, slots=True)
class ModelStats:
    """What happened to a model so far."""

    phase: str
    """unloaded, loading, loaded, draining (it serves its last requests), unloading, asleep or dropping (it leaves host
    memory)."""
    loads: int
    failed_loads: int
    requests: int
    """Requests that got the model."""
    in_use: int
    """Requests and background work that use it now."""
    waiting: int
    """Requests and background work that wait for it."""
    wait_s: float
    """Seconds that requests have waited for the model, in sum."""
    longest_wait_s: float
    load_s: float
    """Expected loading time in seconds, learned from the last loads."""
    size: float | None
    """Measured or given memory in bytes; None if it is not known yet. 1 if the pool counts models."""
    wakes: int
    """How often it was woken from host memory; not counted as loads."""
    wake_s: float | None
    """Expected waking time in seconds, learned from the last times; None if it was never woken."""


class PooledModel(Generic[T]):
    """A model of a pool. Made by `ModelPool.add`."""

    def __init__(self, use: Callable[[str], AbstractAsyncContextManager[T]], name: str) -> None:
        self._use = use
        self.name = name

    def use(self) -> AbstractAsyncContextManager[T]:
        """Use the model in an `async with` block, as `ModelPool.use`."""
        return self._use(self.name)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request, or background work, that asks for a model."""

    arrived: float
    granted: asyncio.Future[None]
    leave: Callable[[], None] | None = None
    """Called when background work is to make room; None for a request."""


class PoolEntry:
    """A model of the pool, and its requests."""

    def __init__(
        self,
        name: str,
        load: Callable[[], object],
        size: float | None,
        limits: tuple[float | None, float | None, float | None],
    ) -> None:
        self.name = name
        self.load = load
        self.size = size
        self.max_wait_s, self.idle_timeout_s, self.load_timeout_s = limits
        self.phase = Phase.UNLOADED
        self.model: AnyModel = None
        self.rest: object = None
        """A generator that unloads the model when it continues."""
        self.loading: asyncio.Task[None] | None = None
        """The last load, which may have ended."""
        self.in_use = 0
        self.waiting: deque[Waiter] = deque()
        self.background: list[Callable[[], None]] = []
        """Background work that uses it now: what to call when it is to make room."""
        self.background_waiting: deque[Waiter] = deque()
        self.background_at = 0.0
        self.loaded_at = self.last_used = 0.0
        self.load_s = _FIRST_LOAD_S
        self.retry_at = 0.0
        self.error = ""
        self.failures = 0
        """Failed loads in a row."""
        self.loads = self.failed_loads = self.requests = self.wakes = 0
        self.wake_s: float | None = None
        self.drops = False
        """Whether it is to leave host memory too."""
        self.wait_s = self.longest_wait_s = 0.0

    def view(self, budget: float) -> ModelView:
        """What the policy knows of the model; its size is the whole budget while it is not known."""
        for queue in (self.waiting, self.background_waiting):
            while queue and queue[0].granted.done():
                queue.popleft()  # cancelled
        return ModelView(
            self.name,
            self.phase,
            budget if self.size is None else self.size,
            self.load_s if self.wake_s is None or self.phase is Phase.UNLOADED else self.wake_s,
            self.max_wait_s,
            self.idle_timeout_s,
            self.in_use,
            self.waiting[0].arrived if self.waiting else None,
            self.loaded_at,
            self.last_used,
            len(self.background),
            self.background_waiting[0].arrived if self.background_waiting else None,
            self.background_at,
        )

    @property
    def is_used(self) -> bool:
        """Whether a request or background work uses it."""
        return bool(self.in_use or self.background)

    @property
    def is_wanted(self) -> bool:
        """Whether a request or background work waits for it."""
        return bool(self.waiting or self.background_waiting)

    def drain(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let it serve its last requests, and ask background work to leave."""
        self.phase = Phase.DRAINING
        for leave in self.background:
            loop.call_soon(leave)

    def sleeper(self) -> SleeperView:
        """What the choice of sleeping models knows of it."""
        saves_s = float("inf") if self.wake_s is None else self.load_s - self.wake_s
        return SleeperView(self.name, self.size or 1.0, saves_s, self.last_used)

    def loaded(self, seconds: float, *, woken: bool) -> None:
        """Learn from a load, or a waking, that took `seconds`."""
        if woken:
            self.wake_s = seconds if self.wake_s is None else (self.wake_s + seconds) / 2
            self.wakes += 1
        else:
            self.load_s = seconds if not self.loads else (self.load_s + seconds) / 2
            self.loads += 1
        self.failures = 0

    def grant(self, waiter: Waiter, now: float) -> None:
        """Let one use the model, now that it is loaded."""
        waiter.granted.set_result(None)
        if waiter.leave is not None:
            self.background.append(waiter.leave)
            return
        self.in_use += 1
        self.requests += 1
        self.wait_s += now - waiter.arrived
        self.longest_wait_s = max(self.longest_wait_s, now - waiter.arrived)

    def release(self, waiter: Waiter, now: float) -> None:
        """End its use of the model."""
        if waiter.leave is not None:
            self.background.remove(waiter.leave)
            self.background_at = now
        else:
            self.in_use -= 1
            self.last_used = now

    def waiters(self) -> Iterator[Waiter]:
        """Take all that wait, requests first."""
        for queue in (self.waiting, self.background_waiting):
            while queue:
                if not (one := queue.popleft()).granted.done():
                    yield one

    def fail(self, error: Exception) -> None:
        for waiter in self.waiters():
            waiter.granted.set_exception(error)

    def fail_requests(self, error: Exception) -> None:
        for waiter in self.waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)

    def check_size(self, budget: float) -> None:
        """Raise ConfigError if it is larger than the pool."""
        if self.size is not None and self.size > budget:
            raise ConfigError(
                f"model {self.name!r} takes {self.size:,.0f} bytes, and the pool has {budget:,.0f}: "
                "raise memory_bytes of the pool"
            )

    def stats(self) -> ModelStats:
        return ModelStats(
            self.phase.value,
            self.loads,
            self.failed_loads,
            self.requests,
            self.in_use + len(self.background),
            sum(not one.granted.done() for one in (*self.waiting, *self.background_waiting)),
            self.wait_s,
            self.longest_wait_s,
            self.load_s,
            self.size,
            self.wakes,
            self.wake_s,
        )
