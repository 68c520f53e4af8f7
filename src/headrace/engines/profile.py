"""How an engine is fed: the profile that it states, and its kind, which makes its batcher."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

from headrace.batching.batcher import Batcher
from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.foreign_calls import called
from headrace.batching.options import number, one_of, whole
from headrace.batching.passthrough import PassthroughBatcher
from headrace.batching.policy.cost import CostEstimatorFn
from headrace.batching.step_model import StepModel
from headrace.engines.base import BatchEngine, Engine, StepEngine, StreamEngine
from headrace.errors import ConfigError
from headrace.events import Listener
from headrace.wording import shown

RecordT = TypeVar("RecordT")

Batching: TypeAlias = Literal["batches", "steps", "own"]
CostUnit: TypeAlias = Literal["tokens", "records"]

_TYPICAL_TOKENS = 16
"""Tokens of a short text."""
_LIMITS = ("batch_size", "batch_cost", "max_in_flight", "max_cost")
_OWN_COST = 65_536
"""The cost in flight assumed for an engine that does its own batching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """How to feed an engine.

    An engine that runs batches must set `batch_cost` and `batch_size`; one that works in steps, `max_in_flight` and
    `max_cost`; one that does its own batching, `max_in_flight`.

    Raises:
        ConfigError: a field is missing, out of range, or not used with this kind of batching.
    """

    batching: Batching
    """"batches": runs the batch it is given (`BatchEngine`). "steps": requests join and leave between its steps
    (`StepEngine`). "own": takes single requests and batches them itself (`StreamEngine`)."""
    cost_unit: CostUnit = "tokens"
    """What `Prepared.cost` counts; "records" for anything but tokens."""
    uniform: bool = False
    """Whether all records take the same time, so that a job finds the best number of them in a batch by measuring."""
    pads: bool = False
    """Whether a batch costs records × its longest record instead of the sum."""
    batch_cost: float = 0
    """Default maximum cost of a batch."""
    batch_size: int = 0
    """Default maximum number of records in a batch."""
    overlaps: bool = False
    """Whether a second call of `forward`, on another thread, copies its batch while the first one computes."""
    batch_delay_s: float | None = None
    """How long a job's record waits for others while the engine is idle; None for the job's default."""
    max_in_flight: int = 0
    """Maximum concurrent requests. More would only wait inside the engine."""
    max_cost: float = 0
    """Maximum total cost of the active requests, in the unit of `span`."""
    max_model_len: int | None = None
    """Maximum input length in tokens; None if unknown."""
    dimension: int | None = None
    """Dimension of its vectors; None if it returns none, or unknown."""
    matryoshka: Sequence[int] = ()
    """Smaller dimensions that its vectors may be truncated to."""
    prepare_rows: int | None = None
    """Records per call of `prepare`, if preparing takes much time or memory; None for as many as were read together."""
    splits: bool = False
    """Whether it splits a record that is longer than `max_model_len` into parts."""
    followable: bool = False
    """Whether it can stream answers (`FollowableEngine`)."""
    prompt_names: Sequence[str] = ()
    """Names of prompts that a record may choose (`PromptedText`)."""
    tunable: bool = False
    """Whether it can be loaded in another `dtype` (`TunableEngine`)."""
    sizes_steps: bool = False
    """Whether a job may find the size of its steps (`SteppingEngine`)."""
    tokenizes: bool = False
    """Whether it takes token ids and makes them (`TokenizingEngine`)."""
    remote: bool = False
    """Whether it sends requests to servers (`RequestingEngine`)."""
    prepares_columns: bool = False
    """Whether it prepares the inputs of a block at once (`ColumnEngine`)."""
    draws: bool = False
    """Whether it may draw random numbers for an answer, by the request's place (`Placed`)."""
    holds_forms: bool = False
    """Whether it takes a `FormedRequest`, and holds the answer to its form as far as it can."""
    caches_prefixes: bool = False
    """Whether prompts that begin with the same tokens are computed once (`PrefixCachingEngine`)."""
    workers_cache_prefixes: bool = False
    """Whether the workers behind it share prefixes; how much they save is not known here."""

    def __post_init__(self) -> None:
        one_of("batching", self.batching, get_args(Batching))
        one_of("cost_unit", self.cost_unit, get_args(CostUnit))
        for field in fields(self):
            if isinstance(field.default, bool):
                one_of(field.name, getattr(self, field.name), (False, True))
        for name in (*_LIMITS, *InBatches.optional):
            value = getattr(self, name)
            if name in self.kind.needed:
                number(name, value, above=0) if name.endswith("_cost") else whole(name, value, 1)
            elif value and name not in self.kind.optional:
                raise ConfigError(f"{name} is {value!r}: an engine with batching={self.batching!r} does not use it")
        if self.batch_delay_s is not None:
            number("batch_delay_s", self.batch_delay_s, minimum=0)
        for name in ("max_model_len", "dimension", "prepare_rows"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)

    @property
    def kind(self) -> Kind:
        """What follows from `batching`."""
        return KINDS[self.batching]

    @property
    def runs_batches(self) -> bool:
        return isinstance(self.kind, InBatches)

    def tuned(self, batch_tokens: int | None, batch_size: int | None = None) -> EngineProfile:
        """The profile with the user's budget and size, if the engine's kind of batching uses them.

        Raises:
            ConfigError: a value is out of range.
        """
        for name, value in (("batch_tokens", batch_tokens), ("batch_size", batch_size)):
            if value is not None:
                whole(name, value, 1)
        return self.kind.tuned(self, batch_tokens, batch_size)

    @property
    def counts_tokens(self) -> bool:
        return self.cost_unit == "tokens"

    @property
    def wants_prefix_order(self) -> bool:
        """Whether prompts that begin alike should come one after the other."""
        return self.caches_prefixes or self.workers_cache_prefixes

    @property
    def width(self) -> int:
        """Maximum records processed at the same time."""
        return self.batch_size or self.max_in_flight

    @property
    def full_cost(self) -> float:
        """Maximum cost processed at the same time."""
        return self.batch_cost or self.max_cost or _OWN_COST

    @property
    def largest_record(self) -> float:
        """Maximum cost of one record, as far as known."""
        if self.splits:
            return sys.maxsize
        return self.max_model_len or self.max_cost or sys.maxsize

    @property
    def slots(self) -> int:
        """Maximum requests of one step; 0 for an engine without steps."""
        return self.max_in_flight if isinstance(self.kind, InSteps) else 0

    @property
    def window(self) -> int:
        """How many waiting records length bucketing may reorder: about 16 batches of short texts.

        A larger window would pad a little less. But finished records are scattered over the window, and only
        contiguous runs can be committed, so a kill would lose more of a slow engine's work.
        """
        if self.uniform:
            return 2 * self.batch_size
        return max(16 * min(self.batch_size, int(self.batch_cost / _TYPICAL_TOKENS)), 256)


