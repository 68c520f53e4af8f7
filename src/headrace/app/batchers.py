"""Make a batcher from an engine's profile and the settings of a job or server."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from headrace.batching.batcher import Batcher
from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.passthrough import PassthroughBatcher
from headrace.batching.policy.cost import CostEstimatorFn
from headrace.batching.step_model import StepModel
from headrace.batching.tasks import called
from headrace.engines.base import AnyEngine, batches_itself, runs_batches, works_in_steps
from headrace.engines.profile import EngineProfile
from headrace.events import Listener

T = TypeVar("T")

_RunBatch: TypeAlias = Callable[[list[T]], Sequence[object]]
_RunOne: TypeAlias = Callable[[T], Awaitable[object]]
Process: TypeAlias = _RunBatch[T] | _RunOne[T] | StepModel[T, object]
"""Runs records; one kind each for "batches", "own" and "steps"."""


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


def engine_process(engine: AnyEngine) -> Process[object]:
    """The function or object that runs prepared records on an engine."""
    if batches_itself(engine):
        return engine.infer
    if works_in_steps(engine):
        return engine
    assert runs_batches(engine), "there is no fourth kind"
    return engine.forward


def make_batcher(profile: EngineProfile, process: Process[T], settings: BatcherSettings) -> Batcher[T, object]:
    """Make the batcher for an engine.

    Args:
        profile: the engine's profile, with the user's cost budget and batch size.
        process: runs the records; must match `profile.batching`.
        settings: see `BatcherSettings`.
    """
    if profile.batching == "own":
        return PassthroughBatcher(
            cast("_RunOne[T]", process),
            max_in_flight=profile.max_in_flight,
            max_queue_size=settings.max_queue_size or 1_000,
            cost_estimator=settings.cost_estimator,
            process_timeout_s=settings.process_timeout_s,
            listener=settings.listener,
        )
    if profile.batching == "steps":
        return ContinuousBatcher(
            cast("StepModel[T, Any]", process),
            max_slots=profile.max_in_flight,
            max_cost=profile.max_cost,
            max_queue_size=settings.max_queue_size or max(2 * profile.max_in_flight, 64),
            on_error="isolate",
            process_timeout_s=settings.process_timeout_s,
            listener=settings.listener,
        )
    delay_s = profile.batch_delay_s if settings.batch_delay_s is None else settings.batch_delay_s
    return DynamicBatcher(
        functools.partial(called, "the engine", cast("_RunBatch[T]", process)),
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
