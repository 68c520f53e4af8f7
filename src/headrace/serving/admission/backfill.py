"""Bulk work in the gaps between online requests, limited so that requests keep their latency target."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable

from headrace.batching.batcher import Batcher
from headrace.batching.policy.cost import BatchCost, BatchLimits
from headrace.batching.policy.cost_line import CostLine
from headrace.engines.base import Chunks, Engine, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import NotRunningError, StoppedError
from headrace.events import BatchDone, BatchFormed, Event, RequestDone, StepDone
from headrace.serving.admission.waiting import run_chunks
from headrace.serving.tokens import TokenCounter

BULK = -6
"""Priority of bulk work. Requests go first, but bulk work that has waited a minute longer precedes them, so that it is
never starved."""
_QUEUED_BATCHES = 2
"""Full batches of bulk work to queue if there is no latency target."""
_ROUTES = frozenset({"/generate", "/v1/embeddings", "/classify"})
"""Routes of batch engines to which the latency target applies."""
_LEAST, _MOST = 0.1, 2.0
"""Bounds of a margin: bulk work never stops, and a wrong margin is corrected within an hour."""
_LATE, _STEP = 0.005, 0.04
"""Share of the requests that may miss the target, and how far each moves the margin."""
_ONLINE_WINDOW_S = 30.0
"""Seconds for which the size of online batches is remembered."""


class Backfill:
    """Submits bulk records to the batcher in FIFO order, within the latency target of online requests.

    A request that arrives just after a bulk batch has started waits for that batch and then for its own. With a target,
    a bulk batch may therefore take only the part of the target that an online batch leaves, or half of the target if
    both share batches. `Margin` adjusts the planned share of the target to the share of requests that miss it.

    Args:
        engine: its profile decides whether cost per batch or slots are limited.
        target_s: latency target of requests; None for no target.
        held: returns the number of requests accepted and not answered.
    """

    def __init__(
        self,
        engine: Engine,
        batcher: Batcher[object, object],
        target_s: float | None,
        held: Callable[[], int],
        tokens: TokenCounter | None = None,
    ) -> None:
        self._profile = profile_of(engine)
        self._per_batch = self._profile.runs_batches
        self._batcher = batcher
        self._target_s = target_s
        self._held = held
        self._tokens = tokens
        self.model = CostLine(decay=0.98)  # the last 50 batches or so count
        self.margin = Margin()
        self._online = RecentMaximum(_ONLINE_WINDOW_S)
        self._queue: deque[tuple[asyncio.Future[None], float]] = deque()
        self._admitted: dict[asyncio.Future[None] | asyncio.Future[object], float] = {}
        self.done = 0
        """Bulk records answered."""

    @property
    def waiting(self) -> int:
        """Bulk records not submitted yet."""
        return len(self._queue)

    async def run(self, entry: Prepared[object], caller: Hashable) -> object:
        """The output of one bulk record. Cancelling the call cancels the record.

        Raises:
            Exception: the record failed.
        """
        if isinstance(entry.payload, Chunks):
            return await run_chunks(entry.payload, lambda part, cost: self._run(Prepared(part, cost), caller))
        return await self._run(entry, caller)

    async def _run(self, entry: Prepared[object], caller: Hashable) -> object:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((turn, entry.cost))
        if len(self._queue) == 1:  # otherwise there was no room for the records before it
            self._admit()
        try:
            await turn
        except (asyncio.CancelledError, StoppedError):
            self._admitted.pop(turn, None)  # cancelled just after it was admitted
            self._admit()
            raise
        try:
            future = self._batcher.submit_nowait(
                entry.payload, estimated_cost=self._profile.kind.estimate(entry.cost), priority=BULK, caller=caller
            )
        except NotRunningError as error:  # the drain timed out; not an error of the record
            self._admitted.pop(turn, None)
            raise StoppedError("the server is stopping") from error
        self._admitted[future] = entry.cost
        self._admitted.pop(turn, None)
        future.add_done_callback(self._on_done)
        try:
            result = await future
        finally:
            future.cancel()
        self.done += 1
        if self._tokens is not None:
            self._tokens.count((result,), entry.cost)
        return result

    def refuse(self) -> None:
        """Fail records not submitted yet, because the server is stopping."""
        for turn, _ in self._queue:
            if not turn.done():
                turn.set_exception(StoppedError("the server is stopping"))
        self._queue.clear()

    def listen(self, event: Event) -> None:
        """Learn from batcher events, and submit more when there is room."""
        match event:
            case BatchFormed():
                self._admit()
            case BatchDone():
                self.model.add(event.padded_cost, event.duration_s)
                if self._held() and not self._admitted:
                    self._online.add(event.padded_cost, time.monotonic())
            case RequestDone():
                if self._target_s is not None and event.status == 200 and event.route in _ROUTES:
                    self.margin.observe(missed=event.duration_s - event.waited_s > self._target_s)
            case StepDone():
                self.model.add(event.size, event.duration_s)
                self._admit()

    def allowance(self) -> float:
        """How much bulk work may hold: queued cost for batch engines, slots for others."""
        profile, now = self._profile, time.monotonic()
        if not self._per_batch:
            self._online.add(self._held(), now)
            # Keep free the recent maximum of slots that requests held, plus one.
            online = self._online.largest(now)
            slots = profile.max_in_flight
            return slots if self._target_s is None or not online else max(slots - online - 1, 1)
        full = profile.batch_cost
        if self._target_s is None:
            return _QUEUED_BATCHES * full
        if not self.model.known:
            return 1.0  # one record at a time until batch times are known
        online, planned_s = self._online.largest(now), self._target_s * self.margin.value
        if profile.pads:  # records of similar length share batches, so online and bulk work do not
            return min(self.model.cost_within(planned_s - self.model.seconds(online)), full)
        # Both the batch that a request waits for and its own batch contain bulk work.
        return min(self.model.cost_within((planned_s - self.model.line[0] * online) / 2), full)

    def _admit(self) -> None:
        """Submit records while there is room. One is always allowed, whatever the target."""
        if not self._queue:
            return
        per_batch = self._per_batch
        held = BatchCost(BatchLimits(self.allowance(), sys.maxsize, padded=self._profile.pads))
        for future, cost in self._admitted.items():
            # For batch engines, records in a batch no longer count; slots are held until the record ends.
            if not per_batch or getattr(future, "holder", True):
                held.add(cost if per_batch else 1)
        while self._queue:
            turn, cost = self._queue[0]
            if turn.done():
                self._queue.popleft()
                continue
            each = cost if per_batch else 1
            if not held.room(each):
                return
            held.add(each)
            self._queue.popleft()
            self._admitted[turn] = cost
            turn.set_result(None)

    def _on_done(self, future: asyncio.Future[object]) -> None:
        self._admitted.pop(future, None)
        if future.cancelled() or not self._per_batch:
            self._admit()  # for batch engines, BatchFormed has already freed the room of a record in a batch


class Margin:
    """The factor of a latency target to plan with, so that at most the share `_LATE` of requests miss the target.

    It accounts for delays other than batches. A miss lowers the factor and a hit raises it, in steps that balance at
    that share: quantile tracking by stochastic approximation (Robbins and Monro, 1951).
    """

    def __init__(self) -> None:
        self.value = 1.0
        """Factor of the target."""

    def observe(self, *, missed: bool) -> None:
        change = _LATE - 1 if missed else _LATE
        self.value = min(max(self.value + _STEP * change, _LEAST), _MOST)


class RecentMaximum:
    """The maximum of the last one to two periods. Callers pass the time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._before = self._now = 0.0
        self._since = 0.0

    def add(self, value: float, at: float) -> None:
        self._rotate(at)
        self._now = max(self._now, value)

    def largest(self, at: float) -> float:
        self._rotate(at)
        return max(self._now, self._before)

    def _rotate(self, at: float) -> None:
        if at - self._since >= self._period_s:
            self._before = self._now if at - self._since < 2 * self._period_s else 0.0
            self._now, self._since = 0.0, at
