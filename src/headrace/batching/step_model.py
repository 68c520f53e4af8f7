"""Engines that work in steps: what they offer, how a step function becomes one, and one turn of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from headrace.batching.options import function, whole
from headrace.batching.pending import checked_results
from headrace.errors import BadResultError, EngineDeadError, RecordError

RecordT = TypeVar("RecordT")
StateT = TypeVar("StateT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class StepModel(Protocol[RecordT, ResultT_co]):
    """A model that takes many steps for one record, and many records in one step.

    Every method but `span` is called on one thread of its own, never two at once.
    """

    def span(self, record: RecordT) -> tuple[float, float]:
        """What the record costs at first, and the most it may grow to. Called on the event loop: cheap."""
        ...

    def add(self, key: int, record: RecordT) -> None:
        """Let a record join the next step, under a key that was never used before.

        Raises:
            RecordError: this record cannot be taken; others are not touched.
        """
        ...

    def step(self) -> Sequence[tuple[int, ResultT_co | Exception]]:
        """Take one step with every record that has joined; returns the keys and results of those that have finished.

        These leave by it. An exception in a result's place fails that record alone; one that is raised fails all.
        """
        ...

    def needs(self, key: int) -> float:
        """What the record must hold to take its next step, in the unit of `span`."""
        ...

    def remove(self, key: int) -> RecordT | None:
        """Take a record out, in whatever state; an unknown key is none.

        Returns what `add` takes to go on later from where it was, or None if it must begin anew.
        """
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """What a step function returns in the place of a state that has arrived."""

    result: ResultT


class StepFunction(Generic[RecordT, StateT, ResultT]):
    """A plain step function as a `StepModel`: `(list of states) -> list of next states`, `Done(result)` for the last.

    Args:
        step_fn: One step of every state; blocking. An exception object in a state's place fails that record alone.
        start: `(record) -> first state`; without it, the record is the first state.
        cost: `(record) -> cost`, what a record holds as long as it runs.
        max_steps: A record that has not arrived after so many steps fails.

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
        self._states: dict[int, Any] = {}
        self._steps: dict[int, int] = {}
        self._costs: dict[int, float] = {}

    def span(self, record: RecordT) -> tuple[float, float]:
        """The record's cost, which does not grow."""
        cost = 1.0 if self._cost is None else self._cost(record)
        return cost, cost

    def add(self, key: int, record: RecordT) -> None:
        """The record's first state joins."""
        self._states[key] = record if self._start is None else self._start(record)
        self._steps[key] = 0
        self._costs[key] = self.span(record)[0]

    def step(self) -> list[tuple[int, ResultT | Exception]]:
        """Call the step function once."""
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
                finished.append((key, RecordError(f"the record has not arrived after max_steps={self._max_steps}")))
            else:
                self._states[key] = state
                continue
            self.remove(key)
        return finished

    def needs(self, key: int) -> float:
        """Its cost."""
        return self._costs[key]

    def remove(self, key: int) -> RecordT | None:
        """Forget a state."""
        self._states.pop(key, None)
        self._steps.pop(key, None)
        self._costs.pop(key, None)
        return None


@dataclass(slots=True)
class StepCall:
    """One turn in the engine's thread: what is asked, and what came of it as far as it went."""

    leaving: Sequence[int]
    joining: Sequence[tuple[int, Any]]
    staying: set[int]
    refused: list[tuple[int, BaseException]] = field(default_factory=list)
    """Records that could not join."""
    resumes: dict[int, Any] = field(default_factory=dict)
    """What those taken out go on with."""
    finished: Sequence[tuple[int, Any]] = ()
    needs: dict[int, float] = field(default_factory=dict)

    def take(self, model: StepModel[Any, Any]) -> None:
        """Let records out, let others in, take one step with these and those that stay."""
        keys = self.staying
        for key in self.leaving:
            self.resumes[key] = model.remove(key)
        for key, record in self.joining:
            try:
                model.add(key, record)
            except EngineDeadError:
                raise
            except BaseException as exc:  # noqa: BLE001  # whatever it is, it is this record's: it came from adding it
                self.refused.append((key, exc))
            else:
                keys.add(key)
        if keys:
            self.finished = _checked(model.step(), keys)
            keys.difference_update(key for key, _ in self.finished)
            self.needs = {key: model.needs(key) for key in keys}


def _checked(finished: Any, keys: set[int]) -> Sequence[tuple[int, Any]]:
    if not isinstance(finished, (list, tuple)):
        raise BadResultError(f"step() returned {type(finished).__name__}: it must be a list of (key, result)")
    seen: set[int] = set()
    for pair in finished:
        if not (isinstance(pair, tuple) and len(pair) == 2) or pair[0] not in keys or pair[0] in seen:
            raise BadResultError(f"step() returned {pair!r:.80}: it must be (key, result), once, of a key that runs")
        seen.add(pair[0])
    return finished
