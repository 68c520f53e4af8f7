"""`PassthroughBatcher`: for engines that batch by themselves; sends many single requests at the same time."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.batching.batcher import Batcher
from headrace.batching.dispatch.dispatcher import Dispatcher
from headrace.batching.options import NO_BUDGET, BatchOptions, Options, function, whole
from headrace.batching.policy.cost import BatchLimits, CostEstimatorFn, CostRule
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


class PassthroughBatcher(Batcher[RecordT, ResultT]):
    """Keeps `max_in_flight` requests in flight: when one ends, the next begins.

    Submission, ordering, backpressure and statistics are the same as `DynamicBatcher`'s, with a request counted as a
    batch. A request whose caller has cancelled is cancelled too, even in flight.

    Args:
        infer_fn: `async (record) -> result`, called concurrently on the event loop.
        max_in_flight: Concurrent requests.
        max_queue_size: Requests that may wait in addition.
        cost_estimator: `(record) -> cost`, for statistics and for fairness between callers.
        process_timeout_s: Time limit of a request, in seconds; a slower one is cancelled and fails.
        listener: Called on the event loop with each `headrace.events` event.

    Raises:
        ConfigError: a parameter is out of range.
    """

    def __init__(
        self,
        infer_fn: Callable[[RecordT], Awaitable[ResultT]],
        *,
        max_in_flight: int,
        max_queue_size: int = 1_000,
        cost_estimator: CostEstimatorFn | None = None,
        process_timeout_s: float | None = None,
        listener: Listener | None = None,
    ) -> None:
        slots = whole("max_in_flight", max_in_flight, 1)
        infer = functools.partial(_one, function("infer_fn", infer_fn, needed=True))
        one_by_one = BatchOptions(infer, max_concurrent_batches=slots)
        options = Options(
            name=type(self).__name__,
            limits=BatchLimits(target_batch_cost=NO_BUDGET, max_batch_size=1),
            capacity=whole("max_queue_size", max_queue_size, 1) + 1,
            in_flight=slots,
            process_timeout_s=process_timeout_s,
            listener=listener,
        )
        cost = CostRule(function("cost_estimator", cost_estimator, needed=False, plain=True), ("estimate_cost",), 1)
        super().__init__(options, cost, functools.partial(Dispatcher, options=one_by_one))


async def _one(infer_fn: Callable[[RecordT], Awaitable[ResultT]], records: list[RecordT]) -> list[ResultT]:
    return [await infer_fn(records[0])]
