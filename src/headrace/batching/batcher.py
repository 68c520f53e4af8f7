"""`Batcher`: what all batchers have in common: start and stop, submit, map, statistics.

Behind it, `intake` lets records in, `admission` bounds what waits, a dispatcher takes records to the engine,
`isolation` deals with failures and `replies` ends each caller's wait.
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
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from headrace.batching.blocking import current_loop, iterate, raising
from headrace.batching.dispatch.stream import RUN, Chunk, Stream
from headrace.batching.dispatch.submission import Dispatching, StreamPort, Submission, WaitingRoom
from headrace.batching.options import Options, number, optional
from headrace.batching.policy.cost import CostRule, checked_cost
from headrace.batching.stats import BatchStats, Meter
from headrace.batching.tasks import current_task
from headrace.errors import AlreadyRunningError, ConfigError, NotRunningError, StoppedError

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
AnyT = TypeVar("AnyT")
_GRACE_S = 1.0
"""How long a cancelled batch may take to end, in seconds, before it is left behind."""


class SubmitOptions(TypedDict, total=False):
    """The options of `Batcher.submit`."""

    estimated_cost: float | None
    priority: int
    deadline_s: float | None
    caller: Hashable


class Batcher(Generic[RecordT, ResultT]):
    """Takes records from many callers and gives each its result. Made by its subclasses, which say what runs them.

    Args:
        options: what every batcher knows.
        cost: what a record costs whose caller does not say.
        make_dispatcher: called on every start, with the waiting room to serve.
    """

    def __init__(self, options: Options, cost: CostRule, make_dispatcher: Callable[[WaitingRoom], Dispatching]) -> None:
        self._options = options
        self._cost = cost
        self._make_dispatcher = make_dispatcher
        self._meter = Meter()
        self._intake: Submission | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether batches are formed: from `start()` to the end of `stop()`."""
        return self._task is not None and self._intake is not None and not self._intake.loop.is_closed()

    @property
    def stats(self) -> BatchStats:
        """The counts at this moment, a frozen snapshot."""
        size = self._options.limits.max_batch_size
        if self._intake is None:
            return BatchStats(max_batch_size=size)
        lineup = self._intake.lineup
        return self._meter.snapshot(self._intake.clock(), lineup.size, lineup.cost, size)

    async def start(self) -> None:
        """Begin to form batches, on the running event loop.

        Raises:
            AlreadyRunningError: it runs already, on this loop or another.
        """
        self._start()

    def _start(self) -> None:
        if self.is_running:
            raise AlreadyRunningError(f"{self._options.name} is already running; stop() it before starting it again")
        if self._task is not None:
            self._ended(self._task)  # its loop was closed under it
        intake = self._intake = Submission(self._options, self._cost, self._meter, self._make_dispatcher)
        # a context of its own: process_fn serves all callers, it must not see the variables of whoever came first
        self._task = intake.loop.create_task(
            intake.dispatcher.run(), name=f"{self._options.name}-dispatcher", context=contextvars.Context()
        )
        self._task.add_done_callback(self._ended)
        self._meter.start(intake.clock())

    async def stop(self, timeout: float | None = None, *, drain: bool = True) -> None:
        """Take no more records, process those that wait, then end.

        Does nothing when stopped. A second call ends together with the first, sooner if it asks for that; a cancelled
        one goes on in the background.

        Args:
            timeout: Fail what is left after so many seconds; None waits for as long as it takes.
            drain: False fails at once what is not yet in a batch.
        """
        if self._intake is None or not self.is_running:
            return
        if self._intake.loop is not asyncio.get_running_loop():
            raise ConfigError(f"{self._options.name} runs on another event loop: stop() it there")
        optional("timeout", timeout, above=0)
        stopping = self._intake.loop.create_task(self._shut_down(timeout, drain), name=f"{self._options.name}-stop")
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        await asyncio.shield(stopping)

    async def _shut_down(self, timeout: float | None, drain: bool) -> None:
        intake, task = self._intake, self._task
        if intake is None or task is None:
            return  # the end came first
        intake.close()
        if not drain:
            intake.refuse(StoppedError(f"{self._options.name} was stopped without processing what waited"))
        intake.dispatcher.drain()
        _, late = await asyncio.wait({task}, timeout=timeout)
        if late:
            task.cancel()
            await asyncio.wait(late, timeout=_GRACE_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task and self._intake is not None:
            self._task = None
            self._intake.end()
            self._meter.stop(self._intake.clock())
        if task.done() and not task.cancelled():
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

    def _open(self) -> Submission:
        if self._intake is None:
            raise self._not_running()
        return self._intake

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
        intake = self._intake or self._open()
        task = current_task(intake.loop)
        if (
            intake.lineup.size < intake.admission.open_below
            and deadline_s is None
            and task is not None
            and get_ident() == intake.thread
        ):  # the short way, for nearly every record: nothing to wait for and nothing to refuse
            if estimated_cost is not None:
                cost = checked_cost(estimated_cost, record)
            elif type(record) in self._cost.plain:
                cost = self._cost.default
            else:
                cost = checked_cost(self._cost(record), record)
            return intake.ticket(record, cost, priority, task if caller is None else caller)
        task = intake.check_open()
        cost = intake.checked_cost(record, estimated_cost)
        if deadline_s is not None:
            deadline_s = await intake.wait_until(cost, deadline_s)
        elif not intake.admission.admits(cost):
            await intake.admission.enter(cost)
        ticket = intake.ticket(record, cost, priority, task if caller is None else caller)
        if deadline_s is not None:
            intake.expire_in(ticket, deadline_s)
        return ticket

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
        intake = self._open()
        task = intake.check_open()
        if deadline_s is not None:
            number("deadline_s", deadline_s, above=0)
        cost = intake.checked_cost(record, estimated_cost)
        intake.check_room(cost)
        ticket = intake.ticket(record, cost, priority, task if caller is None else caller)
        if deadline_s is not None:
            intake.expire_in(ticket, deadline_s)
        return ticket

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
        """Results for a stream of records, in bounded memory.

        They come in input order, or with `ordered=False` as they complete. With `return_exceptions`, a failed record's
        exception stands in its place; otherwise the first is raised. Leaving the loop early cancels what has not been
        handed out.
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
        """Each record of a stream with its result, or its exception, as it completes, in bounded memory."""
        async with aclosing(self._stream(priority, ordered=False).chunks(records)) as chunks:
            async for done, results, _ in chunks:
                for pair in zip(done, results, strict=True):
                    yield pair

    def runs_as_completed(self, runs: AsyncIterable[Sequence[RecordT]]) -> AsyncGenerator[Chunk, None]:
        """`as_completed` by runs, each at its first record's cost; also whether a result may be an exception."""
        return self._stream(0, ordered=False).run_chunks(runs)

    def _stream(self, priority: int, *, ordered: bool) -> Stream:
        port = StreamPort(self._open(), self._cost, self._options, priority)
        return Stream(port, self._options.capacity + self._options.in_flight, ordered=ordered)

    # -- from other threads and loops ----------------------------------------------------------------------------

    def submit_threadsafe(
        self, record: RecordT, **options: Unpack[SubmitOptions]
    ) -> concurrent.futures.Future[ResultT]:
        """`submit` from any thread or event loop: a future of the *result*. Never blocks; options are `submit`'s.

        From another loop, await `asyncio.wrap_future(...)` of it. The wait for room counts as part of the future.
        """

        async def result() -> ResultT:
            return await (await self.submit(record, **options))

        return self._on_loop(result())

    def submit_blocking(
        self, record: RecordT, *, timeout: float | None = None, **options: Unpack[SubmitOptions]
    ) -> ResultT:
        """`submit` from a thread that may block, and wait for the result, `timeout` seconds at most."""
        self._may_block("submit_blocking", "submit")
        future = self.submit_threadsafe(record, **options)
        try:
            return future.result(timeout)
        finally:
            future.cancel()  # after a timeout: the record need not be run

    def map_blocking(self, records: Iterable[RecordT], *, return_exceptions: bool = False) -> Iterator[ResultT]:
        """`map` from a thread that may block, in input order.

        `records` is read in that thread, as far ahead as there is room.
        """
        self._may_block("map_blocking", "map")
        port = StreamPort(self._open(), self._cost, self._options, 0)

        async def results_of(chunk: Sequence[RecordT]) -> list[Any]:
            stream = Stream(port, len(chunk), ordered=True, flush=False)
            return [result async for _, results, _ in stream.chunks(chunk) for result in results]

        async def flush() -> None:
            port.flush()

        ahead = max(self._options.capacity // RUN, 1) + 1
        results = iterate(
            lambda chunk: self._on_loop(results_of(chunk)), records, ahead, lambda: self._on_loop(flush())
        )
        return results if return_exceptions else raising(results)

    def _on_loop(self, coroutine: Coroutine[Any, Any, AnyT]) -> concurrent.futures.Future[AnyT]:
        if self._intake is None or not self.is_running:
            coroutine.close()
            raise self._not_running()
        return asyncio.run_coroutine_threadsafe(coroutine, self._intake.loop)

    def _may_block(self, method: str, instead: str) -> None:
        if self._intake is not None and current_loop() is self._intake.loop:
            raise ConfigError(f"{method}() would block the batcher's own event loop: await {instead}() there")
