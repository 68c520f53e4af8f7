"""One model behind one batcher, and the lifecycle of a request."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from headrace.batching.batcher import Batcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.pending import PendingResult
from headrace.batching.stats import BatchStats
from headrace.concurrency.daemon_thread import on_daemon_thread
from headrace.engines.base import Chunks, Engine, PartialAnswer, Placed, Prepared
from headrace.engines.capabilities import BESIDE, FOLLOWING, PREFIX_CACHING, SLEEPING
from headrace.engines.choosing.served import ServedModel
from headrace.engines.profile import profile_of
from headrace.engines.tasks import task_named
from headrace.errors import EngineDeadError
from headrace.events import BatchDone, BatchFormed, Event, Listener, StageDone
from headrace.serving.admission.batch_bound import BatchBound
from headrace.serving.admission.controller import AdmissionController, AdmissionLimits, Ceiling
from headrace.serving.admission.turns import PreparationTurns
from headrace.serving.admission.waiting import CancelScope, run_chunks
from headrace.serving.counted import ServiceCounts
from headrace.serving.errors import ApiError, ClientGoneError, api_error
from headrace.serving.limits import ServeLimits
from headrace.serving.tokens import TokenCounter
from headrace.serving.tracing import RequestTrace

ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")

ONLINE = 0
"""Priority of online requests."""
CHARS_PER_COST = 4
"""Assumed characters per unit of cost, before tokenization."""
_INLINE_CHARS = 512
"""Requests up to this length are prepared on the event loop, which is faster than a thread."""
_SLICE, _SLICE_COST = 128, 8_192
"""Maximum records that are prepared in one go, and their estimated cost: some 10 ms of a tokenizer's time. The slices
of several requests take turns."""
_BATCHES_AHEAD = 4
"""Full batches that may wait for the model before the slices of large requests wait to be prepared."""


@dataclass(slots=True)  # made for each request, and a frozen one takes four times as long
class Call:
    """The context of a request."""

    receive: Receive
    timeout_s: float
    caller: Hashable
    """Batches are shared fairly among callers: connections, those of an API key with a `Share`."""
    host: Hashable = None
    """Who sends it: the API key, or the client's address without its port."""
    param: str = "input"
    """The field that holds the records."""
    may_cut: bool = True
    """Whether the engine may truncate records that are too long."""
    request_id: str = ""
    listener: Listener | None = None
    """Receives events about streamed answers."""
    span: RequestTrace | None = None
    """Traces the request."""


