"""Headrace keeps GPUs busy: dynamic batching, overlapped bulk jobs, one shared model for many callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.batching.batcher import Batcher
from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.cost import CostEstimator, CostEstimatorFn, TokenEstimator, TokenEstimatorFn
from headrace.batching.decorator import Batched, batched
from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.offload import BlockedLoopWarning
from headrace.batching.stats import BatchStats
from headrace.batching.stepping import Done, StepFunction
from headrace.batching.tokens import NoTokenEstimateWarning, Prompt, TokenBatcher
from headrace.concurrency.map_batches import map_batches

if TYPE_CHECKING:
    from headrace.concurrency.fanout import map_concurrent
    from headrace.concurrency.reusable import reusable
    from headrace.wiring import run

__version__ = "0.1.0"

__all__ = [
    "BatchStats",
    "Batched",
    "Batcher",
    "BlockedLoopWarning",
    "ContinuousBatcher",
    "CostEstimator",
    "CostEstimatorFn",
    "Done",
    "DynamicBatcher",
    "NoTokenEstimateWarning",
    "Prompt",
    "StepFunction",
    "TokenBatcher",
    "TokenEstimator",
    "TokenEstimatorFn",
    "batched",
    "errors",
    "map_batches",
    "map_concurrent",
    "reusable",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "map_concurrent":
        from headrace.concurrency.fanout import map_concurrent

        return map_concurrent
    if name == "reusable":
        from headrace.concurrency.reusable import reusable

        return reusable
    if name == "run":  # brings in the whole house: only for those who run jobs
        from headrace.wiring import run

        return run
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