class EngineCalls(Protocol[RecordT]):
    """What a batcher calls to run a job's or server's records on an engine of each kind."""

    def batches(self, engine: BatchEngine) -> Callable[[list[RecordT]], Sequence[object]]:
        """The function that runs a batch of records."""
        ...

    def steps(self, engine: StepEngine) -> StepModel[RecordT, object]:
        """The step model of records."""
        ...

    def requests(self, engine: StreamEngine) -> Callable[[RecordT], Awaitable[object]]:
        """The function that runs one record."""
        ...


_Forward: TypeAlias = Callable[[list[object]], Sequence[object]]


@dataclass(frozen=True, slots=True)
class PayloadCalls:
    """The `EngineCalls` of a server, whose records are the payloads themselves.

    Args:
        around: wraps the function that runs a batch; None for nothing.
    """

    around: Callable[[_Forward], _Forward] | None = None

    def batches(self, engine: BatchEngine) -> _Forward:
        return engine.forward if self.around is None else self.around(engine.forward)

    def steps(self, engine: StepEngine) -> StepModel[object, object]:
        return engine

    def requests(self, engine: StreamEngine) -> Callable[[object], Awaitable[object]]:
        return engine.infer


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """Settings that the engine's profile does not contain."""

    listener: Listener
    max_queue_size: int | None = None
    """Maximum waiting records; None for the engine's window."""
    batch_delay_s: float | None = None
    """Seconds that a record waits for others while the engine is free; None for the engine's value, or 0.05."""
    cost_estimator: CostEstimatorFn | None = None
    """None if each record is submitted with its cost."""
    process_timeout_s: float | None = None
    """Maximum seconds of a batch, step or request; None for no limit."""


