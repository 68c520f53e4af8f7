"""What only some engines can do, and how it is looked up: `TOKENIZING.of(engine)` is the engine that can, or None."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

from headrace.columns import Column, PreparedColumn
from headrace.device.forward import ForwardMeter
from headrace.device.memory import AvailableMemory, PeakMeter, memory_limit
from headrace.device.step_sizes import StepTuner
from headrace.engines.base import BatchEngine, ModelInput, PartialAnswer
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import ConfigError
from headrace.events import EndpointUsed

AbleT = TypeVar("AbleT")
PayloadT = TypeVar("PayloadT")


@dataclass(frozen=True, slots=True)
class Capability(Generic[AbleT]):
    """Something that an engine may be able to do."""

    flag: str | None
    """The field of the profile that says whether it can; None if `attribute` says so."""
    methods: tuple[str, ...] = ()
    """The methods that it then has."""
    attribute: str | None = None
    """The attribute with the object that does it; None if the engine does it itself."""

    def of(self, engine: object) -> AbleT | None:
        """The object that does it, or None if the engine cannot."""
        if self.flag is not None and not getattr(profile_of(engine), self.flag):
            return None
        return cast("AbleT | None", engine if self.attribute is None else getattr(engine, self.attribute, None))


class TunableEngine(BatchEngine, Protocol):
    """An engine that can be loaded in another dtype (its option `dtype`) with nearly the same outputs.

    Its `describe` says under `dtype` which it runs in.
    """

    def hardware(self) -> Mapping[str, object]:
        """JSON-able facts that decide how fast it is, beside the CPU: device, threads, versions of libraries."""
        ...

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device computes a product in other types, measured; empty for none."""
        ...

    def forward_meter(self) -> ForwardMeter | None:
        """What its forward passes did so far; None if that is not measured."""
        ...


class ColumnPreparer(Protocol):
    """Prepares the inputs of a block at once."""

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Each input's model input or error, as `prepare` makes them. May be called on several threads at once."""
        ...


class ColumnEngine(ColumnPreparer, BatchEngine, Protocol):
    """An engine that prepares the inputs of a block at once.

    Its `forward` takes what `joined` of its `Payloads` gives, or a list of what `prepare` gives.
    """


class SteppingEngine(Protocol):
    """An engine that works in steps whose size a job may find."""

    steps: StepTuner

    def describe(self) -> Mapping[str, object]:
        """What an engine describes, with its `model_digest` and `dtype`."""
        ...

    def hardware(self) -> Mapping[str, object]:
        """As `TunableEngine`."""
        ...

    def forget(self) -> None:
        """Forget the prompts in the prefix cache. No request is in the engine."""
        ...


class RequestingEngine(Protocol):
    """An engine that sends requests to servers."""

    def use(self) -> EndpointUsed:
        """What became of the requests so far."""
        ...


class FollowableEngine(Protocol[PayloadT]):
    """An engine that can stream its answers."""

    def follow(self, payload: PayloadT, listener: Callable[[PartialAnswer], None]) -> PayloadT:
        """The same request with a listener for the partial answer.

        The engine's thread calls `listener` with the whole text so far whenever it grows, or with its parts. Each text
        starts with the previous one, and the answer starts with the last.
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

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens included unless they are to be skipped.

        Raises:
            RecordError: an id is not in the vocabulary.
        """
        ...

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry for each id. Raises as `detokenize`."""
        ...


TokenSpans: TypeAlias = Callable[[str, bool], list[tuple[int, int] | None]]
"""Where each token of a text is in it, with or without special tokens, as `tokenize` gives them; None for a token that
is not in the text."""


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


class PrefixCachingEngine(Protocol):
    """A language model that computes what prompts have in common at their beginning once."""

    def count_cached(self, payload: ModelInput) -> ModelInput:
        """The same request; its answer has `cached_tokens`."""
        ...

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of prompt tokens. May be called on any thread."""
        ...


class BesideLane(Protocol):
    """Lets a second call of `forward`, on another thread, compute a short batch beside a large one."""

    beside_cost: float
    """The most that such a batch costs."""

    def leave_room(self, leave: bool) -> None:
        """Whether large batches leave a part of the device to short ones from now on."""
        ...


class Sleeper(Protocol):
    """A model that can wait in host memory while others use its device. Neither method is called while it computes."""

    def sleep(self) -> None:
        """Move the weights to host memory, and free the device."""
        ...

    def wake(self) -> None:
        """Undo `sleep`. Raises Exception: it cannot; close the engine."""
        ...


BATCHES: Capability[BatchEngine] = Capability("runs_batches", ("forward",))
COLUMNS: Capability[ColumnEngine] = Capability("prepares_columns", ("prepare_column",))
PREPARING: Capability[ColumnPreparer] = Capability(None, ("prepare_column",), attribute="preparer")
"""An engine's `preparer` can be pickled, and prepares columns as the engine does, in processes of their own. None if
that is not possible."""
TUNING: Capability[TunableEngine] = Capability("tunable")
STEPPING: Capability[SteppingEngine] = Capability("sizes_steps", ("hardware", "forget"))
REQUESTING: Capability[RequestingEngine] = Capability("remote", ("use",))
FOLLOWING: Capability[FollowableEngine[ModelInput]] = Capability("followable", ("follow",))
TOKENIZING: Capability[TokenizingEngine] = Capability("tokenizes", ("tokenize", "detokenize", "token_strings"))
TOKEN_SPANS: Capability[TokenSpans] = Capability(None, attribute="token_spans")
PREFIX_CACHING: Capability[PrefixCachingEngine] = Capability("caches_prefixes", ("prefix_cache_stats", "count_cached"))
BESIDE: Capability[BesideLane] = Capability(None, ("leave_room",), attribute="beside")
SLEEPING: Capability[Sleeper] = Capability(None, ("sleep", "wake"), attribute="sleeper")
"""An engine's `sleeper` is None if nothing is gained, as on a CPU."""


def check_methods(engine: object, profile: EngineProfile) -> None:
    """Check that an engine has the methods that its profile requires. Raises ConfigError: a method is missing."""
    optional = (COLUMNS, STEPPING, FOLLOWING, TOKENIZING, PREFIX_CACHING, REQUESTING)
    able = [name for one in optional if getattr(profile, str(one.flag)) for name in one.methods]
    for name in ("describe", "prepare", *profile.kind.methods, *able, "close"):
        if not callable(getattr(engine, name, None)):
            raise ConfigError(
                f"engine {type(engine).__name__} has no method {name}, which an engine with "
                f"batching={profile.batching!r} needs; see docs/engines.md"
            )


def memory_of(engine: object) -> tuple[AvailableMemory, PeakMeter | None]:
    """The memory that its batches run in, its device's or that of this process, and a meter if it can be measured."""
    tunable = TUNING.of(engine)
    if tunable is None:
        return memory_limit(), None
    meter = tunable.forward_meter()
    if meter is not None and meter.memory is not None:
        return meter.memory()
    return memory_limit(), PeakMeter() if tunable.hardware().get("device", "cpu") == "cpu" else None
