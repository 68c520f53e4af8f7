"""`StreamBatcher`: for engines that batch by themselves; many requests are under way at once, each on its own."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.batching.batcher import DynamicBatcher
from headrace.batching.cost import CostEstimatorFn
from headrace.batching.options import function, whole
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


class StreamBatcher(DynamicBatcher[RecordT, ResultT]):
    """Keeps `max_in_flight` requests under way: as one ends the next begins, and no boundary drains the engine.

    All of `DynamicBatcher`'s ways to submit, its order, backpressure and statistics; what is a batch there is one
    request here. A request that nobody waits for any more is cancelled, also while it is under way.

    Args:
        infer_fn: `async (record) -> result`, called for many records at once on the event loop.
        max_in_flight: Requests under way at the same time.
        max_queue_size: Requests that may wait beyond those.
        cost_estimator: `(record) -> cost`, for statistics and for fairness between callers.
        process_timeout_s: A request that takes longer is cancelled and fails, in seconds.
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
        super().__init__(
            functools.partial(_one, function("infer_fn", infer_fn, needed=True)),
            cost_estimator=cost_estimator,
            process_timeout_s=process_timeout_s,
            max_batch_size=1,
            batch_timeout_s=0,
            max_queue_size=max_queue_size,
            prefetch_batches=0,
            max_concurrent_batches=whole("max_in_flight", max_in_flight, 1),
            listener=listener,
        )


async def _one(infer_fn: Callable[[RecordT], Awaitable[ResultT]], records: list[RecordT]) -> list[ResultT]:
    return [await infer_fn(records[0])]
