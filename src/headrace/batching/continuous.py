"""`ContinuousBatcher`: for step-wise engines; records join and leave between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, cast

from headrace.batching.batcher import Batcher
from headrace.batching.dispatch.step_scheduler import StepScheduler
from headrace.batching.options import NO_BUDGET, Options, number, whole
from headrace.batching.policy.cost import BatchLimits, CostRule
from headrace.batching.policy.growth import Growth
from headrace.batching.stats import BatchStats
from headrace.batching.step_model import AnyStepModel, StepFunction, StepModel, group_of
from headrace.errors import ConfigError
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


class ContinuousBatcher(Batcher[RecordT, ResultT]):
    """Keeps up to `max_slots` records in an engine that takes many steps for each.

    A finished record leaves after its last step and the next record takes its slot, so no record waits for the slowest
    one in its batch. Submission, ordering, backpressure, failures and statistics are the same as `DynamicBatcher`'s,
    with a step counted as a batch. A cancelled record leaves before the next step.

    Args:
        engine: A `StepModel`, such as `StepFunction`; or a plain `(states) -> next states` whose first states are the
            records. It runs on a dedicated thread.
        max_slots: Maximum records in the engine at a time.
        max_cost: Maximum cost of all of them, such as tokens of a key-value cache; None for no limit. A record joins
            if the expected final cost of all records fits, estimated from finished records. If the estimate was too
            low, the last records to join are evicted; they resume or restart as soon as there is room.
        max_queue_size: Records that may wait for a slot.
        max_queue_cost: Maximum initial cost of all waiting records.
        on_error: "fail": a step that raises fails all records in it. "isolate": they restart in halves, each half
            alone, until only the bad record has failed. Running out of memory always halves the slots for good.
        oversized: "alone", or "reject" a record whose initial cost exceeds `max_cost`.
        process_timeout_s: Time limit of a step, in seconds.
        listener: Called on the event loop with each `headrace.events` event.

    Raises:
        ConfigError: a parameter is out of range.
    """

    def __init__(  # noqa: PLR0913  # keyword-only options, as DynamicBatcher's
        self,
        engine: StepModel[RecordT, ResultT] | Callable[[list[RecordT]], Sequence[object]],
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
        self._model = model = _as_model(engine)
        self._growth = Growth()
        slots = whole("max_slots", max_slots, 1)
        budget = NO_BUDGET if max_cost is None else number("max_cost", max_cost, above=0)
        options = Options(
            name=type(self).__name__,
            limits=BatchLimits(target_batch_cost=budget, max_batch_size=1),  # records leave the queue one at a time
            capacity=whole("max_queue_size", max_queue_size, 1) + 1,
            in_flight=slots,
            max_queue_cost=max_queue_cost,
            process_timeout_s=process_timeout_s,
            on_error=on_error,
            oversized=oversized,
            listener=listener,
        )
        cost = CostRule(lambda record: model.span(record)[0], (), 0)
        super().__init__(
            options, cost, lambda context: StepScheduler(context, model, self._options.in_flight, self._growth)
        )

    def expected_cost(self, record: RecordT) -> float:
        """The final cost of a record, as far as it can be told from those that have finished."""
        start, most = self._model.span(record)
        return self._growth.expected(start, most, start, group_of(self._model, record))

    def set_max_slots(self, count: int) -> None:
        """Change the most records in the engine; the limit after an out-of-memory error stays. On its own loop.

        Raises:
            ConfigError: not a whole number > 0.
        """
        self._options = replace(self._options, in_flight=whole("max_slots", count, 1))
        if self._submission is not None and self.is_running:
            scheduler = self._submission.dispatcher
            assert isinstance(scheduler, StepScheduler), "it was made here"
            scheduler.set_max_slots(count)

    @property
    def stats(self) -> BatchStats:
        """A frozen snapshot of the counters; a batch is a step, and its size the number of occupied slots."""
        return replace(super().stats, max_batch_size=self._options.in_flight)


def _as_model(given: object) -> AnyStepModel:
    missing = [name for name in ("span", "add", "step", "needs", "remove") if not callable(getattr(given, name, None))]
    if not missing:
        return cast("AnyStepModel", given)
    if callable(given) and len(missing) == 5:
        return StepFunction(given)
    raise ConfigError(f"engine is a {type(given).__name__} without {', '.join(missing)}: see headrace.StepFunction")
