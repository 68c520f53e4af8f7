"""The records that travel between a job or server and an engine, and the three kinds of engines.

A `BatchEngine` runs the batches it is given, a `StepEngine` lets requests join and leave between steps, and a
`StreamEngine` takes single requests and batches them itself. `engines.profile` says how each is fed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from headrace.batching.step_model import StepModel
from headrace.records import Json, JsonObject

ModelInput: TypeAlias = Any
"""What `prepare` of an engine makes of an input, for that engine alone."""
PayloadT_co = TypeVar("PayloadT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[PayloadT_co]):
    """One record, converted to model input."""

    payload: PayloadT_co
    cost: int
    """In the engine's cost unit: the exact number of tokens for text."""
    truncated: bool = False
    greedy: bool = False
    """Whether it is a request to a language model that is answered without sampling: equal ones have one answer."""

    @property
    def parts(self) -> int:
        """In how many parts the engine takes it; 0 if it is not split."""
        return len(self.payload.parts) + (self.payload.later or 0) if isinstance(self.payload, Chunks) else 0


@dataclass(frozen=True, slots=True)
class Chunks(Generic[PayloadT_co]):
    """The payload of a record that is too long for the model: its parts, each a payload of its own."""

    parts: Sequence[PayloadT_co]
    costs: Sequence[int]
    """The cost of each part."""
    weights: Sequence[int]
    """Tokens of the text in each part."""
    join: Callable[[Sequence[Any], Sequence[int]], object]
    """Makes the record's output from the outputs of all its parts and their weights. Unless `later` is None, it may
    return more `Chunks` instead, which are computed first. A batch engine's `join` can be pickled.
    """
    later: int | None = None
    """How many parts `join` may ask for, as far as they are known; None if it never asks."""


@dataclass(frozen=True, slots=True)
class Part(Generic[PayloadT_co]):
    """A part that the engine must not finish like a record: its output is what `Chunks.join` takes."""

    payload: PayloadT_co


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text as ids of the model's own tokenizer, with all special tokens. Only for a `TokenizingEngine`."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A request and its place among others: without a seed of its own, it draws other random numbers than an equal one
    elsewhere. Only for an engine whose profile says `draws`."""

    request: object
    place: int | str


@dataclass(frozen=True, slots=True)
class PromptedText:
    """A text with another prompt than the engine's default. Only one of the profile's `prompt_names`."""

    text: str
    prompt_name: str


PreparedRecords: TypeAlias = list[Prepared[ModelInput] | Exception]
"""For each input of an engine, what its model takes for it, or its error."""


class Engine(Protocol):
    """The methods that all engines have.

    CPU workers call `prepare` on several chunks at once while the model runs on another thread. The two must not share
    mutable state.
    """

    def describe(self) -> Mapping[str, object]:
        """JSON-serializable facts that determine the output (model digest, parameters): part of a job's fingerprint."""
        ...

    def prepare(self, inputs: Sequence[Any]) -> PreparedRecords:
        """One entry per input: the model input, or that record's error. Never raises for a bad input."""
        ...

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
        ...


class BatchEngine(Engine, Protocol):
    """A model that takes a batch and returns one output per record. `forward` runs on a dedicated thread."""

    def forward(self, batch: list[ModelInput]) -> Sequence[object]:
        """Run the model once. Blocks. Returns `len(batch)` outputs in order.

        Raises:
            EngineOutOfMemoryError: the batch does not fit on the device; a smaller one may.
            EngineDeadError: no later call can succeed.
        """
        ...


class StreamEngine(Engine, Protocol):
    """An in-process model server that does its own batching: requests join and leave at any time."""

    async def infer(self, payload: ModelInput) -> object:
        """The output of one request. Many calls run concurrently, all on the same event loop.

        Cancelling the call removes the request from the engine and frees what it held.

        Raises:
            RecordError: the engine refuses this request; others are not affected.
            EngineDeadError: no later call can succeed.
        """
        ...


class StepEngine(Engine, StepModel[ModelInput, object], Protocol):
    """A model that takes many steps per request: requests join and leave between steps.

    `headrace.batching.step_model.StepModel` has its methods and their contract.
    """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it; incomplete while it writes."""

    @classmethod
    def of(cls, call: Mapping[str, Json]) -> ToolCall:
        return cls(call["id"], call["function"]["name"], call["function"]["arguments"])

    @classmethod
    def all_of(cls, answer: Mapping[str, Json]) -> list[ToolCall]:
        return [cls.of(call) for call in answer.get("tool_calls", ())]

    @property
    def as_openai(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @property
    def value(self) -> JsonObject:
        """The arguments, for protocols that have them as an object; broken ones as the text `INVALID_JSON` in one."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {"INVALID_JSON": self.arguments}


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """An answer, or as much of it as later tokens cannot change."""

    text: str
    reasoning: str | None = None
    """None if the model is not known to reason apart."""
    calls: tuple[ToolCall, ...] | None = None
    """None if the request has no tools."""
    problems: tuple[str, ...] = ()
    """What is wrong with the calls."""
    whole_calls: int = 0
    """How many calls are complete."""


PartialAnswer: TypeAlias = str | AnswerParts
"""An answer as it grows: a text, or its parts."""
