"""The seams between a batcher and a model: a batch in and out, or one request in and out.

What an engine does with company is a matter of its type: a `BatchEngine` runs the batch it is given, a `StepEngine`
lets requests join and leave between its steps, a `StreamEngine` takes single requests and batches them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

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

    It may also say: `prepare_rows`, how many records to prepare at a time, where one is much work or memory;
    `counts_tokens = False`, where its unit of cost is not the token; and as a `BatchEngine` `default_batch_delay_s`,
    how long a record waits for company while the model is free.
    """

    def describe(self) -> Mapping[str, Any]:
        """JSON-able facts that decide the output (model digest, parameters): part of a job's fingerprint."""
        ...

    def prepare(self, inputs: Sequence[InputT_contra]) -> list[Prepared[PayloadT] | Exception]:
        """One entry per input: what the model takes or the error of that record alone. Never raises for a bad input."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
        ...


@runtime_checkable
class BatchEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes a batch and returns one output per record. `forward` runs on one thread of its own."""

    pads: bool
    """Whether a batch costs records × its longest record rather than the sum."""
    default_batch_cost: int
    """A target_batch_cost that suits the engine, in its own unit."""
    default_batch_size: int

    def forward(self, batch: list[PayloadT]) -> Sequence[OutputT_co]:
        """Run the model once. Blocking. Returns `len(batch)` outputs in order.

        Raises:
            EngineOutOfMemoryError: the batch is too large for the device; a smaller one may fit.
            EngineDeadError: no later call can succeed.
        """
        ...


@runtime_checkable
class StreamEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model server within the process, which batches by itself: requests join and leave while it works."""

    max_in_flight: int
    """Requests that keep it busy: with so many under way, another would only wait inside it."""

    async def infer(self, payload: PayloadT) -> OutputT_co:
        """One request's output. Many calls run at once, on one event loop at a time.

        Cancelling the call takes the request out of the engine, and what it held is free for others.

        Raises:
            RecordError: the engine refuses this request; others are not touched.
            EngineDeadError: no later call can succeed.
        """
        ...


@runtime_checkable
class StepEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes many steps for one request: requests join and leave between steps.

    It is a `StepModel` of `headrace.batching.step_model`, which says what each method promises; all but `span` are called
    on one thread.
    """

    max_slots: int
    """Requests it can hold at a time."""
    max_cost: int
    """What they may hold together, in the unit of `span`."""

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


@runtime_checkable
class FollowableEngine(Protocol[PayloadT]):
    """An engine whose answers can be read while they grow."""

    def follow(self, payload: PayloadT, listener: Callable[[str], None]) -> PayloadT:
        """The same request, whose text so far is told to `listener` on the engine's thread, whenever it has grown.

        What was told once stays: each text begins with the one before, and the answer with all of them.
        """
        ...