class Kind(ABC):
    """One way to feed an engine: which fields the profile states, what follows from them, and the batcher."""

    methods: ClassVar[tuple[str, ...]]
    """The methods that an engine of this kind has, besides those of all engines."""
    needed: ClassVar[tuple[str, ...]]
    """The fields that a profile must state."""
    optional: ClassVar[tuple[str, ...]] = ()
    """The fields that only a profile of this kind may state."""
    attributes: ClassVar[Mapping[str, str]]
    """The attributes of an engine without a profile, by the profile's field."""
    finds_late_record: ClassVar[bool] = True
    """Whether it is known which record caused a call to take too long."""
    ends_late_calls: ClassVar[bool] = False
    """Whether a call that takes too long can be ended."""
    spans: ClassVar[bool] = False
    """Whether the engine's `span` tells a batcher what a record costs."""

    def tuned(self, profile: EngineProfile, batch_tokens: int | None, batch_size: int | None) -> EngineProfile:  # noqa: ARG002  # an engine that batches by itself has limits of its own
        """The profile with the user's budget and size, if this kind uses them."""
        return profile

    def estimate(self, cost: float) -> float | None:
        """The cost estimate for a batcher; None if the engine's `span` provides it."""
        return None if self.spans else cost

    def keeps_busy(self, profile: EngineProfile) -> int:
        """How many typical records keep the engine busy."""
        return profile.max_in_flight

    @abstractmethod
    def batcher(
        self, engine: Engine, profile: EngineProfile, calls: EngineCalls[RecordT], settings: BatcherSettings
    ) -> Batcher[RecordT, object]:
        """The batcher for an engine."""


class InBatches(Kind):
    """The engine runs the batches that are formed for it."""

    methods = ("forward",)
    needed = ("batch_cost", "batch_size")
    optional = ("pads", "uniform", "overlaps", "batch_delay_s")
    attributes: ClassVar = {"pads": "pads", "batch_cost": "default_batch_cost", "batch_size": "default_batch_size"}

    def tuned(self, profile: EngineProfile, batch_tokens: int | None, batch_size: int | None) -> EngineProfile:
        # If cost counts records, a larger batch size needs a larger budget.
        budget = batch_tokens or max(profile.batch_cost, batch_size or 0)
        return replace(profile, batch_cost=budget, batch_size=profile.batch_size if batch_size is None else batch_size)

    def keeps_busy(self, profile: EngineProfile) -> int:
        typical = _TYPICAL_TOKENS if profile.counts_tokens else 1
        return max(min(profile.batch_size, int(profile.batch_cost / typical)), 1)

    def batcher(
        self, engine: Engine, profile: EngineProfile, calls: EngineCalls[RecordT], settings: BatcherSettings
    ) -> Batcher[RecordT, object]:
        delay_s = profile.batch_delay_s if settings.batch_delay_s is None else settings.batch_delay_s
        return DynamicBatcher(
            functools.partial(called, "the engine", calls.batches(cast("BatchEngine", engine))),
            cost_estimator=settings.cost_estimator,
            target_batch_cost=profile.batch_cost,
            max_batch_size=profile.batch_size,
            batch_timeout_s=0.05 if delay_s is None else delay_s,
            max_queue_size=settings.max_queue_size or profile.window,
            prefetch_batches=0,
            padded=profile.pads,
            length_bucketing=profile.window if profile.pads else False,  # equal lengths help only with padding
            overlap=profile.overlaps,
            on_error="isolate",
            process_timeout_s=settings.process_timeout_s,
            listener=settings.listener,
        )


