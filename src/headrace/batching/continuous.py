"""`ContinuousBatcher`: for engines that work in steps; records join and leave between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from headrace.batching.batcher import Batcher
from headrace.batching.dispatch.step_scheduler import StepScheduler
from headrace.batching.options import NO_BUDGET, Options, number, whole
from headrace.batching.policy.bucketing import Limits
from headrace.batching.policy.cost import CostRule
from headrace.batching.stats import BatchStats
from headrace.batching.step_model import StepFunction, StepModel
from headrace.errors import ConfigError
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


class ContinuousBatcher(Batcher[RecordT, ResultT]):
    """Keeps up to `max_slots` records in an engine that takes many steps for each.

    A record that finishes leaves after that step, and the next takes its slot: nobody waits for the slowest of a batch.
    All of `DynamicBatcher`'s ways to submit, its order, backpressure, failures and statistics; a batch of the
    statistics is a step here. A record that is cancelled leaves before the next step.

    Args:
        engine: A `StepModel`, such as `StepFunction`; or a plain `(states) -> next states` with records as first
            states. It runs on a thread of its own.
        max_slots: Most records in the engine at a time.
        max_cost: Most they may hold together, such as tokens of a key-value cache; None for no limit. A record joins
            while what all are expected to grow to fits, learned from those that have finished. Where that was too
            hopeful, the last to have joined are sent back: they go on, or begin again, as soon as there is room.
        max_queue_size: Records that may wait for a slot.
        max_queue_cost: Most the waiting records may cost together, at first.
        on_error: "fail": a step that raises fails all records in it. "isolate": they begin again in halves, each half
            alone, until only the bad record has failed. Out of memory, the slots are halved and stay so, either way.
        oversized: "alone", or "reject" a record that costs more than `max_cost` at first.
        process_timeout_s: A step that takes longer fails, in seconds.
        listener: Called on the event loop with each `headrace.events` event.

    Raises:
        ConfigError: a parameter is out of range.
    """

    def __init__(  # noqa: PLR0913  # keyword-only options, as DynamicBatcher's
        self,
        engine: StepModel[RecordT, ResultT] | Callable[[list[RecordT]], Sequence[Any]],
        *,
        max_slots: int = 64,
        max_cost: float | None = None,
        max_queue_size: int = 5_000,
        max_queue_cost: float | None = None,
        on_error: Literal["fail", "isolate"] = "fail",
        oversized: Literal["alone", "reject"] = "alone",
        process_timeout_s: float | None = None,
        listener: Listener | None = None,
    ) -> None:
        model = _as_model(engine)
        slots = whole("max_slots", max_slots, 1)
        budget = NO_BUDGET if max_cost is None else number("max_cost", max_cost, above=0)
        options = Options(
            name=type(self).__name__,
            limits=Limits(target_batch_cost=budget, max_batch_size=1),  # they leave the waiting room one by one
            capacity=whole("max_queue_size", max_queue_size, 1) + 1,
            in_flight=slots,
            max_queue_cost=max_queue_cost,
            process_timeout_s=process_timeout_s,
            on_error=on_error,
            oversized=oversized,
            listener=listener,
        )
        cost = CostRule(lambda record: model.span(record)[0], (), 0)
        super().__init__(options, cost, functools.partial(StepScheduler, model=model, max_slots=slots))

    @property
    def stats(self) -> BatchStats:
        """The counts at this moment, a frozen snapshot; a batch is a step, and its size the slots taken."""
        return replace(super().stats, max_batch_size=self._options.in_flight)


def _as_model(given: Any) -> StepModel[Any, Any]:
    missing = [name for name in ("span", "add", "step", "needs", "remove") if not callable(getattr(given, name, None))]
    if not missing:
        return given  # type: ignore[no-any-return]  # it has every method of one
    if callable(given) and len(missing) == 5:
        return StepFunction(given)
    raise ConfigError(f"engine is a {type(given).__name__} without {', '.join(missing)}: see headrace.StepFunction")
