"""`DynamicBatcher`: records from many callers, one batch function, and a budget for what a batch may cost.

This is the public face. Behind it, `policy` and `window` choose the batch and `admission` bounds what waits, `dispatch`
runs the loop, `isolation` deals with failures and `replies` ends each caller's wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from headrace.batching import parameters
from headrace.batching.admission import Admission
from headrace.batching.blocking import iterate, on_loop_of
from headrace.batching.cost import CostEstimatorFn, checked_cost
from headrace.batching.dispatch import Dispatcher, Settings
from headrace.batching.mapping import Slot, Stream
from headrace.batching.offload import Caller
from headrace.batching.policy import Lineup
from headrace.batching.replies import Ticket, fail
from headrace.batching.stats import BatchStats, Meter
from headrace.batching.tasks import current_task
from headrace.batching.window import Limits
from headrace.errors import (
    AlreadyRunningError,
    ConfigError,
    DeadlineExceededError,
    NotRunningError,
    QueueFullError,
    RecordTooLargeError,
    StoppedError,
)
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

WINDOW_BATCHES = 16
"""`length_bucketing=True` reorders within so many full batches, as far as the waiting room holds them."""

_GRACE_S = 1.0
"""How long a cancelled batch may take to end, in seconds, before it is left behind."""


class DynamicBatcher(Generic[RecordT, ResultT]):
    """Collects records from many callers into batches for one function.

    Args:
        process_fn: `(list of records) -> list of results`, one per record in the same order; an exception object in a
            result's place fails that record alone. An `async def` runs on the event loop, a plain function on a
            thread of its own.
        cost_estimator: `(record) -> cost`. Without it, the record's `estimate_cost()` counts, then `default_cost`.
        target_batch_cost: Most a batch may cost. A record that alone costs more goes alone.
        max_batch_size: Most records of a batch.
        min_batch_size: Fewest records of a batch closed at a length boundary; a timeout or the end overrides it.
        batch_timeout_s: Longest time the oldest record waits for company while a slot is free, in seconds.
        max_queue_size: Records that may wait, beyond those of the next `prefetch_batches` + 1 batches.
        prefetch_batches: See `max_queue_size`. Batches are formed late, when there is a slot for them.
        default_cost: Cost of a record that nothing else tells the cost of.
        padded: A batch costs records × its longest record instead of the sum, as for an engine that pads.
        length_bucketing: Batch records of like cost together: True, or the number of records that may be reordered.
        max_queue_cost: Most the waiting records may cost together.
        max_concurrent_batches: Batches processed at the same time (slots).
        on_error: "fail": a failed batch fails all its records. "isolate": it is run again in halves until only the bad
            record has failed. A batch that ran out of memory is halved either way, and its size avoided from then on.
        oversized: "alone", or "reject" a record that alone costs more than `target_batch_cost`.
        process_timeout_s: A batch that takes longer fails, in seconds.
        offload: Run an async `process_fn` that blocks on a thread of its own, in an event loop of its own.
        listener: Called on the event loop with each `headrace.events` event of this batcher.

    Raises:
        ConfigError: a parameter is out of range; a `ValueError` that names parameter, value and range.
    """

    def __init__(
        self,
        process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]],
        *,
        cost_estimator: CostEstimatorFn | None = None,
        target_batch_cost: float = 32_000,
        max_batch_size: int = 256,
        min_batch_size: int = 1,
        batch_timeout_s: float = 0.05,
        max_queue_size: int = 5_000,
        prefetch_batches: int = 2,
        default_cost: float = 1,
        padded: bool = False,
        length_bucketing: bool | int = False,
        max_queue_cost: float | None = None,
        max_concurrent_batches: int = 1,
        on_error: Literal["fail", "isolate"] = "fail",
        oversized: Literal["alone", "reject"] = "alone",
        process_timeout_s: float | None = None,
        offload: bool = False,
        listener: Listener | None = None,
    ) -> None:
        self._process_fn = parameters.function("process_fn", process_fn, needed=True)
        self._cost_estimator = parameters.function("cost_estimator", cost_estimator, needed=False)
        self._target = parameters.number("target_batch_cost", target_batch_cost, above=0)
        self._max_batch_size = parameters.whole("max_batch_size", max_batch_size, 1)
        if parameters.whole("min_batch_size", min_batch_size, 1) > max_batch_size:
            raise ConfigError(f"min_batch_size is {min_batch_size!r}: it must be <= max_batch_size={max_batch_size!r}")
        parameters.number("batch_timeout_s", batch_timeout_s, minimum=0)
        parameters.whole("max_queue_size", max_queue_size, 1)
        parameters.whole("prefetch_batches", prefetch_batches, 0)
        self._default_cost = parameters.number("default_cost", default_cost, minimum=0)
        self._max_queue_cost = parameters.optional("max_queue_cost", max_queue_cost, above=0)
        self._capacity = max_queue_size + (prefetch_batches + 1) * max_batch_size
        self._slots = parameters.whole("max_concurrent_batches", max_concurrent_batches, 1)
        self._rejects = parameters.one_of("oversized", oversized, ("alone", "reject")) == "reject"
        self._offload = offload
        if length_bucketing is True:
            window = min(WINDOW_BATCHES * max_batch_size, self._capacity)
        else:
            window = parameters.whole("length_bucketing", int(length_bucketing), 0)
        self._limits = Limits(target_batch_cost, max_batch_size, min_batch_size, padded, window)
        self._settings = Settings(
            name=type(self).__name__,
            batch_timeout_s=batch_timeout_s,
            max_concurrent_batches=max_concurrent_batches,
            process_timeout_s=parameters.optional("process_timeout_s", process_timeout_s, above=0),
            on_error=parameters.one_of("on_error", on_error, ("fail", "isolate")),
            listener=parameters.function("listener", listener, needed=False),
        )
        self._meter = Meter()
        self._submitted = 0
        self._lineup = Lineup(self._limits)
        self._admission = Admission(self._lineup, self._capacity, self._max_queue_cost)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._accepts = False
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether batches are formed: from `start()` to the end of `stop()`."""
        return self._task is not None and self._loop is not None and not self._loop.is_closed()

    @property
    def stats(self) -> BatchStats:
        """The counts at this moment, a frozen snapshot."""
        lineup = self._lineup
        return self._meter.snapshot(self._clock(), self._submitted, lineup.size, lineup.cost, self._max_batch_size)

    async def start(self) -> None:
        """Begin to form batches, on the running event loop.

        Raises:
            AlreadyRunningError: it runs already, on this loop or another.
        """
        self._start()

    def _start(self) -> None:
        if self.is_running:
            raise AlreadyRunningError(f"{self._settings.name} is already running; stop() it before starting it again")
        loop = asyncio.get_running_loop()
        own_clock = getattr(type(loop), "time", None) is not asyncio.BaseEventLoop.time
        self._loop, self._clock = loop, loop.time if own_clock else time.monotonic
        fail(self._lineup.clear(), StoppedError(f"{self._settings.name}'s event loop was closed while records waited"))
        self._lineup.set_budget(self._target)
        self._admission = Admission(self._lineup, self._capacity, self._max_queue_cost)
        self._caller = Caller(
            self._process_fn, offload=self._offload, threads=self._slots, name=f"{self._settings.name}-worker"
        )
        self._dispatcher = Dispatcher(self._lineup, self._admission, self._caller, self._meter, self._settings)
        # a context of its own: process_fn serves all callers, it must not see the variables of whoever came first
        self._task = loop.create_task(
            self._dispatcher.run(), name=f"{self._settings.name}-dispatcher", context=contextvars.Context()
        )
        self._task.add_done_callback(self._ended)
        self._stopping = None
        self._accepts = True
        self._meter.start(self._clock())

    async def stop(self, timeout: float | None = None, *, drain: bool = True) -> None:  # noqa: ASYNC109
        """Take no more records, process those that wait, then end. Does nothing when stopped; a second call joins the first.

        Args:
            timeout: Fail what is left after so many seconds; None waits for as long as it takes.
            drain: False fails at once what is not yet in a batch.
        """
        if self._task is None or self._loop is None or self._loop.is_closed():
            self._task = None
            return
        if self._loop is not asyncio.get_running_loop():
            raise ConfigError(f"{self._settings.name} runs on another event loop: stop() it there")
        if self._stopping is None:
            stopping = self._shut_down(parameters.optional("timeout", timeout, above=0), drain)
            self._stopping = self._loop.create_task(stopping, name=f"{self._settings.name}-stop")
        await asyncio.shield(self._stopping)  # a cancelled stop() goes on in the background

    async def _shut_down(self, timeout: float | None, drain: bool) -> None:  # noqa: ASYNC109
        self._accepts = False
        assert self._task is not None
        if not drain:
            cause = StoppedError(f"{self._settings.name} was stopped without processing what waited")
            self._admission.refuse_all(cause)
            fail(self._lineup.clear(), cause)
        self._dispatcher.drain()
        _, late = await asyncio.wait({self._task}, timeout=timeout)
        if late:
            self._task.cancel()
            await asyncio.wait(late, timeout=_GRACE_S)
        self._caller.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
            self._accepts = False
            self._meter.stop(self._clock())
        if not task.cancelled():
            task.exception()  # read: the dispatcher has logged it, and every waiter got it

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            await self.stop()
        else:  # nobody is left to use the results
            await self.stop(timeout=_GRACE_S, drain=False)

    # -- one record ----------------------------------------------------------------------------------------------

    async def submit(
        self,
        record: RecordT,
        *,
        estimated_cost: float | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        caller: Hashable = None,
    ) -> asyncio.Future[ResultT]:
        """Let a record wait for its batch, once there is room; returns the future of its result.

        Args:
            record: Anything `process_fn` takes.
            estimated_cost: Its cost, if the caller knows it.
            priority: Higher goes first; one step weighs as much as 10 seconds of waiting.
            deadline_s: Fail the record if it is not in a batch after so many seconds.
            caller: Whose share of the batches it counts on; by default the current task.

        Raises:
            NotRunningError: the batcher is not running.
            CostError: the cost is not a finite number >= 0.
            RecordTooLargeError: it costs more than a batch may, and `oversized="reject"`.
            DeadlineExceededError: there was no room before the deadline (later, the future raises it).
        """
        if not self._accepts or asyncio.get_running_loop() is not self._loop:
            raise self._refusal()
        cost = self._estimate_cost(record, estimated_cost)
        if self._rejects and cost > self._target:
            raise self._too_large(record, cost)
        if deadline_s is not None:
            deadline_s = await self._enter_in_time(cost, parameters.number("deadline_s", deadline_s, above=0))
        elif not self._admission.admits(cost):
            await self._admission.enter(cost)
        return self._join(record, cost, priority, deadline_s, caller)

    def submit_nowait(
        self,
        record: RecordT,
        *,
        estimated_cost: float | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        caller: Hashable = None,
    ) -> asyncio.Future[ResultT]:
        """`submit` for those who would rather be refused than wait.

        Raises:
            QueueFullError: there is no room.
        """
        if not self._accepts or asyncio.get_running_loop() is not self._loop:
            raise self._refusal()
        cost = self._estimate_cost(record, estimated_cost)
        if self._rejects and cost > self._target:
            raise self._too_large(record, cost)
        if not self._admission.admits(cost):
            raise QueueFullError(
                f"{self._lineup.size} records of cost {self._lineup.cost} are waiting, and there is no room for one of "
                f"cost {cost}: await submit(), come back later, or raise max_queue_size or max_queue_cost"
            )
        if deadline_s is not None:
            parameters.number("deadline_s", deadline_s, above=0)
        return self._join(record, cost, priority, deadline_s, caller)

    def _join(
        self, record: RecordT, cost: float, priority: int, deadline_s: float | None, caller: Hashable
    ) -> Ticket[ResultT]:
        """Add the record to the lineup, which has room for it."""
        ticket: Ticket[ResultT] = Ticket(loop=self._loop)
        ticket.record = record
        ticket.cost = cost
        ticket.arrival = self._clock()
        ticket.home = self
        self._lineup.add(ticket, priority, current_task(self._loop) if caller is None else caller)
        self._submitted += 1
        if self._dispatcher.sleeper is not None:
            self._dispatcher.arrived(cost)
        if deadline_s is not None:
            assert self._loop is not None
            timer = self._loop.call_later(deadline_s, self._expire, ticket, deadline_s)
            ticket.add_done_callback(lambda _: timer.cancel())
        return ticket

    def discard(self, entry: Any) -> None:
        """A waiting record was cancelled: its place is free at once."""
        self._lineup.discard(entry)
        self._admission.let_in()
        self._dispatcher.wake()

    def _expire(self, ticket: Ticket[ResultT], deadline_s: float) -> None:
        if ticket.home is not None:
            self.discard(ticket)
            fail([ticket], DeadlineExceededError(f"the record waited {deadline_s} s, its deadline, and was not run"))

    async def _enter_in_time(self, cost: float, deadline_s: float) -> float:
        """Wait for room; returns what is left of the deadline."""
        ends = self._clock() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._admission.enter(cost)
        except TimeoutError:
            raise DeadlineExceededError(
                f"there was no room for the record within {deadline_s} s, its deadline"
            ) from None
        return ends - self._clock()

    def _estimate_cost(self, record: Any, explicit: float | None) -> float:
        """Cost by precedence: explicit, estimator function, the record's own method, default."""
        if explicit is not None:
            return checked_cost(explicit, record)
        if self._cost_estimator is not None:
            return checked_cost(self._cost_estimator(record), record)
        own = getattr(record, "estimate_cost", None)
        return self._default_cost if own is None else checked_cost(own(), record)

    def _too_large(self, record: Any, cost: float) -> RecordTooLargeError:
        return RecordTooLargeError(
            f"a {type(record).__name__} record costs {cost}, more than target_batch_cost={self._target}: shorten it, "
            'raise the budget, or let it go alone with oversized="alone"'
        )

    def _refusal(self) -> Exception:
        name = self._settings.name
        if self._accepts:
            return ConfigError(f"{name} runs on another event loop: use submit_threadsafe() or submit_blocking()")
        if self._stopping is not None and self._task is not None:
            return NotRunningError(f"{name} is not running any more: it is stopping and takes no new records")
        return NotRunningError(f"{name} is not running. Call start() or use 'async with'")

    # -- many records --------------------------------------------------------------------------------------------

    async def submit_batch(
        self, records: Iterable[RecordT], *, estimated_cost: Sequence[float] | None = None
    ) -> list[asyncio.Future[ResultT]]:
        """`submit` each record, waiting for room where there is none; returns their futures in order.

        Raises:
            ConfigError: `estimated_cost` is not of the same length.
        """
        records = list(records)
        if estimated_cost is not None and len(estimated_cost) != len(records):
            raise ConfigError(f"estimated_cost has {len(estimated_cost)} entries for {len(records)} records")
        futures: list[asyncio.Future[ResultT]] = []
        try:
            for index, record in enumerate(records):
                cost = None if estimated_cost is None else estimated_cost[index]
                futures.append(await self.submit(record, estimated_cost=cost))
        except BaseException:
            for future in futures:  # which the caller will never see
                future.cancel()
            raise
        return futures

    async def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        priority: int = 0,
    ) -> AsyncIterator[ResultT]:
        """Results for a stream of records, in input order or (`ordered=False`) as they complete, in bounded memory.

        Leaving the loop early cancels what has not been handed out. With `return_exceptions`, a failed record's exception
        stands in its place; otherwise the first is raised.
        """
        stream = self._stream(ordered, priority)
        slots = stream.slots(records)
        try:
            async for slot in slots:
                if slot.failed and not return_exceptions:
                    raise slot.result
                yield slot.result
        finally:
            await slots.aclose()  # type: ignore[attr-defined]

    async def as_completed(
        self, records: Iterable[RecordT] | AsyncIterable[RecordT], *, priority: int = 0
    ) -> AsyncIterator[tuple[RecordT, ResultT | Exception]]:
        """Each record of a stream with its result, or its exception, as it completes, in bounded memory."""
        slots = self._stream(False, priority).slots(records)
        try:
            async for slot in slots:
                yield slot.record, slot.result
        finally:
            await slots.aclose()  # type: ignore[attr-defined]

    def _stream(self, ordered: bool, priority: int) -> Stream:
        caller = object()

        async def enter(slot: Slot) -> None:
            await self._admission.enter(slot.cost)
            join(slot)

        def join(slot: Slot) -> None:
            slot.arrival = self._clock()
            slot.home = self
            self._lineup.add(slot, priority, caller)
            self._submitted += 1
            if self._dispatcher.sleeper is not None:
                self._dispatcher.arrived(slot.cost)

        def put(slot: Slot) -> Awaitable[None] | None:
            if not self._accepts or asyncio.get_running_loop() is not self._loop:
                raise self._refusal()
            try:
                cost = slot.cost = self._estimate_cost(slot.record, None)
                if self._rejects and cost > self._target:
                    raise self._too_large(slot.record, cost)
            except Exception as exc:  # the user's estimator: it costs this record, not the stream
                slot.set_exception(exc)
                return None
            if not self._admission.admits(cost):
                return enter(slot)
            join(slot)
            return None

        limit = self._capacity + self._slots * self._max_batch_size
        return Stream(put, lambda: self.is_running and self._dispatcher.hurry() or None, limit, ordered=ordered)

    # -- from other threads and loops ----------------------------------------------------------------------------

    def submit_threadsafe(self, record: RecordT, **options: Any) -> concurrent.futures.Future[ResultT]:
        """`submit` from any thread or event loop: a future of the *result*. Never blocks; options are `submit`'s.

        From another loop, await `asyncio.wrap_future(...)` of it. The wait for room counts as part of the future.
        """

        async def result() -> ResultT:
            return await (await self.submit(record, **options))

        return on_loop_of(self, result)

    def submit_blocking(self, record: RecordT, *, timeout: float | None = None, **options: Any) -> ResultT:
        """`submit` from a thread that may block, and wait for the result, `timeout` seconds at most."""
        future = self.submit_threadsafe(record, **options)
        try:
            return future.result(timeout)
        finally:
            future.cancel()  # after a timeout: the record need not be run

    def map_blocking(self, records: Iterable[RecordT], *, return_exceptions: bool = False) -> Iterator[ResultT]:
        """`map` from a thread that may block, in input order; `records` is read in that thread, as far ahead as there is room."""
        return iterate(self, records, self._capacity, return_exceptions=return_exceptions)
