"""Headrace keeps GPUs busy: dynamic batching, overlapped bulk jobs, one shared model for many callers."""

from __future__ import annotations

TYPE_CHECKING = False  # avoids the time to import typing
if TYPE_CHECKING:
    from headrace import errors
    from headrace.app.run import run
    from headrace.app.servers.server import build_app as build_app
    from headrace.batching.batcher import Batcher
    from headrace.batching.continuous import ContinuousBatcher
    from headrace.batching.decorator import Batched, batched
    from headrace.batching.dispatch.offload import BlockedLoopWarning
    from headrace.batching.dynamic import DynamicBatcher
    from headrace.batching.policy.cost import CostEstimator, CostEstimatorFn, TokenEstimator, TokenEstimatorFn
    from headrace.batching.stats import BatchStats
    from headrace.batching.step_model import Done, StepFunction, StepModel
    from headrace.batching.tokens import NoTokenEstimateWarning, Prompt, TokenBatcher
    from headrace.concurrency.fanout import map_concurrent
    from headrace.concurrency.map_batches import map_batches
    from headrace.concurrency.reusable import reusable
    from headrace.engines.base import Prepared
    from headrace.engines.profile import EngineProfile
    from headrace.observe.exporters.mlflow_listener import MLflowListener
    from headrace.observe.exporters.wandb_listener import WandbListener
    from headrace.pool.pool import ModelPool
    from headrace.pool.reusable import ReusablePool

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
    "EngineProfile",
    "MLflowListener",
    "ModelPool",
    "NoTokenEstimateWarning",
    "Prepared",
    "Prompt",
    "ReusablePool",
    "StepFunction",
    "StepModel",
    "TokenBatcher",
    "TokenEstimator",
    "TokenEstimatorFn",
    "WandbListener",
    "batched",
    "errors",
    "map_batches",
    "map_concurrent",
    "reusable",
    "run",
]

_MODULES = {
    "BatchStats": "batching.stats",
    "Batched": "batching.decorator",
    "Batcher": "batching.batcher",
    "BlockedLoopWarning": "batching.dispatch.offload",
    "ContinuousBatcher": "batching.continuous",
    "CostEstimator": "batching.policy.cost",
    "CostEstimatorFn": "batching.policy.cost",
    "Done": "batching.step_model",
    "DynamicBatcher": "batching.dynamic",
    "EngineProfile": "engines.profile",
    "MLflowListener": "observe.exporters.mlflow_listener",
    "ModelPool": "pool.pool",
    "NoTokenEstimateWarning": "batching.tokens",
    "Prepared": "engines.base",
    "Prompt": "batching.tokens",
    "ReusablePool": "pool.reusable",
    "StepFunction": "batching.step_model",
    "StepModel": "batching.step_model",
    "TokenBatcher": "batching.tokens",
    "TokenEstimator": "batching.policy.cost",
    "TokenEstimatorFn": "batching.policy.cost",
    "WandbListener": "observe.exporters.wandb_listener",
    "batched": "batching.decorator",
    "build_app": "app.servers.server",
    "map_batches": "concurrency.map_batches",
    "map_concurrent": "concurrency.fanout",
    "reusable": "concurrency.reusable",
    "run": "app.run",
}


def __getattr__(name: str) -> object:
    """Import names on first use, so that the command line starts fast and a batcher needs few imports.

    Raises:
        MissingExtraError: `build_app` without FastAPI. It is not in `__all__`: importing all names needs no extra.
    """
    from importlib import import_module

    if name == "errors":
        return import_module("headrace.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    try:
        found: object = getattr(import_module(f"headrace.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if name != "build_app":
            raise
        from headrace.errors import MissingExtraError

        raise MissingExtraError(f'build_app: {error}: pip install "headrace[serve]"') from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
