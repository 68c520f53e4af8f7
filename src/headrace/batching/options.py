"""A batcher's options. The checks raise a ConfigError that names the parameter, its value and the allowed range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from headrace.batching.callables import ProcessFn, plain_function
from headrace.batching.policy.cost import BatchLimits
from headrace.errors import ConfigError
from headrace.events import Listener

ValueT = TypeVar("ValueT")

OnError: TypeAlias = Literal["fail", "isolate"]
"""What to do with a failed batch."""
NO_BUDGET = 1e18
"""A `target_batch_cost` without effect."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options common to all batchers. Raises ConfigError: an option is out of range."""

    name: str
    """The batcher's class name, for messages, tasks and threads."""
    limits: BatchLimits
    """The limits of a batch."""
    capacity: int
    """Records that may wait."""
    in_flight: int
    """Maximum records that the dispatcher holds at a time."""
    process_timeout_s: float | None
    listener: Listener | None
    max_queue_cost: float | None = None
    on_error: OnError = "fail"
    oversized: Literal["alone", "reject"] = "alone"

    def __post_init__(self) -> None:
        optional("max_queue_cost", self.max_queue_cost, above=0)
        optional("process_timeout_s", self.process_timeout_s, above=0)
        one_of("on_error", self.on_error, ("fail", "isolate"))
        one_of("oversized", self.oversized, ("alone", "reject"))
        function("listener", self.listener, needed=False, plain=True)

    @property
    def reject_oversized(self) -> bool:
        """Whether to reject a record that exceeds the batch budget."""
        return self.oversized == "reject"


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of the batch dispatcher. Raises ConfigError: an option is out of range."""

    process_fn: ProcessFn
    batch_timeout_s: float = 0
    max_concurrent_batches: int = 1
    offload: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        function("process_fn", self.process_fn, needed=True)
        number("batch_timeout_s", self.batch_timeout_s, minimum=0)
        whole("max_concurrent_batches", self.max_concurrent_batches, 1)
        one_of("offload", self.offload, (False, True))
        one_of("overlap", self.overlap, (False, True))

    @property
    def slots(self) -> int:
        """Maximum batches in `process_fn`, including one that waits there."""
        return self.max_concurrent_batches + self.overlap


def whole(name: str, value: object, minimum: int) -> int:
    """`value` if it is an int >= `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}: it must be an int >= {minimum}")
    return value


def number(name: str, value: object, *, above: float | None = None, minimum: float | None = None) -> float:
    """`value` if it is a finite number > `above` or >= `minimum`."""
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (above is None or value > above)
        and (minimum is None or value >= minimum)
    ):
        return value
    allowed = f"> {above}" if above is not None else f">= {minimum}"
    raise ConfigError(f"{name} is {value!r}: it must be a finite number {allowed}")


def optional(name: str, value: object, *, above: float) -> float | None:
    """`value` if it is None or a finite number > `above`."""
    return None if value is None else number(name, value, above=above)


def one_of(name: str, value: ValueT, allowed: tuple[str | bool, ...]) -> ValueT:
    """`value` if it is one of `allowed`, in type too."""
    if not any(value is other or (type(value) is type(other) is str and value == other) for other in allowed):
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, allowed))}")
    return value


def function(name: str, value: ValueT, *, needed: bool, plain: bool = False) -> ValueT:
    """`value` if it is callable, or None where allowed; with `plain`, async and generator functions are refused."""
    if not callable(value) and (needed or value is not None):
        raise ConfigError(f"{name} is {value!r}: it must be a function{'' if needed else ' or None'}")
    if plain:
        plain_function(name, value)
    return value
