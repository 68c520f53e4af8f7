"""Headrace keeps GPUs busy: dynamic batching, overlapped bulk jobs, one shared model for many callers."""

from __future__ import annotations

TYPE_CHECKING = False  # avoids the time to import typing
if TYPE_CHECKING:
    from headrace import errors
    from headrace.app.loaded import LoadedModel, load
    from headrace.app.run import arun, run
    from headrace.app.running_job import RunningJob
    from headrace.app.servers.server import build_app as build_app
    from headrace.app.servers.settings import ServerSettings
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
    from headrace.engines.declaring import EngineOptions, Task
    from headrace.engines.generation.options import Generation, StaticGeneration
    from headrace.engines.onnx.options import (
        OnnxClassification,
        OnnxEmbedding,
        OnnxImageClassification,
        OnnxImageEmbedding,
        OnnxScoring,
        OnnxZeroShot,
    )
    from headrace.engines.profile import EngineProfile
    from headrace.engines.remote.options import Endpoint, EndpointClassification, EndpointEmbedding
    from headrace.engines.text.options import (
        Classification,
        Embedding,
        MultiVectorEmbedding,
        Scoring,
        SparseEmbedding,
        ZeroShot,
    )
    from headrace.engines.torchserve.options import TorchServe
    from headrace.engines.vision.options import ImageClassification, ImageEmbedding
    from headrace.engines.vllm.options import VllmClassification, VllmEmbedding, VllmGeneration, VllmScoring
    from headrace.io.sources.selection import Selection
    from headrace.jobs.settings import JobSettings, Limits
    from headrace.observe.exporters.mlflow_listener import MLflowListener
    from headrace.observe.exporters.wandb_listener import WandbListener
    from headrace.pool.pool import ModelPool
    from headrace.pool.reusable import ReusablePool
    from headrace.serving.limits import ServeLimits

__version__ = "0.1.0"

__all__ = [
    "BatchStats", "Batched", "Batcher", "BlockedLoopWarning", "Classification", "ContinuousBatcher", "CostEstimator",
    "CostEstimatorFn", "Done", "DynamicBatcher", "Embedding", "Endpoint", "EndpointClassification", "EndpointEmbedding",
    "EngineOptions", "EngineProfile", "Generation", "ImageClassification", "ImageEmbedding", "JobSettings", "Limits",
    "LoadedModel", "MLflowListener", "ModelPool", "MultiVectorEmbedding", "NoTokenEstimateWarning",
    "OnnxClassification", "OnnxEmbedding", "OnnxImageClassification", "OnnxImageEmbedding", "OnnxScoring",
    "OnnxZeroShot", "Prepared", "Prompt", "ReusablePool", "RunningJob", "Scoring", "Selection", "ServeLimits",
    "ServerSettings", "SparseEmbedding", "StaticGeneration", "StepFunction", "StepModel", "Task", "TokenBatcher",
    "TokenEstimator", "TokenEstimatorFn", "TorchServe", "VllmClassification", "VllmEmbedding", "VllmGeneration",
    "VllmScoring", "WandbListener", "ZeroShot", "arun", "batched", "errors", "load", "map_batches", "map_concurrent",
    "reusable", "run",
]  # fmt: skip

_NAMES: dict[str, tuple[str, ...]] = {
    "app.loaded": ("LoadedModel", "load"),
    "app.run": ("arun", "run"),
    "app.running_job": ("RunningJob",),
    "app.servers.server": ("build_app",),
    "app.servers.settings": ("ServerSettings",),
    "batching.batcher": ("Batcher",),
    "batching.continuous": ("ContinuousBatcher",),
    "batching.decorator": ("Batched", "batched"),
    "batching.dispatch.offload": ("BlockedLoopWarning",),
    "batching.dynamic": ("DynamicBatcher",),
    "batching.policy.cost": ("CostEstimator", "CostEstimatorFn", "TokenEstimator", "TokenEstimatorFn"),
    "batching.stats": ("BatchStats",),
    "batching.step_model": ("Done", "StepFunction", "StepModel"),
    "batching.tokens": ("NoTokenEstimateWarning", "Prompt", "TokenBatcher"),
    "concurrency.fanout": ("map_concurrent",),
    "concurrency.map_batches": ("map_batches",),
    "concurrency.reusable": ("reusable",),
    "engines.base": ("Prepared",),
    "engines.declaring": ("EngineOptions", "Task"),
    "engines.generation.options": ("Generation", "StaticGeneration"),
    "engines.onnx.options": (
        "OnnxClassification",
        "OnnxEmbedding",
        "OnnxImageClassification",
        "OnnxImageEmbedding",
        "OnnxScoring",
        "OnnxZeroShot",
    ),
    "engines.profile": ("EngineProfile",),
    "engines.remote.options": ("Endpoint", "EndpointClassification", "EndpointEmbedding"),
    "engines.text.options": (
        "Classification",
        "Embedding",
        "MultiVectorEmbedding",
        "Scoring",
        "SparseEmbedding",
        "ZeroShot",
    ),
    "engines.torchserve.options": ("TorchServe",),
    "engines.vision.options": ("ImageClassification", "ImageEmbedding"),
    "engines.vllm.options": ("VllmClassification", "VllmEmbedding", "VllmGeneration", "VllmScoring"),
    "io.sources.selection": ("Selection",),
    "jobs.settings": ("JobSettings", "Limits"),
    "observe.exporters.mlflow_listener": ("MLflowListener",),
    "observe.exporters.wandb_listener": ("WandbListener",),
    "pool.pool": ("ModelPool",),
    "pool.reusable": ("ReusablePool",),
    "serving.limits": ("ServeLimits",),
}
"""The names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


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