class RequestInFlight:
    """The lifecycle of one request: reserve → prepare → submit → wait or stream → release.

    A context manager for whole and streamed answers. On exit it cancels unanswered records and converts an exception
    to an `ApiError`.

    Args:
        size: their estimated total cost.
    """

    __slots__ = ("_call", "_cost", "_done", "_service", "_size", "_truncated", "_unsubmitted", "_values", "scope")

    def __init__(self, service: Service, values: Sequence[object], size: int, call: Call) -> None:
        self._service = service
        self._values = values
        self._size = size
        self._call = call
        self._cost = 0
        self._truncated: list[int] = []
        self._unsubmitted = float(size)
        self._done = False

    def __enter__(self) -> Self:
        if self._call.span is not None:
            self._call.span.asked(self._service.name, self._service.task, self._values)
        self._service.admission.reserve(len(self._values), self._size, self._call.timeout_s, self._call.host)
        self._service.began(self._size)
        self.scope = CancelScope(self._call.receive, self._call.timeout_s)
        return self

    async def submit(self, on_text: Callable[[int, PartialAnswer], None] | None = None) -> list[asyncio.Future[Any]]:
        """Prepare the records and queue them; returns their futures in order.

        Args:
            on_text: called with the index of a record and its answer so far, if the engine supports it.

        Raises:
            ApiError: a record is too long and may not be truncated.
            Exception: a record is invalid, or the queue is full.
        """
        futures: list[asyncio.Future[object]] = []
        if (short := self._service.prepare_short(self._values, self._size)) is not None:
            if short:
                self._submit(short, on_text, futures)
            return futures
        answered = 0
        async with aclosing(self._service.prepare(self._values, self._size, self._call, self.scope)) as slices:
            async for prepared in slices:
                self.scope.check()
                while answered < len(futures) and futures[answered].done():
                    futures[answered].result()  # an error ends the request before more is prepared
                    answered += 1
                self._submit(prepared, on_text, futures)
        return futures

    def _submit(
        self,
        prepared: Sequence[Prepared[object]],
        on_text: Callable[[int, PartialAnswer], None] | None,
        futures: list[asyncio.Future[object]],
    ) -> None:
        """Queue the next slice of the records; their futures are added to `futures`."""
        service, call = self._service, self._call
        first = len(futures)
        for index, entry in enumerate(prepared, first):
            self._cost += entry.cost
            if entry.truncated:
                self._truncated.append(index)
        if self._truncated and not call.may_cut:
            raise service.too_long(self._truncated[0], call)
        if on_text is not None:
            prepared = service.with_progress(prepared, on_text, first)
        batcher = service.batcher_for(self._size)
        try:
            for entry in prepared:
                futures.append(service.submit(entry, call, batcher))  # noqa: PERF401 - each counts once it is queued
        finally:
            self.scope.watch(futures)  # also where one is refused: the earlier ones are cancelled
        service.queued(futures[-1], self._size)
        part = self._size * len(prepared) / len(self._values)
        service.admission.submitted(part)
        self._unsubmitted -= part

    def answered(self, outputs: Sequence[object]) -> RequestAnswers:
        """Count the answers that the client receives."""
        self._done = True
        read, generated = self._service.tokens.count(outputs, self._cost)
        if self._call.span is not None:
            self._call.span.answered(outputs, read, generated)
        return RequestAnswers(outputs, self._cost, self._truncated)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        service, count = self._service, len(self._values)
        self.scope.close()
        service.admission.release(count, self._size, done=self._done, unsubmitted=self._unsubmitted)
        service.ended(self._size)
        if isinstance(error, ClientGoneError):
            service.cancelled += count
        elif isinstance(error, Exception):  # HTTP boundary: every error becomes a status
            raise service.to_api_error(error, self._call) from error


@dataclass(slots=True)
class RequestAnswers:
    """The outputs of a request."""

    outputs: Sequence[Any]
    """In the order of the records. Their type depends on the task."""
    cost: int
    """Total cost, in the engine's unit."""
    truncated: Sequence[int]
    """Indices of the records that were truncated."""


def _valid(prepared: Sequence[Prepared[object] | Exception]) -> list[Prepared[object]]:
    """Prepared records; raises the error of the first invalid one."""
    valid: list[Prepared[object]] = []
    for entry in prepared:
        if isinstance(entry, Exception):
            raise entry
        valid.append(entry)
    return valid


