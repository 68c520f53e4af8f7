"""One model behind one batcher, and the way of a request's records through both."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.batching.batcher import Batcher
from headrace.engines.base import BatchEngine, Engine, FollowableEngine, Prepared, StepEngine
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
        engine: Engine[Any, Any],
        batcher: Batcher[Any, Any],
        limits: ServeLimits,
        on_dead: Callable[[], None],
    ) -> None:
        self.name = name
        self.task = task
        self.engine = engine
        self.batcher = batcher
        self.limits = limits
        full = _full_batch(engine)
        self.gate = AdmissionController(
            limits.max_requests, limits.max_cost or _GATE_BATCHES * full, _width(engine), full
        )
        self.most_cost = _most_cost(engine)
        """What one record is taken to cost at most, however long it is and whatever answer it allows."""
        self.cancelled = 0
        """Records whose client left before they were answered."""
        self.tokens = Tokens(engine)
        # Asked here once: looking through a protocol's methods takes longer than a small request.
        self.follows = engine if isinstance(engine, FollowableEngine) else None
        self._tells_cost = not isinstance(engine, StepEngine)  # whose budget is of the unit of its `span`
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
        self.gate.reserve(len(values), size, call.timeout_s)
        done = False
        wait = CancelScope(call.receive, call.timeout_s)
        try:
            prepared = await self.prepare(values, size)
            truncated = [place for place, entry in enumerate(prepared) if entry.truncated]
            if truncated and not call.may_cut:
                raise self._too_long(truncated[0], call)
            futures = [self.submit(entry, call) for entry in prepared]
            results = await wait.all(futures)
            done = True
        except ClientGoneError:
            self.cancelled += len(values)
            raise
        except Exception as error:  # the edge to HTTP: whatever it is, it becomes a status
            raise self.told(error, call) from error
        else:
            cost = sum(entry.cost for entry in prepared)
            self.tokens.count(results, cost)
            return Answers(results, cost, truncated)
        finally:
            wait.close()
            self.gate.release(len(values), size, done=done)

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
        return getattr(self.engine, "max_model_len", None)

    def _too_long(self, place: int, call: Call) -> ApiError:
        limit = "" if self.longest is None else f" {self.longest:,} tokens"
        return ApiError(
            400,
            f"text {place} of {call.param} is longer than the{limit} that the model takes; shorten it, or leave out "
            "truncate to have it cut",
            code="too_long",
            param=call.param,
        )

    def submit(self, entry: Prepared[Any], call: Call) -> asyncio.Future[Any]:
        """Let one prepared record wait for its batch."""
        return self.batcher.submit_nowait(
            entry.payload, estimated_cost=entry.cost if self._tells_cost else None, priority=ONLINE, caller=call.caller
        )

    def told(self, error: BaseException, call: Call) -> ApiError:
        """What to tell the caller of an error; a dead engine is told to the server too."""
        if isinstance(error, EngineDeadError) and not self._dead:
            self._dead = True
            self._on_dead()
        return api_error(error, call.param, call.request_id)


def _most_cost(engine: Engine[Any, Any]) -> int:
    longest = getattr(engine, "max_model_len", None) or getattr(engine, "max_cost", None) or sys.maxsize
    return max(int(longest), _INLINE_CHARS)  # or a long text would be taken for one that is prepared on the loop


def _full_batch(engine: Engine[Any, Any]) -> float:
    if isinstance(engine, StepEngine):
        return engine.max_cost
    return engine.default_batch_cost if isinstance(engine, BatchEngine) else 65_536


def _width(engine: Engine[Any, Any]) -> int:
    """Records that it takes at once."""
    if isinstance(engine, StepEngine):
        return engine.max_slots
    return engine.default_batch_size if isinstance(engine, BatchEngine) else int(getattr(engine, "max_in_flight", 1))
