"""The engine profile: what batchers, jobs, servers and workers must know about an engine to use it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, get_args

from headrace.batching.options import number, one_of, whole
from headrace.errors import ConfigError
from headrace.wording import shown

Batching: TypeAlias = Literal["batches", "steps", "own"]
CostUnit: TypeAlias = Literal["tokens", "records"]

_TYPICAL_TOKENS = 16
"""Tokens of a short text."""
_OWN_COST = 65_536
"""The cost in flight assumed for an engine that does its own batching."""
_NEEDED: Mapping[Batching, tuple[str, ...]] = {
    "batches": ("batch_cost", "batch_size"),
    "steps": ("max_in_flight", "max_cost"),
    "own": ("max_in_flight",),
}
_BATCHES_ONLY = ("pads", "overlaps", "batch_delay_s")
_METHODS: Mapping[Batching, tuple[str, ...]] = {
    "own": ("infer",),
    "steps": ("span", "add", "step", "needs", "remove"),
    "batches": ("forward",),
}
_ATTRIBUTES: Mapping[Batching, Mapping[str, str]] = {
    "own": {"max_in_flight": "max_in_flight"},
    "steps": {"max_in_flight": "max_slots", "max_cost": "max_cost"},
    "batches": {"pads": "pads", "batch_cost": "default_batch_cost", "batch_size": "default_batch_size"},
}
"""Attributes of an engine without a profile, by the profile's field."""


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
    tokenizes: bool = False
    """Whether it takes token ids and makes them (`TokenizingEngine`)."""
    remote: bool = False
    """Whether it sends requests to servers (`RemoteEngine`)."""
    draws: bool = False
    """Whether it may draw random numbers for an answer, by the request's place (`Placed`)."""
    caches_prefixes: bool = False
    """Whether prompts that begin with the same tokens are computed once (`PrefixCachingEngine`)."""
    workers_cache_prefixes: bool = False
    """Whether the workers behind it do so; how much they save is not known here."""

    def __post_init__(self) -> None:
        one_of("batching", self.batching, get_args(Batching))
        one_of("cost_unit", self.cost_unit, get_args(CostUnit))
        one_of("pads", self.pads, (False, True))
        one_of("overlaps", self.overlaps, (False, True))
        one_of("followable", self.followable, (False, True))
        one_of("tunable", self.tunable, (False, True))
        one_of("tokenizes", self.tokenizes, (False, True))
        one_of("remote", self.remote, (False, True))
        one_of("draws", self.draws, (False, True))
        one_of("caches_prefixes", self.caches_prefixes, (False, True))
        one_of("workers_cache_prefixes", self.workers_cache_prefixes, (False, True))
        needed = _NEEDED[self.batching]
        for name in ("batch_size", "batch_cost", "max_in_flight", "max_cost", *_BATCHES_ONLY):
            value = getattr(self, name)
            if name in needed:
                number(name, value, above=0) if name.endswith("_cost") else whole(name, value, 1)
            elif value and not (name in _BATCHES_ONLY and self.batching == "batches"):
                raise ConfigError(f"{name} is {value!r}: an engine with batching={self.batching!r} does not use it")
        if self.batch_delay_s is not None:
            number("batch_delay_s", self.batch_delay_s, minimum=0)
        for name in ("max_model_len", "dimension", "prepare_rows"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)

    def tuned(self, batch_tokens: int | None, batch_size: int | None = None) -> EngineProfile:
        """The profile with the user's budget and size, if the engine's kind of batching uses them.

        Raises:
            ConfigError: a value is out of range.
        """
        for name, value in (("batch_tokens", batch_tokens), ("batch_size", batch_size)):
            if value is not None:
                whole(name, value, 1)
        if self.batching == "own":
            return self
        if self.batching == "steps":
            return replace(self, max_cost=batch_tokens or self.max_cost)
        # If cost counts records, a larger batch size needs a larger budget.
        budget = batch_tokens or max(self.batch_cost, batch_size or 0)
        return replace(self, batch_cost=budget, batch_size=self.batch_size if batch_size is None else batch_size)

    @property
    def counts_tokens(self) -> bool:
        """Whether a record's cost is its number of tokens."""
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

    def estimate(self, cost: float) -> float | None:
        """The cost estimate for a batcher; None if the engine's `span` provides it."""
        return None if self.batching == "steps" else cost

    @property
    def keeps_busy(self) -> int:
        """How many typical records keep the engine busy."""
        if self.batching != "batches":
            return self.max_in_flight
        return max(min(self.batch_size, int(self.batch_cost / (_TYPICAL_TOKENS if self.counts_tokens else 1))), 1)

    @property
    def window(self) -> int:
        """How many waiting records length bucketing may reorder: about 16 batches of short texts.

        A larger window would pad a little less. But finished records are scattered over the window, and only
        contiguous runs can be committed, so a kill would lose more of a slow engine's work.
        """
        return max(16 * min(self.batch_size, int(self.batch_cost / _TYPICAL_TOKENS)), 256)


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
    for batching, names in _ATTRIBUTES.items():
        if all(callable(getattr(engine, name, None)) for name in _METHODS[batching]) and all(
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
            batch_delay_s=getattr(engine, "default_batch_delay_s", None) if batching == "batches" else None,
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


def check_methods(engine: object, profile: EngineProfile) -> None:
    """Check that an engine has the methods that its profile requires.

    Raises:
        ConfigError: a method is missing.
    """
    follow = ("follow",) if profile.followable else ()
    tokenize = ("tokenize", "detokenize", "token_strings") if profile.tokenizes else ()
    counts = ("prefix_cache_stats", "count_cached") if profile.caches_prefixes else ()
    use = ("use",) if profile.remote else ()
    for name in ("describe", "prepare", *_METHODS[profile.batching], *follow, *tokenize, *counts, *use, "close"):
        if not callable(getattr(engine, name, None)):
            raise ConfigError(
                f"engine {type(engine).__name__} has no method {name}, which an engine with "
                f"batching={profile.batching!r} needs; see docs/engines.md"
            )


class Sleeper(Protocol):
    """A model that can wait in host memory while others use its device. Neither method is called while it computes."""

    def sleep(self) -> None:
        """Move the weights to host memory, and free the device."""
        ...

    def wake(self) -> None:
        """Undo `sleep`.

        Raises:
            Exception: it cannot; close the engine.
        """
        ...


def sleeper_of(engine: object) -> Sleeper | None:
    """What moves the engine to host memory; None if it cannot be moved."""
    found: Sleeper | None = getattr(engine, "sleeper", None)
    return found
