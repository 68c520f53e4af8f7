"""Which model to load or unload now. Pure: callers pass the time.

The cost of a switch is the time to load a model, so a switch has to be worth it:

* A request for a model that is not loaded waits until room is free, or until its *hold* is over, whichever comes
  first. The hold is `max_wait_s`, or twice the time that the model takes to load: as in the ski-rental problem (Karlin
  et al., 1988), waiting for about the price of a switch costs at most a small factor more than knowing the future.
* Meanwhile the loaded models serve. A model without requests makes room as soon as it has been unused for that hold.
  A model with requests makes room when the hold is over, but not before it has been loaded for `RESIDENCY` times its
  own loading time. So under a permanent backlog of all models, at most a share of 1 / (1 + RESIDENCY) of the time goes
  to loading.
* A model that has been unused for less than that hold counts as one with requests: callers who ask again after each
  answer leave it without requests for a moment. Otherwise a model that loads slowly would lose its room at the first
  such moment to one whose requests have waited for their short hold, and load for longer than it serves.
* Models whose requests have waited longest relative to their hold come first. So a request waits at most for its hold,
  for the residency, the last requests and the loading of each model before it, and for its own model to load.
* Background work waits behind requests. It takes free room, and that of a model that has been unused for the hold. It
  takes the room of a model with requests, or with other background work, only after `BACKGROUND_HOLD_S`. Where a
  request needs the room, a model that only background work uses counts as unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

HOLD = 2.0
"""Hold of a request without `max_wait_s`, in multiples of the model's loading time."""
RESIDENCY = 10.0
"""Minimum time in memory of a model with requests, in multiples of its loading time."""
BACKGROUND_HOLD_S = 600.0
"""Minimum hold of background work, where a model with requests would have to make room for it."""


class Phase(Enum):
    """Where a model is in its life."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    """It is to be unloaded and serves its last requests; later ones wait."""
    UNLOADING = "unloading"
    ASLEEP = "asleep"
    """It is in host memory, not on the device, and can be woken."""
    DROPPING = "dropping"
    """It leaves host memory."""

    @property
    def is_out(self) -> bool:
        """Whether it takes no memory of the device."""
        return self in (Phase.UNLOADED, Phase.ASLEEP, Phase.DROPPING)


@dataclass(frozen=True, slots=True)
class ModelView:
    """What the policy knows of a model. Times are in seconds, on the caller's clock."""

    name: str
    phase: Phase
    size: float
    """Memory, in the unit of the budget; the whole budget while it is not known."""
    load_s: float
    """Expected time to load it, or to wake it if it is asleep."""
    max_wait_s: float | None = None
    idle_timeout_s: float | None = None
    in_use: int = 0
    """Requests that use the model now."""
    waiting_since: float | None = None
    """When the oldest waiting request arrived; None if none waits."""
    loaded_at: float = 0.0
    last_used: float = 0.0
    """When the last request ended."""
    background_use: int = 0
    """Background work that uses the model now."""
    background_since: float | None = None
    """When the oldest waiting background work arrived; None if none waits."""
    background_at: float = 0.0
    """When the last background work ended."""

    @property
    def is_wanted(self) -> bool:
        """Whether a request or background work waits for it."""
        return self.waiting_since is not None or self.background_since is not None

    @property
    def hold_s(self) -> float:
        """Seconds that its requests wait before they take the room of a model with requests."""
        return HOLD * self.load_s if self.max_wait_s is None else self.max_wait_s

    @property
    def deadline(self) -> float:
        """When its oldest request has waited for the hold, or its background work if it has no request; else inf."""
        if self.waiting_since is not None:
            return self.waiting_since + self.hold_s
        if self.background_since is not None:
            return self.background_since + max(self.hold_s, BACKGROUND_HOLD_S)
        return float("inf")

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it or waits for it."""
        return not self.in_use and self.waiting_since is None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    load: tuple[str, ...] = ()
    """Models to load; there is room for them."""
    unload: tuple[str, ...] = ()
    """Models to unload once their requests are done."""
    again_at: float = float("inf")
    """When to decide again, if nothing happens before."""


def decide(now: float, models: Iterable[ModelView], budget: float) -> Decision:
    """The models to load and to unload at this time.

    Args:
        budget: memory for all models together.
    """
    models = list(models)
    free = budget - sum(model.size for model in models if not model.phase.is_out)
    coming = sum(model.size for model in models if model.phase in (Phase.DRAINING, Phase.UNLOADING))
    candidates = [model for model in models if model.phase is Phase.LOADED]
    load: list[str] = []
    unload: list[str] = []
    again_at = float("inf")
    for model in sorted(models, key=lambda model: model.deadline):
        if model.phase not in (Phase.UNLOADED, Phase.ASLEEP) or not model.is_wanted:
            continue
        if model.size <= free:
            load.append(model.name)
            free -= model.size
            continue
        missing = model.size - free
        victims, at = _victims(model, candidates, missing - coming)
        if at > now:
            again_at = min(again_at, at)
            continue
        candidates = [other for other in candidates if other not in victims]
        unload += [other.name for other in victims]
        coming += sum(other.size for other in victims) - missing  # the rest is room for the next model
        free = 0.0
    for model in candidates:
        if model.is_idle and not model.background_use and model.idle_timeout_s is not None:
            ends = max(model.last_used, model.background_at) + model.idle_timeout_s
            if ends <= now:
                unload.append(model.name)
            else:
                again_at = min(again_at, ends)
    return Decision(tuple(load), tuple(unload), again_at)


def _victims(model: ModelView, loaded: Sequence[ModelView], missing: float) -> tuple[list[ModelView], float]:
    """Models to unload for this much memory, and the earliest time for it; inf if all of them would not be enough."""
    if missing <= 0:
        return [], float("-inf")
    order = sorted(loaded, key=lambda other: (_may_go_at(other, model), other.background_use, other.last_used))
    chosen: list[ModelView] = []
    total, at = 0.0, float("-inf")
    for other in order:
        chosen.append(other)
        total += other.size
        at = max(at, _may_go_at(other, model))
        if total >= missing:
            break
    else:
        return [], float("inf")
    for other in chosen[:-1]:  # the last one may be large enough without some of the others
        if total - other.size >= missing:
            chosen.remove(other)
            total -= other.size
    return chosen, at


def _may_go_at(loaded: ModelView, waiting: ModelView) -> float:
    """When a loaded model may be unloaded to make room for another."""
    behind = loaded.background_use and waiting.waiting_since is None
    resides_until = loaded.loaded_at + RESIDENCY * loaded.load_s
    with_requests = max(resides_until, waiting.deadline)
    if loaded.is_idle and not behind:
        return min(loaded.last_used + waiting.hold_s, with_requests)
    return with_requests


@dataclass(frozen=True, slots=True)
class SleeperView:
    """A model that is asleep, or could go to sleep now."""

    name: str
    size: float
    """Host memory, in the unit of the room."""
    saves_s: float
    """Seconds that waking saves over loading; inf if not known yet."""
    last_used: float


def to_sleep(models: Iterable[SleeperView], room: float) -> frozenset[str]:
    """The models to keep in host memory: those that save most time for their size; of equal ones, those used last.

    Args:
        models: those that are asleep, and the one that leaves the device.
    """
    kept: list[str] = []
    for model in sorted(models, key=lambda one: (one.saves_s / one.size, one.last_used), reverse=True):
        if model.saves_s > 0 and model.size <= room:
            kept.append(model.name)
            room -= model.size
    return frozenset(kept)
