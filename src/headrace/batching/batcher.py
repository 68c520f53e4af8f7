"""`Batcher`: what all batchers share: start and stop, submit, map, statistics.

`submission` accepts records, `admission` bounds the queue, a dispatcher passes records to the engine and handles
failures, and `pending` delivers each result to its caller.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from threading import get_ident
from types import TracebackType
from typing import Generic, Self, TypedDict, TypeVar, Unpack

from headrace.batching.blocking import current_loop, iterate, raising
from headrace.batching.dispatch.loop import DispatchContext, DispatchLoop
from headrace.batching.dispatch.stream import RUN, MappedRun, MappedStream
from headrace.batching.dispatch.submission import Submission
from headrace.batching.foreign_calls import current_task
from headrace.batching.options import Options, number, optional
from headrace.batching.policy.cost import CostRule, checked_cost
from headrace.batching.stats import BatchMeter, BatchStats
from headrace.errors import AlreadyRunningError, ConfigError, NotRunningError, StoppedError
from headrace.tracebacks import public

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
AnyT = TypeVar("AnyT")
_GRACE_S = 1.0
"""How long to wait for a cancelled batch to end, in seconds, before abandoning it."""


class SubmitOptions(TypedDict, total=False):
    """The options of `Batcher.submit`."""

    estimated_cost: float | None
    priority: int
    deadline_s: float | None
    caller: Hashable


class Batcher(Generic[RecordT, ResultT]):
    """Takes records from many callers and returns each its result. Subclasses choose what runs the records.

    Args:
        options: common to all batchers.
        cost: estimates the cost of a record submitted without one.
        make_dispatcher: called on every start, with the queue to serve.
    """

    def __init__(
        self, options: Options, cost: CostRule, make_dispatcher: Callable[[DispatchContext], DispatchLoop]
    ) -> None:
        self._options = options
        self._cost = cost
        self._estimate = cost.estimate
        self._make_dispatcher = make_dispatcher
        self._meter = BatchMeter()
        self._times = True
        """Whether it tells the meter when it starts and stops."""
        self._submission: Submission | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    # -- lifecycle ------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the batcher forms batches: from `start()` to the end of `stop()`."""
        return self._task is not None and self._submission is not None and not self._submission.loop.is_closed()

    @property
    def stats(self) -> BatchStats:
        """A frozen snapshot of the counters."""
        size = self._options.limits.max_batch_size
        if self._submission is None:
            return BatchStats(max_batch_size=size)
        queue = self._submission.queue
        return self._meter.snapshot(self._submission.clock(), queue.size, queue.cost, size)

    @property
    def waiting_cost(self) -> float:
        """Cost of the records that wait for a batch; cheaper than `stats`."""
        return 0.0 if self._submission is None else self._submission.queue.cost

    async def start(self) -> None:
        """Start forming batches on the running event loop.

        Raises:
            AlreadyRunningError: it is already running, on this loop or another.
        """
        self._start()

    def _start(self) -> None:
        if self.is_running:
            raise AlreadyRunningError(f"{self._options.name} is already running; stop() it before starting it again")
        if self._task is not None:
            self._ended(self._task)  # its loop was closed while it ran
        submission = self._submission = Submission(self._options, self._cost, self._meter, self._make_dispatcher)
        # An empty context: process_fn serves all callers and must not see the first caller's context variables.
        self._task = submission.loop.create_task(
            submission.dispatcher.run(), name=f"{self._options.name}-dispatcher", context=contextvars.Context()
        )
        self._task.add_done_callback(self._ended)
        if self._times:
            self._meter.start(submission.clock())

    async def stop(self, timeout: float | None = None, *, drain: bool = True) -> None:
        """Accept no more records, process the waiting ones, then stop.

        Does nothing when stopped. A second call returns together with the first, and can shorten it. A cancelled call
        continues in the background.

        Args:
            timeout: Fail the remaining records after this many seconds; None waits without limit.
            drain: False immediately fails records that are not yet in a batch.
        """
        if self._submission is None or not self.is_running:
            return
        if self._submission.loop is not asyncio.get_running_loop():
            raise ConfigError(f"{self._options.name} runs on another event loop: stop() it there")
        optional("timeout", timeout, above=0)
        stopping = self._submission.loop.create_task(self._shut_down(timeout, drain), name=f"{self._options.name}-stop")
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        await asyncio.shield(stopping)

    async def _shut_down(self, timeout: float | None, drain: bool) -> None:
        submission, task = self._submission, self._task
        if submission is None or task is None:
            return  # it has stopped already
        submission.close()
        if not drain:
            cause = StoppedError(f"{self._options.name} was stopped without processing the waiting records")
            submission.dispatcher.refuse(cause)
        submission.dispatcher.drain()
        _, late = await asyncio.wait({task}, timeout=timeout)
        if late:
            task.cancel()
            await asyncio.wait(late, timeout=_GRACE_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task and self._submission is not None:
            self._task = None
            self._submission.end()
            if self._times:
                self._meter.stop(self._submission.clock())
        if task.done() and not task.cancelled():
            task.exception()  # mark as retrieved: the dispatcher has logged it and every waiting caller received it

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            await self.stop()
        else:  # nobody will use the results
            await self.stop(timeout=_GRACE_S, drain=False)

    def _open(self) -> Submission:
        if self._submission is None:
            raise self._not_running()
        return self._submission

    def _not_running(self) -> NotRunningError:
        return NotRunningError(f"{self._options.name} is not running. Call start() or use 'async with'")

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
        """Queue a record, waiting while the queue is full; returns the future of its result.

        Args:
            record: Anything `process_fn` takes.
            estimated_cost: Its cost, if known.
            priority: Higher goes first; one step counts as much as 10 seconds of waiting.
            deadline_s: Fail the record if it is not in a batch after this many seconds.
            caller: Key for fair sharing between callers; by default the current task.

        Raises:
            NotRunningError: the batcher is not running.
            CostError: the cost is not a finite number >= 0.
            RecordTooLargeError: it exceeds the batch budget, and `oversized="reject"`.
            DeadlineExceededError: the queue stayed full until the deadline (later, the future raises it).
        """
        submission = self._submission or self._open()
        task = current_task(submission.loop)
        if (
            submission.queue.size < submission.admission.open_below
            and deadline_s is None
            and task is not None
            and get_ident() == submission.thread
        ):  # fast path for nearly every record: nothing to wait for, nothing to reject
            if estimated_cost is not None:
                cost = checked_cost(estimated_cost, type(record))
            elif type(record) in self._cost.plain:
                cost = self._cost.default
            else:
                cost = checked_cost(self._estimate(record), type(record))
            return submission.enqueue(record, cost, priority, task if caller is None else caller)
        task = submission.check_open()
        estimated = self._estimate(record) if estimated_cost is None else estimated_cost
        cost = submission.checked_cost(estimated, type(record))
        if deadline_s is not None:
            deadline_s = await submission.wait_until(cost, deadline_s)
        elif not submission.admission.admits(cost):
            await submission.admission.enter(cost)
        pending = submission.enqueue(record, cost, priority, task if caller is None else caller)
        if deadline_s is not None:
            submission.expire_in(pending, deadline_s)
        return pending

    def submit_nowait(
        self,
        record: RecordT,
        *,
        estimated_cost: float | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        caller: Hashable = None,
    ) -> asyncio.Future[ResultT]:
        """`submit` that raises instead of waiting.

        Raises:
            QueueFullError: the queue is full.
        """
        submission = self._open()
        task = submission.check_open()
        if deadline_s is not None:
            number("deadline_s", deadline_s, above=0)
        estimated = self._estimate(record) if estimated_cost is None else estimated_cost
        cost = submission.checked_cost(estimated, type(record))
        submission.check_room(cost)
        pending = submission.enqueue(record, cost, priority, task if caller is None else caller)
        if deadline_s is not None:
            submission.expire_in(pending, deadline_s)
        return pending

    # -- many records --------------------------------------------------------------------------------------------

    async def submit_batch(
        self, records: Iterable[RecordT], *, estimated_cost: Sequence[float] | None = None
    ) -> list[asyncio.Future[ResultT]]:
        """`submit` each record, waiting while the queue is full; returns their futures in order.

        Raises:
            ConfigError: `estimated_cost` has a different length.
        """
        records = list(records)
        if estimated_cost is not None and len(estimated_cost) != len(records):
            raise ConfigError(f"estimated_cost has {len(estimated_cost)} entries for {len(records)} records")
        futures: list[asyncio.Future[ResultT]] = []
        try:
            for index, record in enumerate(records):
                cost = None if estimated_cost is None else estimated_cost[index]
                futures.append(await self.submit(record, estimated_cost=cost))
        finally:
            if len(futures) < len(records):  # an exception: the caller will never see the futures
                for future in futures:
                    future.cancel()
        return futures

    async def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        priority: int = 0,
    ) -> AsyncIterator[ResultT]:
        """Yield results for a stream of records, in bounded memory.

        Results come in input order, or with `ordered=False` as they complete. With `return_exceptions`, a failed record
        yields its exception; otherwise the first exception is raised. Leaving the loop early cancels the remaining
        records.
        """
        async with aclosing(self._stream(priority, ordered=ordered).chunks(records)) as chunks:
            async for _, results, failed in chunks:
                for result in results:
                    if failed and not return_exceptions and isinstance(result, Exception):
                        raise result
                    yield result

    async def as_completed(
        self, records: Iterable[RecordT] | AsyncIterable[RecordT], *, priority: int = 0
    ) -> AsyncIterator[tuple[RecordT, ResultT | Exception]]:
        """Yield each record with its result or exception as it completes, in bounded memory."""
        async with aclosing(self._stream(priority, ordered=False).chunks(records)) as chunks:
            async for done, results, _ in chunks:
                for pair in zip(done, results, strict=True):
                    yield pair

    def runs_as_completed(self, runs: AsyncIterable[Sequence[RecordT]]) -> AsyncGenerator[MappedRun, None]:
        """`as_completed` for runs of records, lists or `RecordColumn`s; all records of a run cost as much as its first.

        An empty run says that no run follows before results do: records that wait are batched immediately.
        """
        return self._stream(0, ordered=False).run_chunks(runs)

    def _stream(self, priority: int, *, ordered: bool) -> MappedStream:
        limit = self._options.capacity + self._options.in_flight
        return MappedStream(self._open(), object(), limit, ordered=ordered, priority=priority)

    # -- from other threads and loops ----------------------------------------------------------------------------

    def submit_threadsafe(
        self, record: RecordT, **options: Unpack[SubmitOptions]
    ) -> concurrent.futures.Future[ResultT]:
        """`submit` from any thread or event loop; returns a future of the *result*. Never blocks. Same options.

        From another loop, await `asyncio.wrap_future(future)`. The future also covers the wait for queue space.
        """

        async def result() -> ResultT:
            return await (await self.submit(record, **options))

        return self._on_loop(result())

    @public
    def submit_blocking(
        self, record: RecordT, *, timeout: float | None = None, **options: Unpack[SubmitOptions]
    ) -> ResultT:
        """`submit` from a thread that may block; waits for the result, at most `timeout` seconds."""
        self._check_not_on_loop("submit_blocking", "submit")
        future = self.submit_threadsafe(record, **options)
        try:
            return future.result(timeout)
        finally:
            future.cancel()  # after a timeout, do not run the record

    @public
    def map_blocking(self, records: Iterable[RecordT], *, return_exceptions: bool = False) -> Iterator[ResultT]:
        """`map` from a thread that may block, in input order.

        The calling thread reads `records`, as far ahead as the queue has room.
        """
        self._check_not_on_loop("map_blocking", "map")
        submission, caller = self._open(), object()

        async def results_of(chunk: Sequence[RecordT]) -> list[ResultT]:
            stream = MappedStream(submission, caller, len(chunk), ordered=True, flush=False)
            return [result async for _, results, _ in stream.chunks(chunk) for result in results]

        async def flush() -> None:
            submission.dispatcher.flush()

        ahead = max(self._options.capacity // RUN, 1) + 1
        results = iterate(
            lambda chunk: self._on_loop(results_of(chunk)), records, ahead, lambda: self._on_loop(flush())
        )
        return results if return_exceptions else raising(results)

    def _on_loop(self, coroutine: Coroutine[object, None, AnyT]) -> concurrent.futures.Future[AnyT]:
        if self._submission is None or not self.is_running:
            coroutine.close()
            raise self._not_running()
        return asyncio.run_coroutine_threadsafe(coroutine, self._submission.loop)

    def _check_not_on_loop(self, method: str, instead: str) -> None:
        if self._submission is not None and current_loop() is self._submission.loop:
            raise ConfigError(f"{method}() would block the batcher's own event loop: await {instead}() there")
