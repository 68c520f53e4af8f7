"""One model behind one batcher, and the way of a request's records through both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from headrace.batching.batcher import Batcher
from headrace.engines.base import AnyEngine, Prepared, can_be_followed
from headrace.engines.profile import profile_of
from headrace.errors import EngineDeadError
from headrace.events import Listener
from headrace.serving.admission.controller import AdmissionController
from headrace.serving.admission.waiting import CancelScope, Receive
from headrace.serving.errors import ApiError, ClientGoneError, api_error
from headrace.serving.limits import ServeLimits
from headrace.serving.tokens import Tokens

ONLINE = 0
"""Priority of what a client waits for."""
CHARS_PER_COST = 4
"""Characters that are taken for a unit of cost before anything is tokenized."""
_INLINE_CHARS = 512
"""Texts so short are prepared on the event loop: a thread would take longer to hear of them."""
_GATE_BATCHES = 64
"""Full batches of cost that are taken on, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a request besides its records."""

    receive: Receive
    timeout_s: float
    caller: Hashable
    """Whose share of the batches it counts on: the API key's, or the connection's."""
    param: str = "input"
    """The field that holds its records."""
    may_cut: bool = True
    """Whether the engine may cut what is too long for it."""
    request_id: str = ""
    listener: Listener | None = None
    """Told how its stream goes on."""


class InFlight:
    """One request between its arrival and its answer: reserve → prepare → submit → wait or stream → release.

    A context: whole and streamed answers alike enter it first and leave it last. On leaving, what is not answered is
    given up, and an error becomes the status that the client is told.

    Args:
        service: whose model answers.
        values: the records.
        size: a guess of what they cost together.
        call: what is known of the request besides.
    """

    def __init__(self, service: Service, values: Sequence[Any], size: int, call: Call) -> None:
        self._service = service
        self._values = values
        self._size = size
        self._call = call
        self._cost = 0
        self._truncated: Sequence[int] = ()
        self._done = False

    def __enter__(self) -> Self:
        self._service.gate.reserve(len(self._values), self._size, self._call.timeout_s)
        self.scope = CancelScope(self._call.receive, self._call.timeout_s)
        return self

    async def submit(self, on_text: Callable[[int, str], None] | None = None) -> list[asyncio.Future[Any]]:
        """Prepare the records and let each wait for its batch; returns their futures in order.

        Args:
            on_text: told the place of a record and its text so far, where the engine's answers can be followed.

        Raises:
            ApiError: a record is too long, and may not be cut.
            Exception: a record's own; or there is no room for it.
        """
        service, call = self._service, self._call
        prepared = await service.prepare(self._values, self._size)
        self._truncated = [place for place, entry in enumerate(prepared) if entry.truncated]
        if self._truncated and not call.may_cut:
            raise service.too_long(self._truncated[0], call)
        self._cost = sum(entry.cost for entry in prepared)
        if on_text is not None:
            prepared = service.followed(prepared, on_text)
        futures: list[asyncio.Future[Any]] = []
        self.scope.watch(futures)  # first: those before one that is refused are given up with it
        for entry in prepared:
            futures.append(service.submit(entry, call))  # noqa: PERF401 - each is watched as soon as it waits
        return futures

    def answered(self, outputs: Sequence[Any]) -> Answers:
        """Count what the client has received, or is about to."""
        self._done = True
        self._service.tokens.count(outputs, self._cost)
        return Answers(outputs, self._cost, self._truncated)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        service, count = self._service, len(self._values)
        self.scope.close()
        service.gate.release(count, self._size, done=self._done)
        if isinstance(error, ClientGoneError):
            service.cancelled += count
        elif isinstance(error, Exception):  # the edge to HTTP: whatever it is, it becomes a status
            raise service.told(error, self._call) from error


@dataclass(frozen=True, slots=True)
class Answers:
    """What a request's records gave."""

    outputs: Sequence[Any]
    """In order."""
    cost: int
    """Of all of them, in the engine's unit."""
    truncated: Sequence[int]
    """Places of those that were cut, as the engine takes no longer ones."""


