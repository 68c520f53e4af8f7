"""Engine interfaces between a batcher and a model.

The engine's profile selects one: a `BatchEngine` runs the batches it is given, a `StepEngine` lets requests join and
leave between steps, and a `StreamEngine` takes single requests and batches them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

from headrace.device.forward import ForwardMeter
from headrace.device.memory import MemoryLimit, PeakMeter, memory_limit
from headrace.engines.profile import EngineProfile, Sleeper, profile_of
from headrace.events import EndpointUsed

InputT_contra = TypeVar("InputT_contra", contravariant=True)
PayloadT = TypeVar("PayloadT")
OutputT_co = TypeVar("OutputT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[PayloadT]):
    """One record, converted to model input."""

    payload: PayloadT
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
class Chunks(Generic[PayloadT]):
    """The payload of a record that is too long for the model: its parts, each a payload of its own."""

    parts: Sequence[PayloadT]
    costs: Sequence[int]
    """Of each part."""
    weights: Sequence[int]
    """Tokens of the text in each part."""
    join: Callable[[Sequence[Any], Sequence[int]], object]
    """Makes the record's output of the outputs of all its parts, and their weights. Unless `later` is None, it may make
    `Chunks` instead, to compute before that. That of a batch engine can be pickled.
    """
    later: int | None = None
    """How many parts `join` may ask for, as far as they are known; None if it never asks."""


@dataclass(frozen=True, slots=True)
class Part(Generic[PayloadT]):
    """A part that the engine must not finish like a record: its output is what `Chunks.join` takes."""

    payload: PayloadT


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
class PrefixCacheStats:
    """Prompt tokens since the engine was loaded. A request that starts again counts again."""

    queries: int
    """Tokens of prompts: those that were looked up in the prefix cache."""
    hits: int
    """Tokens that were found there."""
    computed: int
    """Tokens that the model computed."""
    generated: int = 0
    """Tokens of answers."""
    computed_s: float | None = None
    """What computing the prompts' tokens took; None if the engine cannot tell."""

    def since(self, earlier: PrefixCacheStats) -> PrefixCacheStats:
        """The tokens that were added after `earlier`."""
        return PrefixCacheStats(
            self.queries - earlier.queries,
            self.hits - earlier.hits,
            self.computed - earlier.computed,
            self.generated - earlier.generated,
            None if self.computed_s is None else self.computed_s - (earlier.computed_s or 0.0),
        )


class RemoteEngine(Protocol):
    """An engine that sends requests to servers."""

    def use(self) -> EndpointUsed:
        """What became of the requests so far."""
        ...


@dataclass(frozen=True, slots=True)
class PromptedText:
    """A text with another prompt than the engine's default. Only one of the profile's `prompt_names`."""

    text: str
    prompt_name: str


class Engine(Protocol[InputT_contra, PayloadT]):
    """The methods that all engines have.

    CPU workers call `prepare` on several chunks at once while the model runs on another thread. The two must not share
    mutable state.
    """

    @property
    def profile(self) -> EngineProfile:
        """How to feed the engine. Read it with `profile_of`, which also supports engines without a profile."""
        ...

    def describe(self) -> Mapping[str, object]:
        """JSON-serializable facts that determine the output (model digest, parameters): part of a job's fingerprint."""
        ...

    def prepare(self, inputs: Sequence[InputT_contra]) -> list[Prepared[PayloadT] | Exception]:
        """One entry per input: the model input, or that record's error. Never raises for a bad input."""
        ...

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
        ...


class BatchEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes a batch and returns one output per record. `forward` runs on a dedicated thread."""

    def forward(self, batch: list[PayloadT]) -> Sequence[OutputT_co]:
        """Run the model once. Blocks. Returns `len(batch)` outputs in order.

        Raises:
            EngineOutOfMemoryError: the batch does not fit on the device; a smaller one may.
            EngineDeadError: no later call can succeed.
        """
        ...


class TunableEngine(BatchEngine[Any, Any, Any], Protocol):
    """An engine that can be loaded in another dtype (its option `dtype`) with nearly the same outputs.

    Its `describe` says under `dtype` which it runs in.
    """

    def hardware(self) -> Mapping[str, Any]:
        """JSON-able facts that decide how fast it is, beside the CPU: device, threads, versions of libraries."""
        ...

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device computes a product in other types, measured; empty for none."""
        ...

    def forward_meter(self) -> ForwardMeter | None:
        """What its forward passes did so far; None if that is not measured."""
        ...


class StreamEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """An in-process model server that does its own batching: requests join and leave at any time."""

    async def infer(self, payload: PayloadT) -> OutputT_co:
        """The output of one request. Many calls run concurrently, all on the same event loop.

        Cancelling the call removes the request from the engine and frees what it held.

        Raises:
            RecordError: the engine refuses this request; others are not affected.
            EngineDeadError: no later call can succeed.
        """
        ...


