"""What a batcher was told, checked once: an error names the parameter, its value and the allowed range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.batching.callbacks import plain_function
from headrace.batching.isolation import OnError
from headrace.batching.window import Limits
from headrace.errors import ConfigError
from headrace.events import Listener

WINDOW_BATCHES = 16
"""`length_bucketing=True` reorders within so many full batches, as far as the waiting room holds them."""


@dataclass(frozen=True, slots=True)
class Options:
    """A batcher's parameters, each in its range."""

    name: str
    process_fn: Callable[[list[Any]], Any]
    limits: Limits
    capacity: int
    """Records that may wait."""
    max_queue_cost: float | None
    batch_timeout_s: float
    max_concurrent_batches: int
    process_timeout_s: float | None
    on_error: OnError
    reject_oversized: bool
    offload: bool
    listener: Listener | None


def checked_options(name: str, given: dict[str, Any]) -> Options:
    """The options of a batcher class `name` from its constructor's arguments.

    Raises:
        ConfigError: the first argument that is out of range.
    """
    size = whole("max_batch_size", given["max_batch_size"], 1)
    smallest = whole("min_batch_size", given["min_batch_size"], 1)
    if smallest > size:
        raise ConfigError(f"min_batch_size is {smallest!r}: it must be <= max_batch_size, {size!r}")
    queue = whole("max_queue_size", given["max_queue_size"], 1)
    capacity = queue + (whole("prefetch_batches", given["prefetch_batches"], 0) + 1) * size
    window = given["length_bucketing"]
    if isinstance(window, bool):
        window = min(WINDOW_BATCHES * size, capacity) if window else 0
    return Options(
        name=name,
        process_fn=function("process_fn", given["process_fn"], needed=True),
        limits=Limits(
            target_batch_cost=number("target_batch_cost", given["target_batch_cost"], above=0),
            max_batch_size=size,
            min_batch_size=smallest,
            padded=one_of("padded", given["padded"], (False, True)),
            window=whole("length_bucketing", window, 0),
        ),
        capacity=capacity,
        max_queue_cost=optional("max_queue_cost", given["max_queue_cost"], above=0),
        batch_timeout_s=number("batch_timeout_s", given["batch_timeout_s"], minimum=0),
        max_concurrent_batches=whole("max_concurrent_batches", given["max_concurrent_batches"], 1),
        process_timeout_s=optional("process_timeout_s", given["process_timeout_s"], above=0),
        on_error=one_of("on_error", given["on_error"], ("fail", "isolate")),
        reject_oversized=one_of("oversized", given["oversized"], ("alone", "reject")) == "reject",
        offload=one_of("offload", given["offload"], (False, True)),
        listener=function("listener", given["listener"], needed=False, plain=True),
    )


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
