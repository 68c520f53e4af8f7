"""Step-wise engines: their interface, an adapter for step functions, and one call on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from headrace.batching.foreign_calls import Raised, attempt
from headrace.batching.options import function, whole
from headrace.batching.results import checked_results, own_result
from headrace.errors import BadResultError, EngineDeadError, RecordError
from headrace.wording import shown

RecordT = TypeVar("RecordT")
StateT = TypeVar("StateT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class StepModel(Protocol[RecordT, ResultT_co]):
    """A model that takes many steps for one record, and many records in one step.

    Every method except `span` is called on one dedicated thread.
    """

    def span(self, record: RecordT) -> tuple[float, float]:
        """The record's initial and maximum cost. Called on the event loop, so it must be fast."""

    def add(self, key: int, record: RecordT) -> None:
        """Add a record to the next step, under a key that was never used before.

        Raises:
            RecordError: the record is refused; others are not affected.
        """

    def step(self) -> Sequence[tuple[int, ResultT_co | Exception]]:
        """Take one step with all added records; returns (key, result) of each finished record.

        Finished records are removed. An exception in a result's place fails only that record; a raised one fails all.
        """

    def needs(self, key: int) -> float:
        """The record's cost during its next step, in the unit of `span`."""

    def remove(self, key: int) -> RecordT | None:
        """Remove a record in any state; an unknown key is ignored.

        Returns what `add` takes to resume it later, or None if it must restart.
        """


@runtime_checkable
class SharingStepModel(StepModel[RecordT, ResultT_co], Protocol[RecordT, ResultT_co]):
    """A step model whose records share a part of their cost, such as a common prefix in a key-value cache."""

    def shared(self, key: int) -> float:
        """How much of the record's cost is counted for one that was added before it."""

    def overlap(self, record: RecordT) -> float:
        """How much of the cost of a record that may join is counted for those in the model.

        Called on the event loop between steps, so it must be fast.
        """


@runtime_checkable
class GroupingStepModel(StepModel[RecordT, ResultT_co], Protocol[RecordT, ResultT_co]):
    """A step model that knows which records may grow alike."""

    def group(self, record: RecordT) -> Hashable:
        """What the record has in common with others, such as the beginning of its prompt; None for nothing.

        Called on the event loop, so it must be fast.
        """


AnyStepModel: TypeAlias = StepModel[Any, Any]
"""A step model whose types do not matter."""


def group_of(model: AnyStepModel, record: object) -> Hashable:
    """The record's group, if the model has groups."""
    return model.group(record) if isinstance(model, GroupingStepModel) else None


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """What a step function returns in place of a finished state."""

    result: ResultT


class StepFunction(Generic[RecordT, StateT, ResultT]):
    """Adapts a step function to `StepModel`: `(list of states) -> list of next states`, or `Done(result)`.

    Args:
        step_fn: Advances every state by one step; blocking. An exception in a state's place fails only that record.
        start: `(record) -> first state`; without it, the record is the first state.
        cost: `(record) -> cost`, constant while the record runs.
        max_steps: A record that has not finished after this many steps fails.

    Raises:
        ConfigError: a parameter is out of range.
    """

    def __init__(
        self,
        step_fn: Callable[[list[StateT]], Sequence[StateT | Done[ResultT] | Exception]],
        *,
        start: Callable[[RecordT], StateT] | None = None,
        cost: Callable[[RecordT], float] | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._step_fn = function("step_fn", step_fn, needed=True, plain=True)
        self._start = function("start", start, needed=False, plain=True)
        self._cost = function("cost", cost, needed=False, plain=True)
        self._max_steps = None if max_steps is None else whole("max_steps", max_steps, 1)
        self._states: dict[int, StateT] = {}
        self._steps: dict[int, int] = {}
        self._costs: dict[int, float] = {}

    def span(self, record: RecordT) -> tuple[float, float]:
        cost = 1.0 if self._cost is None else self._cost(record)
        return cost, cost

    def add(self, key: int, record: RecordT) -> None:
        self._states[key] = cast("StateT", record) if self._start is None else self._start(record)
        self._steps[key] = 0
        self._costs[key] = self.span(record)[0]

    def step(self) -> list[tuple[int, ResultT | Exception]]:
        keys = list(self._states)
        states = checked_results(self._step_fn(list(self._states.values())), len(keys))
        finished: list[tuple[int, ResultT | Exception]] = []
        for key, state in zip(keys, states, strict=True):
            self._steps[key] += 1
            if isinstance(state, Done):
                finished.append((key, state.result))
            elif isinstance(state, Exception):
                finished.append((key, state))
            elif self._steps[key] == self._max_steps:
                finished.append((key, RecordError(f"the record has not finished after max_steps={self._max_steps}")))
            else:
                self._states[key] = cast("StateT", state)
                continue
            self.remove(key)
        return finished

    def needs(self, key: int) -> float:
        return self._costs[key]

    def remove(self, key: int) -> RecordT | None:
        self._states.pop(key, None)
        self._steps.pop(key, None)
        self._costs.pop(key, None)
        return None


@dataclass(slots=True)
class StepCall:
    """One call on the engine's thread: its input, and its output as far as it got."""

    leaving: Sequence[int]
    joining: Sequence[tuple[int, object]]
    staying: set[int]
    refused: list[tuple[int, BaseException]] = field(default_factory=list)
    """Records that the model refused."""
    resumes: dict[int, object] = field(default_factory=dict)
    """What removed records resume from, by key."""
    finished: Sequence[tuple[int, object]] = ()
    needs: dict[int, float] = field(default_factory=dict)
    shared: dict[int, float] = field(default_factory=dict)
    """What of `needs` is counted for other records; empty for a model without shared costs."""

    def run(self, model: AnyStepModel) -> None:
        """Remove and add records, then take one step."""
        keys = self.staying
        for key in self.leaving:
            self.resumes[key] = model.remove(key)
        for key, record in self.joining:
            added = attempt(model.add, key, record)
            if not isinstance(added, Raised):
                keys.add(key)
            elif isinstance(added.cause, EngineDeadError):
                raise added.cause
            else:  # it fails only this record
                self.refused.append((key, added.cause))
        if keys:
            self.finished = _checked(model.step(), keys)
            keys.difference_update(key for key, _ in self.finished)
            self.needs = {key: model.needs(key) for key in keys}
            if isinstance(model, SharingStepModel):
                self.shared = {key: model.shared(key) for key in keys}


def _checked(finished: object, keys: set[int]) -> Sequence[tuple[int, object]]:
    """The finished records and their results, which nobody else can change."""
    if not isinstance(finished, (list, tuple)):
        raise BadResultError(f"step() returned {type(finished).__name__}: it must be a list of (key, result)")
    seen: set[int] = set()
    for pair in finished:
        if not (isinstance(pair, tuple) and len(pair) == 2) or pair[0] not in keys or pair[0] in seen:
            raise BadResultError(f"step() returned {shown(pair)}: it must be (key, result), once for each running key")
        seen.add(pair[0])
    return [(key, own_result(result, "step()")) for key, result in finished]
