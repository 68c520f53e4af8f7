"""The seam between a batcher and a model: a batch in, a batch out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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


class BatchEngine(Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes a batch and returns one output per record.

    `prepare` runs on CPU workers, several chunks at a time, while `forward` runs on one thread of its own: an engine
    shares no mutable state between the two.
    """

    pads: bool
    """Whether a batch costs records × its longest record rather than the sum."""
    default_batch_cost: int
    """A target_batch_cost that suits the engine, in its own unit."""
    default_batch_size: int

    def describe(self) -> Mapping[str, Any]:
        """JSON-able facts that decide the output (model digest, parameters): part of a job's fingerprint."""
        ...

    def prepare(self, inputs: Sequence[InputT_contra]) -> list[Prepared[PayloadT] | Exception]:
        """One entry per input: what `forward` takes or the error of that record alone. Never raises for a bad input."""
        ...

    def forward(self, batch: list[PayloadT]) -> Sequence[OutputT_co]:
        """Run the model once. Blocking. Returns `len(batch)` outputs in order.

        Raises:
            EngineOutOfMemoryError: the batch is too large for the device; a smaller one may fit.
            EngineDeadError: no later call can succeed.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds. Safe to call twice."""
        ...