class Service:
    """What the routes call.

    Args:
        name: the model's, in requests and answers.
        task: what the model does: "embed", "generate", "classify" or another.
        engine: prepares records; closed with the service.
        batcher: runs what is prepared; started and stopped with the service.
        limits: how much is taken on.
        on_dead: called once when the engine says that it is gone.
    """

    def __init__(
        self,
        name: str,
        task: str,
        engine: AnyEngine,
        batcher: Batcher[Any, Any],
        limits: ServeLimits,
        on_dead: Callable[[], None],
    ) -> None:
        self.name = name
        self.task = task
        self.engine = engine
        self.batcher = batcher
        self.limits = limits
        self.profile = profile = profile_of(engine)
        """Of the engine."""
        full = profile.full_cost
        self.gate = AdmissionController(
            limits.max_requests, limits.max_cost or _GATE_BATCHES * full, profile.width, full
        )
        # Else a long text would be taken for one that is prepared on the event loop.
        self.most_cost = max(int(profile.largest_record), _INLINE_CHARS)
        """What one record is taken to cost at most, however long it is and whatever answer it allows."""
        self.cancelled = 0
        """Records whose client left before they were answered."""
        self.tokens = Tokens(engine)
        self.follows = engine if can_be_followed(engine) else None
        self._on_dead = on_dead
        self._dead = False
        self._light = not task.startswith("image-")  # an image is milliseconds of work, however little it costs
        self._pool = ThreadPoolExecutor(2, "headrace-prepare")

    async def start(self) -> None:
        """Begin to form batches."""
        await self.batcher.start()

    async def stop(self, timeout_s: float | None) -> None:
        """Finish what is accepted, for `timeout_s` seconds at most, then close the engine."""
        await self.batcher.stop(timeout=timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.engine.close)

    async def infer(self, values: Sequence[Any], size: int, call: Call) -> Answers:
        """Each value's output; `size` is a guess of what they cost together.

        Raises:
            ApiError: what became of the request, if no answer.
            ClientGoneError: nobody waits for one.
        """
        with InFlight(self, values, size, call) as request:
            futures = await request.submit()
            return request.answered(await request.scope.all(futures))

    async def prepare(self, values: Sequence[Any], size: int) -> list[Prepared[Any]]:
        """What the engine takes of each.

        Raises:
            Exception: the first record's own.
        """
        if self._light and size * CHARS_PER_COST <= _INLINE_CHARS:
            prepared = self.engine.prepare(values)
        else:
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._pool, self.engine.prepare, values)
        good: list[Prepared[Any]] = []
        for entry in prepared:
            if isinstance(entry, Exception):
                raise entry
            good.append(entry)
        return good

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text that the engine takes, where it says so."""
        return self.profile.max_model_len

    def too_long(self, place: int, call: Call) -> ApiError:
        """What to tell the caller of a text that may not be cut."""
        limit = "" if self.longest is None else f"the {self.longest:,} tokens that "
        return ApiError(
            400,
            f"text {place} of {call.param} is longer than {limit}the model takes; shorten it, or leave out "
            "truncate to have it cut",
            code="too_long",
            param=call.param,
        )

    def submit(self, entry: Prepared[Any], call: Call) -> asyncio.Future[Any]:
        """Let one prepared record wait for its batch."""
        estimate = self.profile.estimate(entry.cost)
        return self.batcher.submit_nowait(entry.payload, estimated_cost=estimate, priority=ONLINE, caller=call.caller)

    def followed(self, prepared: Sequence[Prepared[Any]], on_text: Callable[[int, str], None]) -> list[Prepared[Any]]:
        """The same records, whose texts are told on the event loop as they grow, where the engine can be followed."""
        if self.follows is None:
            return list(prepared)
        loop = asyncio.get_running_loop()

        def tell(place: int, text: str) -> None:  # called on the engine's thread
            loop.call_soon_threadsafe(on_text, place, text)

        follow = self.follows.follow
        return [
            replace(entry, payload=follow(entry.payload, partial(tell, place))) for place, entry in enumerate(prepared)
        ]

    def told(self, error: BaseException, call: Call) -> ApiError:
        """What to tell the caller of an error; a dead engine is told to the server too."""
        if isinstance(error, EngineDeadError) and not self._dead:
            self._dead = True
            self._on_dead()
        return api_error(error, call.param, call.request_id)
