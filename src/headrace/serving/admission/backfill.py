"""Bulk work in the gaps between requests: no more of it waits for the next batch than requests can bear behind it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from headrace.batching.batcher import Batcher
from headrace.engines.base import AnyEngine, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import NotRunningError, StoppedError
from headrace.events import BatchDone, BatchFormed, Event, RequestDone, StepDone
from headrace.serving.admission.pacing import Margin, Recent, TimeModel
from headrace.serving.tokens import Tokens

BULK = -6
"""Priority of bulk work: a request goes before what has waited a minute less. What waits longer than that goes first,
so that no stream of requests holds bulk work up for ever."""
_AHEAD = 2
"""Full batches of bulk work that wait where no latency is promised."""
_ROUTES = frozenset({"/generate", "/v1/embeddings", "/classify"})
"""Requests that the target is about, of a model that works in batches."""
_LATE_S = 30.0
"""How long the size of the requests' batches is remembered."""


class Backfill:
    """Lets bulk records into the batcher, first come, first served, as far as the online objective allows.

    A request that comes just after a batch of bulk work has begun waits for its end, and then for its own batch. So
    with a target, bulk work may make a batch no longer than what is left of the target beside a batch of requests, or
    half as long where both share batches. How much of the target is planned with follows from how many requests
    miss it.

    Args:
        engine: its kind decides what is bounded: the cost of a batch, or the slots taken.
        batcher: shared with the requests.
        target_s: what requests may take; None promises nothing.
        held: how many requests are accepted and not answered.
        tokens: those of bulk records are counted there.
    """

    def __init__(
        self,
        engine: AnyEngine,
        batcher: Batcher[Any, Any],
        target_s: float | None,
        held: Callable[[], int],
        tokens: Tokens | None = None,
    ) -> None:
        self._profile = profile_of(engine)
        self._per_batch = self._profile.batching == "batches"
        self._batcher = batcher
        self._target_s = target_s
        self._held = held
        self._tokens = tokens
        self.model = TimeModel()
        self.margin = Margin()
        self._online = Recent(_LATE_S)
        self._queue: deque[tuple[asyncio.Future[None], float]] = deque()
        self._inside: dict[asyncio.Future[Any], float] = {}
        self.done = 0
        """Bulk records answered."""

    @property
    def waiting(self) -> int:
        """Bulk records that are not let in yet."""
        return len(self._queue)

    async def run(self, entry: Prepared[Any], caller: Hashable) -> Any:
        """One bulk record's output. Cancelling the call takes it out, wherever it is.

        Raises:
            Exception: what the batcher says of it.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((turn, entry.cost))
        if len(self._queue) == 1:  # else there was no room for those before either
            self._let_in()
        try:
            await turn
        except BaseException:
            self._inside.pop(turn, None)  # cancelled just after it was let in
            self._let_in()
            raise
        try:
            ticket = self._batcher.submit_nowait(
                entry.payload, estimated_cost=self._profile.estimate(entry.cost), priority=BULK, caller=caller
            )
        except NotRunningError as error:  # a drain has met its limit: no fault of the record's
            self._inside.pop(turn, None)
            raise StoppedError("the server stops") from error
        self._inside[ticket] = entry.cost
        self._inside.pop(turn, None)
        ticket.add_done_callback(self._left)
        try:
            result = await ticket
        finally:
            ticket.cancel()
        self.done += 1
        if self._tokens is not None:
            self._tokens.count((result,), entry.cost)
        return result

    def refuse(self) -> None:
        """Fail what is not let in yet: the server stops."""
        for turn, _ in self._queue:
            if not turn.done():
                turn.set_exception(StoppedError("the server stops"))
        self._queue.clear()

    def listen(self, event: Event) -> None:
        """Learn from what the batcher does, and make use of the room it makes."""
        match event:
            case BatchFormed():
                self._let_in()
            case BatchDone():
                self.model.observe(event.padded_cost, event.duration_s)
                self._note_online(event.padded_cost)
            case RequestDone():
                if self._target_s is not None and event.status == 200 and event.route in _ROUTES:
                    self.margin.observe(missed=event.duration_s > self._target_s)
            case StepDone():
                self.model.observe(event.size, event.duration_s)
                self._let_in()
            case _:
                pass

    def _note_online(self, cost: float) -> None:
        """Remember what a batch of requests alone costs: those of bulk work cost what is decided here."""
        if self._held() and not self._inside:
            self._online.add(cost, time.monotonic())

    def allowance(self) -> float:
        """What bulk work may hold: cost that waits for the next batch, or slots."""
        profile, now = self._profile, time.monotonic()
        if not self._per_batch:
            self._online.add(self._held(), now)
            # As many as requests have lately held at once, and one more, stay free for them.
            online = self._online.largest(now)
            slots = profile.max_in_flight
            return slots if self._target_s is None or not online else max(slots - online - 1, 1)
        full = profile.batch_cost
        if self._target_s is None:
            return _AHEAD * full
        if not self.model.known:
            return 1.0  # one record at a time until it is known what that takes
        online, planned_s = self._online.largest(now), self._target_s * self.margin.value
        if profile.pads:  # batches are of like length, and of requests or of bulk work alone
            return min(self.model.cost_within(planned_s - self.model.seconds(online)), full)
        # The batch that a request waits for and its own are filled with bulk work alike.
        return min(self.model.cost_within((planned_s - self.model.line[0] * online) / 2), full)

    def _let_in(self) -> None:
        """Let in whoever is next while there is room; one always, so that an impossible target starves nobody."""
        if not self._queue:
            return
        per_batch, pads = self._per_batch, self._profile.pads
        allowed = self.allowance()
        # Of a batch engine's, what is in a batch no longer counts; a slot is held until the end.
        inside = [cost for ticket, cost in self._inside.items() if not per_batch or getattr(ticket, "holder", True)]
        held: float = self._padded(inside) if per_batch else len(inside)
        longest = max(inside, default=0.0)
        count = len(inside)
        while self._queue:
            turn, cost = self._queue[0]
            if turn.done():
                self._queue.popleft()
                continue
            longest = max(longest, cost)
            held = (longest * (count + 1) if pads else held + cost) if per_batch else count + 1
            if count and held > allowed:
                return
            count += 1
            self._queue.popleft()
            self._inside[turn] = cost
            turn.set_result(None)

    def _padded(self, costs: list[float]) -> float:
        return max(costs, default=0.0) * len(costs) if self._profile.pads else sum(costs)

    def _left(self, ticket: asyncio.Future[Any]) -> None:
        self._inside.pop(ticket, None)
        if ticket.cancelled() or not self._per_batch:
            self._let_in()  # of a batch engine's, what was in a batch had given its room away when that was formed
