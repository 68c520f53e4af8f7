"""What a batcher was told. The checks raise a ConfigError that names the parameter, its value and the allowed range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.batching.callables import plain_function
from headrace.batching.dispatch.isolation import OnError
from headrace.batching.policy.bucketing import Limits
from headrace.errors import ConfigError
from headrace.events import Listener

NO_BUDGET = 1e18
"""A `target_batch_cost` that limits nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """What every batcher knows, whatever its dispatcher.

    Raises:
        ConfigError: one is out of its range.
    """

    name: str
    """Of the batcher's class, for messages, tasks and threads."""
    limits: Limits
    """What the dispatcher may take from the waiting records at a time."""
    capacity: int
    """Records that may wait."""
    in_flight: int
    """Most records that the dispatcher holds at a time."""
    max_queue_cost: float | None
    process_timeout_s: float | None
    on_error: OnError
    oversized: Literal["alone", "reject"]
    listener: Listener | None

    def __post_init__(self) -> None:
        optional("max_queue_cost", self.max_queue_cost, above=0)
        optional("process_timeout_s", self.process_timeout_s, above=0)
        one_of("on_error", self.on_error, ("fail", "isolate"))
        one_of("oversized", self.oversized, ("alone", "reject"))
        function("listener", self.listener, needed=False, plain=True)

    @property
    def reject_oversized(self) -> bool:
        """Whether a record that alone costs more than the budget is refused."""
        return self.oversized == "reject"


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What only a dispatcher of batches knows.

    Raises:
        ConfigError: one is out of its range.
    """

    process_fn: Callable[[list[Any]], Any]
    batch_timeout_s: float = 0
    max_concurrent_batches: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        function("process_fn", self.process_fn, needed=True)
        number("batch_timeout_s", self.batch_timeout_s, minimum=0)
        whole("max_concurrent_batches", self.max_concurrent_batches, 1)
        one_of("offload", self.offload, (False, True))


def whole(name: str, value: Any, minimum: int) -> int:
    """`value` if it is an int >= `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}: it must be an int >= {minimum}")
    return value


def number(name: str, value: Any, *, above: float | None = None, minimum: float | None = None) -> float:
    """`value` if it is a finite number > `above` or >= `minimum`."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (above is not None and value <= above) or (minimum is not None and value < minimum):
        allowed = f"> {above}" if above is not None else f">= {minimum}"
        raise ConfigError(f"{name} is {value!r}: it must be a finite number {allowed}")
    return value  # type: ignore[no-any-return]


def optional(name: str, value: Any, *, above: float) -> float | None:
    """`value` if it is None or a finite number > `above`."""
    return None if value is None else number(name, value, above=above)


def one_of(name: str, value: Any, allowed: tuple[str | bool, ...]) -> Any:
    """`value` if it is one of `allowed`, in type too."""
    if not any(value is other or (type(value) is type(other) is str and value == other) for other in allowed):
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, allowed))}")
    return value


def function(name: str, value: Any, *, needed: bool, plain: bool = False) -> Any:
    """`value` if it can be called, or is None where that is allowed; `plain` if its call alone must do the work."""
    if not callable(value) and (needed or value is not None):
        raise ConfigError(f"{name} is {value!r}: it must be a function{'' if needed else ' or None'}")
    if plain:
        plain_function(name, value)
    return value
