"""`ContinuousBatcher`: for engines that work in steps; records join and leave between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from headrace.batching.batcher import DynamicBatcher
from headrace.batching.options import whole
from headrace.batching.stats import BatchStats
from headrace.batching.steploop import step_loop
from headrace.batching.stepping import StepFunction, StepModel
from headrace.errors import ConfigError
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

_NO_BUDGET = 1e18


class ContinuousBatcher(DynamicBatcher[RecordT, ResultT]):
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
        model: Any = _as_model(engine)
        self._max_slots = whole("max_slots", max_slots, 1)
        super().__init__(
            model.step,  # what is called for every step, as process_fn is for every batch
            cost_estimator=lambda record: model.span(record)[0],
            target_batch_cost=_NO_BUDGET if max_cost is None else max_cost,
            max_batch_size=1,
            max_concurrent_batches=max_slots,
            batch_timeout_s=0,
            max_queue_size=max_queue_size,
            prefetch_batches=0,
            max_queue_cost=max_queue_cost,
            on_error=on_error,
            oversized=oversized,
            process_timeout_s=process_timeout_s,
            listener=listener,
        )
        self._dispatching = step_loop(model, max_slots)

    @property
    def stats(self) -> BatchStats:
        """The counts at this moment, a frozen snapshot; a batch is a step, and its size the slots taken."""
        return replace(super().stats, max_batch_size=self._max_slots)


def _as_model(engine: Any) -> StepModel[Any, Any]:
    missing = [name for name in ("span", "add", "step", "needs", "remove") if not callable(getattr(engine, name, None))]
    if not missing:
        return engine  # type: ignore[no-any-return]  # it has every method of one
    if callable(engine) and len(missing) == 5:
        return StepFunction(engine)
    raise ConfigError(f"engine is a {type(engine).__name__} without {', '.join(missing)}: see headrace.StepFunction")