class StepEngine(Engine[InputT_contra, PayloadT], Protocol[InputT_contra, PayloadT, OutputT_co]):
    """A model that takes many steps per request: requests join and leave between steps.

    It satisfies `StepModel`; `headrace.batching.step_model` has the contract of each method. All methods except `span`
    are called on one thread.
    """

    def span(self, record: PayloadT) -> tuple[float, float]:
        """The request's initial and maximum cost."""
        ...

    def add(self, key: int, record: PayloadT) -> None:
        """Add a request to the next step.

        Raises:
            RecordError: the request is refused; others are not affected.
        """
        ...

    def step(self) -> Sequence[tuple[int, OutputT_co | Exception]]:
        """Run one step of all active requests; returns keys and outputs of the finished ones.

        Raises:
            EngineOutOfMemoryError: too many requests for the device; fewer may fit.
            EngineDeadError: no later call can succeed.
        """
        ...

    def needs(self, key: int) -> float:
        """The cost of the request in its next step."""
        ...

    def remove(self, key: int) -> PayloadT | None:
        """Remove a request; returns a record to resume it with, or None if it must start again."""
        ...


class FollowableEngine(Protocol[PayloadT]):
    """An engine that can stream its answers."""

    def follow(self, payload: PayloadT, listener: Callable[[str], None]) -> PayloadT:
        """The same request with a listener for the partial text.

        The engine's thread calls `listener` with the whole text so far whenever it grows. Each text starts with the
        previous one, and the answer starts with the last.
        """
        ...


class TokenizingEngine(Protocol):
    """An engine that takes `TokenIds` for a text, and makes them."""

    def tokenize(self, value: object, add_special_tokens: bool) -> list[int]:
        """The ids that the model gets for a text, or for the messages of a chat, before they are cut.

        Raises:
            RecordError: the value is no text and no chat.
        """
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included.

        Raises:
            RecordError: an id is not in the vocabulary.
        """
        ...

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry for each id. Raises as `detokenize`."""
        ...


class PrefixCachingEngine(Protocol):
    """A language model that computes what prompts have in common at their beginning once."""

    def count_cached(self, payload: Any) -> Any:
        """The same request; its answer has `cached_tokens`."""
        ...

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of prompt tokens. May be called on any thread."""
        ...


class SleepingEngine(Protocol):
    """An engine that may be able to leave its device for a while."""

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves it to host memory; None if it cannot, or if nothing is gained, as on a CPU."""
        ...


def runs_batches(engine: AnyEngine) -> TypeGuard[AnyBatchEngine]:
    """Whether the engine's profile says that it is a `BatchEngine`."""
    return profile_of(engine).batching == "batches"


def works_in_steps(engine: AnyEngine) -> TypeGuard[AnyStepEngine]:
    """Whether the engine's profile says that it is a `StepEngine`."""
    return profile_of(engine).batching == "steps"


def batches_itself(engine: AnyEngine) -> TypeGuard[AnyStreamEngine]:
    """Whether the engine's profile says that it is a `StreamEngine`."""
    return profile_of(engine).batching == "own"


def can_be_followed(engine: AnyEngine) -> TypeGuard[FollowableEngine[Any]]:
    """Whether the engine's profile says that it is a `FollowableEngine`."""
    return profile_of(engine).followable


def can_tokenize(engine: AnyEngine) -> TypeGuard[TokenizingEngine]:
    """Whether the engine's profile says that it is a `TokenizingEngine`."""
    return profile_of(engine).tokenizes


def sends_requests(engine: AnyEngine) -> TypeGuard[RemoteEngine]:
    """Whether the engine's profile says that it is a `RemoteEngine`."""
    return profile_of(engine).remote


def caches_prefixes(engine: AnyEngine) -> TypeGuard[PrefixCachingEngine]:
    """Whether the engine's profile says that it is a `PrefixCachingEngine`."""
    return profile_of(engine).caches_prefixes


def can_be_tuned(engine: AnyEngine) -> TypeGuard[TunableEngine]:
    """Whether its profile says that it is a `TunableEngine`."""
    return profile_of(engine).tunable


def memory_of(engine: AnyEngine) -> tuple[MemoryLimit, PeakMeter | None]:
    """The memory that its batches run in, its device's or that of this process, and a meter if it can be measured."""
    if not can_be_tuned(engine):
        return memory_limit(), None
    meter = engine.forward_meter()
    if meter is not None and meter.memory is not None:
        return meter.memory()
    return memory_limit(), PeakMeter() if engine.hardware().get("device", "cpu") == "cpu" else None


# Engines with any input, payload and output types, for code that passes records on without inspecting them.
AnyEngine: TypeAlias = Engine[Any, Any]
AnyBatchEngine: TypeAlias = BatchEngine[Any, Any, Any]
AnyStepEngine: TypeAlias = StepEngine[Any, Any, Any]
AnyStreamEngine: TypeAlias = StreamEngine[Any, Any, Any]
