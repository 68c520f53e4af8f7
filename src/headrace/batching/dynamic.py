"""`DynamicBatcher`: batches records from many callers for one function, within a cost budget."""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal, TypedDict, TypeVar

from headrace.batching.batcher import Batcher
from headrace.batching.dispatch.dispatcher import Dispatcher
from headrace.batching.options import BatchOptions, Options, function, number, one_of, whole
from headrace.batching.policy.cost import BatchLimits, CostEstimatorFn, CostRule
from headrace.errors import ConfigError
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

WINDOW_BATCHES = 16
"""`length_bucketing=True` reorders within this many full batches, at most the queue's capacity."""


class BatcherOptions(TypedDict, total=False):
    """The keyword arguments of `DynamicBatcher`, for functions that pass them on."""

    cost_estimator: CostEstimatorFn | None
    target_batch_cost: float
    max_batch_size: int
    min_batch_size: int
    batch_timeout_s: float
    max_queue_size: int
    prefetch_batches: int
    default_cost: float
    padded: bool
    length_bucketing: bool | int
    max_queue_cost: float | None
    max_concurrent_batches: int
    overlap: bool
    on_error: Literal["fail", "isolate"]
    oversized: Literal["alone", "reject"]
    process_timeout_s: float | None
    offload: bool
    listener: Listener | None


class DynamicBatcher(Batcher[RecordT, ResultT]):
    """Collects records from many callers into batches for one function.

    Args:
        process_fn: `(list of records) -> list of results`, one per record in the same order; an exception object in a
            result's place fails only that record. An `async def` runs on the event loop, a plain function on a
            dedicated thread.
        cost_estimator: `(record) -> cost`. Without it, the record's `estimate_cost()` is used, then `default_cost`.
        target_batch_cost: Maximum cost of a batch. A record that exceeds it is batched alone.
        max_batch_size: Maximum records per batch.
        min_batch_size: Minimum records of a batch closed at a length boundary; a timeout or shutdown overrides it.
        batch_timeout_s: How long the oldest record waits for a fuller batch while a slot is free, in seconds.
        max_queue_size: Records that may wait, beyond those of the next `prefetch_batches` + 1 batches.
        prefetch_batches: See `max_queue_size`. Batches are formed only when a slot is free.
        default_cost: Cost of a record without any other estimate.
        padded: A batch costs records × its longest record instead of the sum, as for an engine that pads.
        length_bucketing: Batch records of similar cost together: True, or how many records may be reordered.
        max_queue_cost: Maximum total cost of the waiting records.
        max_concurrent_batches: Batches processed at the same time (slots).
        overlap: Pass one batch more to `process_fn`, once it is full, while `max_concurrent_batches` are processed: for
            a function that copies a batch to its device while it computes another.
        on_error: "fail": a failed batch fails all its records. "isolate": retry it in halves until only the bad record
            has failed. A batch that ran out of memory is always halved, and later batches stay smaller.
        oversized: "alone", or "reject" a record that exceeds `target_batch_cost`.
        process_timeout_s: Time limit of a batch, in seconds.
        offload: Run a blocking async `process_fn` on a separate thread with its own event loop.
        listener: Called on the event loop with each `headrace.events` event of this batcher.

    Raises:
        ConfigError: a parameter is out of range; the message names parameter, value and range.
    """

    def __init__(  # noqa: PLR0913  # the drop-in's constructor, all but one of them keyword-only
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
        overlap: bool = False,
        on_error: Literal["fail", "isolate"] = "fail",
        oversized: Literal["alone", "reject"] = "alone",
        process_timeout_s: float | None = None,
        offload: bool = False,
        listener: Listener | None = None,
    ) -> None:
        size = whole("max_batch_size", max_batch_size, 1)
        smallest = whole("min_batch_size", min_batch_size, 1)
        if smallest > size:
            raise ConfigError(f"min_batch_size is {smallest!r}: it must be <= max_batch_size, {size!r}")
        queue = whole("max_queue_size", max_queue_size, 1)
        capacity = queue + (whole("prefetch_batches", prefetch_batches, 0) + 1) * size
        if isinstance(length_bucketing, bool):
            length_bucketing = min(WINDOW_BATCHES * size, capacity) if length_bucketing else 0
        batches = BatchOptions(process_fn, batch_timeout_s, max_concurrent_batches, offload, overlap)
        options = Options(
            name=type(self).__name__,
            limits=BatchLimits(
                target_batch_cost=number("target_batch_cost", target_batch_cost, above=0),
                max_batch_size=size,
                min_batch_size=smallest,
                padded=one_of("padded", padded, (False, True)),
                window=whole("length_bucketing", length_bucketing, 0),
            ),
            capacity=capacity,
            in_flight=batches.slots * size,
            max_queue_cost=max_queue_cost,
            process_timeout_s=process_timeout_s,
            on_error=on_error,
            oversized=oversized,
            listener=listener,
        )
        function("cost_estimator", cost_estimator, needed=False, plain=True)
        default = number("default_cost", default_cost, minimum=0)
        # `TokenBatcher` passes a CostRule, which includes a default.
        rule = cost_estimator if isinstance(cost_estimator, CostRule) else None
        super().__init__(
            options,
            rule or CostRule(cost_estimator, ("estimate_cost",), default),
            functools.partial(Dispatcher, options=batches),
        )

    def beside(self, cost: float, listener: Listener | None) -> DynamicBatcher[RecordT, ResultT]:
        """A batcher of its own for batches of at most this cost, which run while this one's do, on another thread.

        Call it before `start()`. Batches of both are numbered and counted together. Start it after this one, and stop
        it before.
        """
        other = copy.copy(self)
        limits = replace(self._options.limits, target_batch_cost=number("cost", cost, above=0))
        name = f"{self._options.name}-beside"
        other._options = replace(self._options, name=name, limits=limits, listener=listener)
        other._stopping, other._times = set(), False
        return other

    @property
    def target_batch_cost(self) -> float:
        """The most a batch may cost now; lowered after an out-of-memory error."""
        limits = self._options.limits if self._submission is None else self._submission.queue.limits
        return limits.target_batch_cost

    def set_target_batch_cost(self, cost: float) -> None:
        """Change the most that later batches may cost; the limit after an out-of-memory error stays. On its own loop.

        Raises:
            ConfigError: not a finite number > 0.
        """
        number("target_batch_cost", cost, above=0)
        self._options = replace(self._options, limits=replace(self._options.limits, target_batch_cost=cost))
        if self._submission is not None and self.is_running:
            dispatcher = self._submission.dispatcher
            assert isinstance(dispatcher, Dispatcher), "it was made here"
            dispatcher.set_budget(cost)