class Service:
    """Runs the records of requests.

    Args:
        model: the model, as requests name it.
        task: the model's task, such as "embed", "generate" or "classify".
        batcher: runs prepared records. Started and stopped with the service.
        limits: the server's limits.
        on_dead: called once when the engine has died.
        express: runs small requests beside large ones; None if the engine computes one batch at a time.
    """

    def __init__(  # noqa: PLR0913 - what a service is made of
        self,
        model: ServedModel,
        task: str,
        engine: Engine,
        batcher: Batcher[object, object],
        limits: ServeLimits,
        on_dead: Callable[[], None],
        express: Batcher[object, object] | None = None,
    ) -> None:
        self.model = model
        self.name = model.name
        self.task = task
        self.engine = engine
        self.batcher = batcher
        self._express = express
        self._batchers = (batcher,) if express is None else (batcher, express)
        self.limits = limits
        self.profile = profile = profile_of(engine)
        self._batches = profile.runs_batches
        self._full: set[int] = set()
        """The batches under way that are full, or as full as they get."""
        self.admission = AdmissionController(
            AdmissionLimits(
                Ceiling(limits.max_requests, "records", "max_requests"),
                None if limits.max_cost is None else Ceiling(limits.max_cost, profile.cost_unit, "max_cost"),
                limits.max_wait_s,
                limits.timeout_s,
            ),
            profile.width,
            profile.full_cost,
            (lambda: sum(one.waiting_cost for one in self._batchers)) if self._batches else None,
        )
        threads = 2 if (os.cpu_count() or 1) > 2 else 1  # on two cores, a second one would take the model's core
        self._pool = ThreadPoolExecutor(threads, "headrace-prepare")
        self._turns = (  # without a second batcher, preparing early takes nothing from small requests
            None
            if express is None
            else PreparationTurns(self._cost_ahead, _BATCHES_AHEAD * profile.full_cost, threads, _SLICE_COST)
        )
        self._resizable = batcher if isinstance(batcher, DynamicBatcher) else None
        self._beside = None if express is None else BESIDE.of(engine)
        self._leaves_room = False
        self._before: asyncio.Future[object] | None = None
        """The last record of a small request that was queued before large ones came."""
        self._bounded = profile.full_cost if self._resizable is None else self._resizable.target_batch_cost
        """The most a batch may cost now."""
        self._bound = BatchBound(self._bounded)
        # At least _INLINE_CHARS: otherwise a long text could pass for a short one.
        self.most_cost = max(int(profile.largest_record), _INLINE_CHARS)
        """Upper bound of the estimated cost of one record."""
        self.cancelled = 0
        """Records whose client disconnected before the answer."""
        self.tokens = TokenCounter(engine)
        self._followable = FOLLOWING.of(engine)
        self._caching = PREFIX_CACHING.of(engine)
        self._estimate = profile.kind.estimate
        self._on_dead = on_dead
        self._dead = False
        self._light = not task_named(task).images  # decoding an image takes milliseconds, whatever its cost

    @property
    def stats(self) -> BatchStats:
        """The counters of its batchers."""
        stats = self.batcher.stats
        if self._express is None:
            return stats
        beside = self._express.stats  # it counts batches with the other
        return replace(
            stats, waiting=stats.waiting + beside.waiting, waiting_cost=stats.waiting_cost + beside.waiting_cost
        )

    @property
    def counted(self) -> ServiceCounts:
        """What it has counted since it was loaded."""
        cache = None if self._caching is None else self._caching.prefix_cache_stats()
        tokens = self.tokens
        return ServiceCounts(self.stats, self.admission.refused, self.cancelled, tokens.prompt, tokens.generated, cache)

    async def start(self) -> None:
        for batcher in self._batchers:
            await batcher.start()

    async def end_batches(self, timeout_s: float | None, *, drain: bool = True) -> None:
        """Finish accepted records, for at most `timeout_s` seconds; without `drain`, fail those that wait."""
        for batcher in reversed(self._batchers):
            await batcher.stop(timeout=timeout_s, drain=drain)
        if self._turns is not None:  # those that wait for one learn that it has stopped
            self._turns.proceed()

    async def stop(self, timeout_s: float | None) -> None:
        """Finish accepted records, for at most `timeout_s` seconds, then close the engine."""
        await self.end_batches(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        await on_daemon_thread(self.engine.close)

    @property
    def can_sleep(self) -> bool:
        """Whether its engine can leave the device for host memory."""
        return SLEEPING.of(self.engine) is not None

    async def sleep(self) -> None:
        """Finish accepted records, then move the engine to host memory."""
        await self.end_batches(self.limits.drain_s)
        if (sleeper := SLEEPING.of(self.engine)) is not None:
            await on_daemon_thread(sleeper.sleep)

    async def wake(self) -> None:
        if (sleeper := SLEEPING.of(self.engine)) is not None:
            await on_daemon_thread(sleeper.wake)
        await self.start()

    def heard(self, event: Event) -> None:
        """Learn from an event of the batcher."""
        if not self._batches:
            return
        waiting, profile = self.batcher.waiting_cost, self.profile
        if isinstance(event, BatchFormed):
            if event.padded_cost + waiting >= profile.full_cost or event.size >= profile.batch_size:
                self._full.add(event.batch)
            if self._turns is not None:
                self._turns.proceed()
        elif isinstance(event, BatchDone):
            full = event.batch in self._full
            self._full.discard(event.batch)
            self.admission.batches.batch(event.cost, event.duration_s, event.at, full=full, waiting=waiting > 0)
            self._bound.ran(event.padded_cost, event.duration_s)
            self._bound_batches(event.at)

    def expect(self, per_s: float) -> None:
        """Begin with a throughput that was measured before anything is served."""
        self.admission.batches.expect(per_s)
        self._bound.ran(self._bounded, self._bounded / per_s)

    def began(self, size: int) -> None:
        """A request of this estimated cost was accepted."""
        now = asyncio.get_running_loop().time()
        self._bound.began(size, now)
        self._bound_batches(now)

    def queued(self, record: asyncio.Future[object], size: int) -> None:
        """The last record of a slice waits for the model."""
        if self._beside is not None and self._bound.is_before(size):
            self._before = record

    def ended(self, size: int) -> None:
        """It was answered, or given up."""
        self._bound.ended(size)
        if self._turns is not None:  # its waiting records have left the queue
            self._turns.proceed()

    def _bound_batches(self, now: float) -> None:
        """Keep batches short while small requests come beside large ones, or have them leave room for small ones."""
        if self._beside is not None:
            if self._leaves_room != self._bound.is_often(now):
                self._leaves_room = not self._leaves_room
                self._beside.leave_room(self._leaves_room)
            return
        most = self._bound.most(now)
        if self._resizable is not None and most != self._bounded:
            self._bounded = most
            self._resizable.set_target_batch_cost(most)

    def _cost_ahead(self) -> float:
        """The cost that waits for the model; no large request comes into a batch of small ones that came before it."""
        waiting, before = self.batcher.waiting_cost, self._before
        if waiting and isinstance(before, PendingResult) and before.holder is not None:
            return math.inf
        self._before = None
        return waiting

    def batcher_for(self, size: int) -> Batcher[object, object]:
        """Where a request of this estimated cost is batched: a small one overtakes large ones, but a crowd of small
        ones shares the model with them."""
        express, beside = self._express, self._beside
        if express is None or beside is None or not self._bound.is_beside(size):
            return self.batcher
        return self.batcher if express.waiting_cost > beside.beside_cost else express

    async def infer(self, values: Sequence[object], size: int, call: Call) -> RequestAnswers:
        """The outputs of `values`; `size` is their estimated total cost.

        Raises:
            ApiError: the request failed.
            ClientGoneError: the client has disconnected.
        """
        with RequestInFlight(self, values, size, call) as request:
            futures = await request.submit()
            return request.answered(await request.scope.all(futures))

    def prepare_short(self, values: Sequence[object], size: int) -> list[Prepared[object]] | None:
        """The prepared records of a short request; None for another, which takes a thread.

        Raises:
            Exception: the error of the first invalid record.
        """
        if not self._light or size * CHARS_PER_COST > _INLINE_CHARS:
            return None
        return _valid(self.engine.prepare(self._drawn(values)))

    def _drawn(self, values: Sequence[object]) -> Sequence[object]:
        """Equal requests get different answers where the engine draws, unless they have a seed of their own."""
        return [Placed(value, secrets.randbits(64)) for value in values] if self.profile.draws else values

    async def prepare(
        self, values: Sequence[object], size: int, call: Call, scope: CancelScope
    ) -> AsyncGenerator[list[Prepared[object]]]:
        """The prepared records, in slices. Those of a large request wait for their turns.

        What takes a thread is reported to the call's listener.

        Args:
            scope: ends the wait on a timeout or a disconnect.

        Raises:
            Exception: the error of the first invalid record.
        """
        values = self._drawn(values)
        duration_s, at = 0.0, 0.0
        step = max(min(_SLICE, _SLICE_COST * len(values) // max(size, 1)), 1)
        turns = self._turns if step < len(values) else None
        for start in range(0, len(values), step):
            some = values[start : start + step]
            turn = None if turns is None else turns.ask(size * len(some) / len(values), call.caller)
            try:
                if turn is not None:
                    await scope.wait(turn)
                prepared, took_s, at = await self.on_thread(self._prepare, some)
                duration_s += took_s
                yield _valid(prepared)
            finally:
                if turns is not None and turn is not None:
                    turns.end(turn)
        if call.listener is not None:
            call.listener(StageDone("prepare", len(values), duration_s, at))

    def _prepare(self, values: Sequence[object]) -> tuple[list[Prepared[object] | Exception], float, float]:
        """The prepared records, how long it took, and when it ended."""
        started = time.monotonic()
        prepared = self.engine.prepare(values)
        ended = time.monotonic()
        return prepared, ended - started, ended

    async def on_thread(self, call: Callable[[ValueT], ResultT], value: ValueT) -> ResultT:
        """Call a function of the tokenizer on one of a few threads, so that it does not hold up other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, value)

    @property
    def longest(self) -> int | None:
        """Maximum tokens of a text, if the engine reports it."""
        return self.profile.max_model_len

    def too_long(self, index: int, call: Call) -> ApiError:
        """The error for a text that is too long and may not be truncated."""
        limit = "the model accepts" if self.longest is None else f"the {self.longest:,} tokens the model accepts"
        return ApiError(
            400,
            f"text {index} of {call.param} is longer than {limit}; shorten it, or let the server truncate it",
            code="too_long",
            param=call.param,
        )

    def submit(self, entry: Prepared[object], call: Call, batcher: Batcher[object, object]) -> asyncio.Future[object]:
        if isinstance(entry.payload, Chunks):
            return asyncio.ensure_future(run_chunks(entry.payload, partial(self._part, call=call, batcher=batcher)))
        payload = entry.payload
        if self._caching is not None:
            payload = self._caching.count_cached(payload)
        if call.span is not None and self._batches:
            payload = call.span.carried(payload)
        estimate = self._estimate(entry.cost)
        return batcher.submit_nowait(payload, estimated_cost=estimate, priority=ONLINE, caller=call.caller)

    async def _part(self, payload: object, cost: int, call: Call, batcher: Batcher[object, object]) -> object:
        """The output of one part of a record, which waits for room in the queue."""
        estimate = self._estimate(cost)
        return await (await batcher.submit(payload, estimated_cost=estimate, priority=ONLINE, caller=call.caller))

    def with_progress(
        self, prepared: Sequence[Prepared[object]], on_text: Callable[[int, PartialAnswer], None], first: int
    ) -> list[Prepared[object]]:
        """The same records, with `on_text` called on the event loop as their answers grow, if the engine supports it.

        The answer to a prompt that is split comes in one piece.

        Args:
            first: the index of the first record in its request.
        """
        if self._followable is None:
            return list(prepared)
        loop = asyncio.get_running_loop()

        def report(index: int, answer: PartialAnswer) -> None:  # called on the engine's thread
            loop.call_soon_threadsafe(on_text, index, answer)

        follow = self._followable.follow
        return [
            entry
            if isinstance(entry.payload, Chunks)
            else replace(entry, payload=follow(entry.payload, partial(report, index)))
            for index, entry in enumerate(prepared, first)
        ]

    def to_api_error(self, error: BaseException, call: Call) -> ApiError:
        """Convert an error to a response. If the engine has died, call `on_dead`."""
        if isinstance(error, EngineDeadError) and not self._dead:
            self._dead = True
            self._on_dead()
        return api_error(error, call.param, call.request_id)
