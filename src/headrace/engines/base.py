"""The seams between a batcher and a model: a batch in and out, or one request in and out.

An engine's profile says how it batches: a `BatchEngine` runs the batch it is given, a `StepEngine` lets requests join
and leave between its steps, a `StreamEngine` takes single requests and batches them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

from headrace.engines.profile import EngineProfile, profile_of

InputT_contra = TypeVar("InputT_contra", contravariant=True)
PayloadT = TypeVar("PayloadT")
OutputT_co = TypeVar("OutputT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[PayloadT]):
    """One record as the model takes it."""

    payload: PayloadT
    cost: int
    """In the engine's own unit: exact tokens for text."""
    truncated: bool = False


class Engine(Protocol[InputT_contra, PayloadT]):
    """What every model offers, however it is run.

    `prepare` runs on CPU workers, several chunks at a time, while the model runs elsewhere: an engine shares no mutable
    state between the two.
    """

    @property
    def profile(self) -> EngineProfile:
        """How it is to be fed. Read it with `profile_of`, which knows engines without one too."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """JSON-able facts that decide the output (model digest, parameters): part of a job's fingerprint."""
        ...

    def prepare(self, inputs: Sequence[InputT_contra]) -> list[Prepared[PayloadT] | Exception]:
        """One entry per input: what the model takes or the error of that record alone. Never raises for a bad input."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
        ...


class BatchEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes a batch and returns one output per record. `forward` runs on one thread of its own."""

    def forward(self, batch: list[PayloadT]) -> Sequence[OutputT_co]:
        """Run the model once. Blocking. Returns `len(batch)` outputs in order.

        Raises:
            EngineOutOfMemoryError: the batch is too large for the device; a smaller one may fit.
            EngineDeadError: no later call can succeed.
        """
        ...


class TunableEngine(BatchEngine[Any, Any, Any], Protocol):
    """An engine that can be loaded in other numbers (its option `dtype`), and then gives nearly the same outputs.

    Its `describe` says under `dtype` which it runs in.
    """

    def hardware(self) -> Mapping[str, Any]:
        """JSON-able facts that decide how fast it is, beside the CPU: device, threads, versions of libraries."""
        ...

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device computes a product in other types, measured; empty for none."""
        ...


class StreamEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model server within the process, which batches by itself: requests join and leave while it works."""

    async def infer(self, payload: PayloadT) -> OutputT_co:
        """One request's output. Many calls run at once, on one event loop at a time.

        Cancelling the call takes the request out of the engine, and what it held is free for others.

        Raises:
            RecordError: the engine refuses this request; others are not touched.
            EngineDeadError: no later call can succeed.
        """
        ...


class StepEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes many steps for one request: requests join and leave between steps.

    It is a `StepModel` (see `headrace.batching.step_model` for what each method promises). All but `span` are called on
    one thread.
    """

    def span(self, record: PayloadT) -> tuple[float, float]:
        """What the request holds at first, and the most it may grow to."""
        ...

    def add(self, key: int, record: PayloadT) -> None:
        """Let a request join the next step.

        Raises:
            RecordError: this request cannot be taken; others are not touched.
        """
        ...

    def step(self) -> Sequence[tuple[int, OutputT_co | Exception]]:
        """One step with every request that has joined; keys and outputs of those that have finished.

        Raises:
            EngineOutOfMemoryError: fewer requests at a time may fit.
            EngineDeadError: no later call can succeed.
        """
        ...

    def needs(self, key: int) -> float:
        """What the request must hold to take its next step."""
        ...

    def remove(self, key: int) -> PayloadT | None:
        """Take a request out; returns what it can go on with later, or None if it must begin anew."""
        ...


class FollowableEngine(Protocol[PayloadT]):
    """An engine whose answers can be read while they grow."""

    def follow(self, payload: PayloadT, listener: Callable[[str], None]) -> PayloadT:
        """The same request, whose text so far is told to `listener` on the engine's thread, whenever it has grown.

        What was told once stays: each text begins with the one before, and the answer with all of them.
        """
        ...


def runs_batches(engine: Engine[Any, Any]) -> TypeGuard[BatchEngine[Any, Any, Any]]:
    """Whether its profile says that it is a `BatchEngine`."""
    return profile_of(engine).batching == "batches"


def works_in_steps(engine: Engine[Any, Any]) -> TypeGuard[StepEngine[Any, Any, Any]]:
    """Whether its profile says that it is a `StepEngine`."""
    return profile_of(engine).batching == "steps"


def batches_itself(engine: Engine[Any, Any]) -> TypeGuard[StreamEngine[Any, Any, Any]]:
    """Whether its profile says that it is a `StreamEngine`."""
    return profile_of(engine).batching == "own"


def can_be_followed(engine: Engine[Any, Any]) -> TypeGuard[FollowableEngine[Any]]:
    """Whether its profile says that it is a `FollowableEngine`."""
    return profile_of(engine).followable


def can_be_tuned(engine: Engine[Any, Any]) -> TypeGuard[TunableEngine]:
    """Whether its profile says that it is a `TunableEngine`."""
    return profile_of(engine).tunable


# Engines of any input, payload and output: the parts of a job and a server hand records on without looking at them.
AnyEngine: TypeAlias = Engine[Any, Any]
AnyBatchEngine: TypeAlias = BatchEngine[Any, Any, Any]
AnyStepEngine: TypeAlias = StepEngine[Any, Any, Any]
AnyStreamEngine: TypeAlias = StreamEngine[Any, Any, Any]