class InSteps(Kind):
    """Requests join and leave between the engine's steps."""

    methods = ("span", "add", "step", "needs", "remove")
    needed = ("max_in_flight", "max_cost")
    attributes: ClassVar = {"max_in_flight": "max_slots", "max_cost": "max_cost"}
    finds_late_record = False
    spans = True

    def tuned(self, profile: EngineProfile, batch_tokens: int | None, batch_size: int | None) -> EngineProfile:  # noqa: ARG002  # its slots are the engine's own
        return replace(profile, max_cost=batch_tokens or profile.max_cost)

    def batcher(
        self, engine: Engine, profile: EngineProfile, calls: EngineCalls[RecordT], settings: BatcherSettings
    ) -> Batcher[RecordT, object]:
        most_slots = 8 if profile.sizes_steps else 2
        return ContinuousBatcher(
            calls.steps(cast("StepEngine", engine)),
            max_slots=profile.max_in_flight,
            max_cost=profile.max_cost,
            max_queue_size=settings.max_queue_size or max(most_slots * profile.max_in_flight, 64),
            on_error="isolate",
            process_timeout_s=settings.process_timeout_s,
            listener=settings.listener,
        )


class ByItself(Kind):
    """The engine takes single requests and batches them itself."""

    methods = ("infer",)
    needed = ("max_in_flight",)
    attributes: ClassVar = {"max_in_flight": "max_in_flight"}
    ends_late_calls = True

    def batcher(
        self, engine: Engine, profile: EngineProfile, calls: EngineCalls[RecordT], settings: BatcherSettings
    ) -> Batcher[RecordT, object]:
        return PassthroughBatcher(
            calls.requests(cast("StreamEngine", engine)),
            max_in_flight=profile.max_in_flight,
            max_queue_size=settings.max_queue_size or 1_000,
            cost_estimator=settings.cost_estimator,
            process_timeout_s=settings.process_timeout_s,
            listener=settings.listener,
        )


KINDS: Mapping[Batching, Kind] = {"own": ByItself(), "steps": InSteps(), "batches": InBatches()}


def profile_of(engine: object) -> EngineProfile:
    """The engine's profile, or one made from its attributes if it has none.

    Raises:
        ConfigError: it has neither, or an attribute is out of range.
    """
    own = getattr(engine, "profile", None)
    if isinstance(own, EngineProfile):
        return own
    try:
        return from_attributes(engine)
    except ConfigError as error:
        if own is None:
            raise
        raise ConfigError(
            f"the profile of engine {type(engine).__name__} is {shown(own)}: it must be an EngineProfile"
        ) from error


def from_attributes(engine: object) -> EngineProfile:
    """The profile of an engine that describes itself by attributes, such as `default_batch_cost`.

    Raises:
        ConfigError: attributes are missing or out of range.
    """
    for batching, kind in KINDS.items():  # noqa: B007  # it is used after the loop
        names = kind.attributes
        if all(callable(getattr(engine, name, None)) for name in kind.methods) and all(
            hasattr(engine, name) for name in names.values()
        ):
            break
    else:
        raise ConfigError(
            f"engine {type(engine).__name__} does not say how to feed it: give it a profile, see docs/engines.md"
        )
    unit: CostUnit = "tokens" if getattr(engine, "counts_tokens", True) else "records"
    try:
        return EngineProfile(
            batching=batching,
            cost_unit=unit,
            batch_delay_s=getattr(engine, "default_batch_delay_s", None) if "batch_delay_s" in kind.optional else None,
            max_model_len=getattr(engine, "max_model_len", None),
            dimension=getattr(engine, "dimension", None),
            matryoshka=getattr(engine, "matryoshka", ()),
            prepare_rows=getattr(engine, "prepare_rows", None),
            followable=callable(getattr(engine, "follow", None)),
            tunable=callable(getattr(engine, "dtype_speeds", None)),
            **{field: getattr(engine, name) for field, name in names.items()},
        )
    except ConfigError as error:
        field, _, words = str(error).partition(" ")
        raise ConfigError(f"engine {type(engine).__name__}: {names.get(field, field)} {words}") from error
